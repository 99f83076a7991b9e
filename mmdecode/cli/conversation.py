"""The conversation of ``mmdecode ask --chat``: reads turns, prints answers piece by piece."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mmdecode.runs.console import console, out

if TYPE_CHECKING:
    from mmdecode.vlm.answerer import Answerer

HELP = """\
/image PATH...  add images to the next question
/undo           forget the last question and its answer
/clear          begin again, without images
/help           this text
/quit           end (so does the end of the input)"""


def converse(
    answerer: Answerer, images: list[str], questions: list[str], options: dict[str, Any]
) -> None:
    """Asks ``questions``, then those that are typed, until the input ends.

    Args:
        answerer: Answers the turns.
        images: Paths of the images of the first question.
        questions: Questions to ask before any is typed.
        options: Fields of `mmdecode.vlm.AnswerOptions`.
    """
    chat = answerer.chat(**options)
    pending = list(images)
    for line in _lines(questions):
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        if command == "/help":
            console.print(HELP, highlight=False, markup=False)
        elif command == "/image":
            pending += _paths(rest)
        elif command == "/clear":
            chat, pending = answerer.chat(**options), []
        elif command == "/undo":
            del chat.messages[-2:]
        elif command.startswith("/"):
            _complain(f"there is no {command}; /help lists commands")
        elif line:
            _asked(chat, line, pending)
            pending = []


def _asked(chat: Any, question: str, images: list[str]) -> None:
    """Prints an answer, or why there is none."""
    from mmdecode.runs.items import Failed
    from mmdecode.vlm.answerer import MEMORY_HINT

    written = False
    try:
        for piece in chat.stream(question, images or None):
            out.file.write(piece if written else piece.lstrip())
            out.file.flush()
            written = True
    except Exception as error:  # of any kind: the conversation goes on
        failed = Failed.of(error, MEMORY_HINT)
        _complain(f"failed: {failed.error}")
        if images:
            _complain("its images are left out of the next question; /image adds them again")
    finally:
        if written:
            out.file.write("\n")
            out.file.flush()


def _paths(words: str) -> list[str]:
    """Splits paths as a shell does; a text with an open quotation mark is one path."""
    try:
        return shlex.split(words)
    except ValueError:
        return [words]


def _complain(text: str) -> None:
    console.print(text, style="red", markup=False, highlight=False)


def _lines(questions: list[str]) -> Iterator[str]:
    """Yields the questions, then the lines of the input."""
    interactive = sys.stdin.isatty()
    for question in questions:
        if interactive:
            console.print(f"> {question}", highlight=False, markup=False)
        yield question
    if interactive:
        console.print("Type a question; /help lists commands.", style="dim")
    while True:
        try:
            line = console.input("> ") if interactive else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        yield line.strip()
