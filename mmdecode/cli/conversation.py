"""The conversation of ``mmdecode ask --chat``: reads turns, prints answers piece by piece."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mmdecode.errors import MMDecodeError
from mmdecode.runs.console import console, out, print_line
from mmdecode.runs.items import Failed

if TYPE_CHECKING:
    from mmdecode.vlm.answerer import Answerer
    from mmdecode.vlm.chat import Chat

HELP = """\
/image PATH...  add images, or those of a folder, to the next question
/undo           forget the last question and its answer; its images are kept for the next
/clear          begin again, without images
/help           this text
/quit           end (so does the end of the input)"""


def converse(
    answerer: Answerer,
    images: list[str],
    questions: list[str],
    options: dict[str, Any],
    find: Callable[[Sequence[str]], list[str]],
) -> bool:
    """Asks ``questions``, then those that are typed, until the input ends.

    Args:
        answerer: Answers the turns.
        images: Paths of the images of the first question.
        questions: Questions to ask before any is typed.
        options: Fields of `mmdecode.vlm.AnswerOptions`.
        find: Finds the images that paths of files and folders name.

    Returns:
        Whether all questions were answered, or stopped, and all images could be read.
    """
    chat = answerer.chat(**options)
    pending, fine = list(images), True
    for line in _lines(questions):
        command, _, rest = line.partition(" ")
        if command == "/quit":
            break
        if command == "/help":
            print_line(HELP)
        elif command == "/image":
            found = _readable(rest, find)
            fine = fine and found is not None
            pending += found or []
        elif command == "/clear":
            chat, pending = answerer.chat(**options), []
        elif command == "/undo":
            pending = _undo(chat) + pending
        elif command.startswith("/"):
            _complain(f"there is no {command}; /help lists commands")
        elif line:
            try:
                answered = _asked(chat, line, pending)
            except KeyboardInterrupt:
                print_line("stopped; the question is forgotten", console)
                continue
            fine = fine and answered
            pending = []
    return fine


def _asked(chat: Chat, question: str, images: list[str]) -> bool:
    """Prints an answer, or why there is none; returns whether there is one."""
    from mmdecode.vlm.answerer import MEMORY_HINT

    written = False
    try:
        with contextlib.closing(chat.stream(question, images or None)) as pieces:
            for piece in pieces:
                out.file.write(piece if written else piece.lstrip())
                out.file.flush()
                written = True
    except BrokenPipeError:  # nobody reads the answers
        raise
    except Exception as error:  # of any kind: the conversation goes on
        if os.environ.get("MMDECODE_DEBUG") == "1":
            traceback.print_exception(error)
        failed = Failed.of(error, MEMORY_HINT)
        _complain(f"failed: {failed.error}")
        if images:
            _complain("its images are left out of the next question; /image adds them again")
        return False
    finally:
        if written:
            out.file.write("\n")
            out.file.flush()
    return True


def _undo(chat: Chat) -> list[str]:
    """Forgets the last turn; says which, and returns the paths of its images."""
    if not chat.messages:
        _complain("there is no question to forget")
        return []
    parts = chat.messages[-2]["content"]
    del chat.messages[-2:]
    text = "".join(part.get("text", "") for part in parts)
    images = [part["image"] for part in parts if part["type"] == "image"]
    kept = "; its images are kept for the next question" if images else ""
    print_line(f"forgotten: {text}{kept}", console)
    return images


def _readable(words: str, find: Callable[[Sequence[str]], list[str]]) -> list[str] | None:
    """Returns the images that words name; says why, and returns ``None``, if one cannot be read."""
    from mmdecode.vlm.images import image_source

    paths = _paths(words)
    if not paths:
        _complain("/image needs the path of an image")
        return []
    try:
        found = find(paths)
        with warnings.catch_warnings():  # they are shown when a question is asked
            warnings.simplefilter("ignore")
            for path in found:
                source = image_source(path, path)
                source.read(1) if source.video else source.read()
    except MMDecodeError as error:
        _complain(f"not added: {error}")
        return None
    return found


def _paths(words: str) -> list[str]:
    """Splits paths as a shell does.

    The whole text is one path if there is such a file, or if it has an open quotation mark.
    """
    words = words.strip()
    if words and os.path.exists(os.path.expanduser(words)):
        return [os.path.expanduser(words)]
    try:
        return [os.path.expanduser(word) for word in shlex.split(words)]
    except ValueError:
        return [os.path.expanduser(words)]


def _complain(text: str) -> None:
    console.print(text, style="red", markup=False, highlight=False)


def _lines(questions: list[str]) -> Iterator[str]:
    """Yields the questions, then the lines of the input."""
    interactive = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):  # one line that is not text ends nothing
        sys.stdin.reconfigure(errors="surrogateescape")
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
        except KeyboardInterrupt:
            if not interactive:
                raise
            console.print()
            return
        yield line.strip()
