"""Every ``mmdecode ...`` line that is printed somewhere is one that the command line takes.

Lines of shell blocks and examples of docstrings are parsed as they stand. What is only mentioned,
in backticks or quotes, may leave out what is required and the value of its last option.
"""

import ast
import contextlib
import functools
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from mmdecode.cli.app import app
from mmdecode.errors import InputError
from mmdecode.runs.console import console

ROOT = Path(__file__).parents[1]
ROOMS = "asr vlm image_ar benchmarks docs examples mmdecode notebooks".split()
FILES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(p for room in ROOMS for p in (ROOT / room).rglob("*")))
    if path.suffix in {".md", ".ipynb", ".py", ".sh"} and path.name != "CHANGELOG.md"
)
INLINE = re.compile(r"(?<!`)(`{1,2})(?!`)(mmdecode\s.+?)\1(?!`)|'(mmdecode\s[^'{}]+)'", re.DOTALL)
STARTS = {"do", "then", "time", "$", "!", "%", "run"}
OPERATORS = set("|&;<>()")


class Line(NamedTuple):
    """A command line, its place, and whether it is only mentioned."""

    number: int
    words: list[str]
    mentioned: bool


def commands_of(text: str, known: dict[str, str]) -> Iterator[list[str]]:
    """The words after ``mmdecode`` of each command of a shell line; variables are filled in."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    try:
        words = list(lexer)
    except ValueError:  # quotes that do not end: code of another language
        return
    part: list[str] = []
    for word in [*words, ";"]:
        if not set(word) <= OPERATORS:
            part.append(word)
            continue
        while part and (part[0] in STARTS or re.match(r"\w+=", part[0])):
            name, equals, value = part.pop(0).partition("=")
            known |= {name: value.removesuffix("$")} if equals else {}  # $(...) is not run
        if part[:1] == ["for"]:
            known |= {part[1]: part[3] if len(part) > 3 else ""}
        if part[:2] in (["accelerate", "launch"], ["python", "-m"]) and "mmdecode" in part:
            part = part[part.index("mmdecode") :]
        if part[:1] == ["mmdecode"]:
            yield [one for word in part[1:] for one in filled(word, known)]
        part = []


def filled(word: str, known: dict[str, str]) -> list[str]:
    """A word with its variables; one that is a variable alone may be several, or none."""
    if found := re.fullmatch(r"\$\{?(\w+)\}?", word):
        return shlex.split(known.get(found[1], ""))
    return [re.sub(r"\$\{?(\w+)\}?", lambda m: known.get(m[1], "x"), word)]


def in_shell(lines: list[tuple[int, str]]) -> Iterator[Line]:
    """Commands of the lines of one block."""
    known: dict[str, str] = {}
    number, whole = 0, ""
    for number_here, line in lines:
        number, whole = (number, whole + " ") if whole else (number_here, "")
        whole += line.strip()
        if whole.endswith("\\"):
            whole = whole[:-1]
            continue
        yield from (Line(number, words, False) for words in commands_of(whole, known))
        whole = ""


def mentioned(text: str, first: int) -> Iterator[Line]:
    """Commands in backticks or quotes."""
    for found in INLINE.finditer(text):
        number = first + text[: found.start()].count("\n")
        for words in commands_of(" ".join((found[2] or found[3]).split()), {}):
            words = [word for word in words if word not in ("...", "…")]
            if not words[:1] or words[0].isupper() or words[-1].isupper():
                words = [word for word in words if not word.isupper()]
            yield Line(number, words, True)


def in_markdown(text: str, first: int = 1) -> Iterator[Line]:
    """Commands of blocks and of the text around them."""
    block: list[tuple[int, str]] | None = None
    prose = []
    for number, line in enumerate(text.splitlines(), first):
        fence = line.lstrip().startswith("```")
        if fence and block is None:
            block = []
        elif fence:
            yield from in_shell(block or [])
            block = None
        elif block is not None:
            block.append((number, line))
        prose.append("" if fence or block is not None else line)
    yield from mentioned("\n".join(prose), first)


def in_python(text: str, first: int = 1) -> Iterator[Line]:
    """Commands of docstrings, messages and help."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            start = first + node.lineno - 1
            yield from mentioned(node.value, start)
            for found in re.finditer(
                r"^[ ]+((?:mmdecode|accelerate launch) .+?)(?:\n\s*\n|\n\s*\Z|\Z)",
                node.value,
                re.DOTALL | re.MULTILINE,
            ):
                number = start + node.value[: found.start()].count("\n")
                yield from in_shell(joined(number, found[1]))


def joined(number: int, paragraph: str) -> list[tuple[int, str]]:
    """The commands of a paragraph, each on one line; in docstrings lines are wrapped bare."""
    lines: list[tuple[int, str]] = []
    for offset, line in enumerate(paragraph.replace("\\\n", "\n").splitlines()):
        if not lines or line.split()[:1] in (["mmdecode"], ["accelerate"], ["python"], ["#"]):
            lines.append((number + offset, line.strip()))
        else:
            lines[-1] = lines[-1][0], f"{lines[-1][1]} {line.strip()}"
    return lines


def in_file(path: Path) -> Iterator[Line]:
    """Commands of a file."""
    text = path.read_text(encoding="utf-8")
    if not re.search(r"(?<!import )mmdecode\s+[a-z-]", text):
        return
    if path.suffix == ".md":
        yield from in_markdown(text)
    elif path.suffix == ".py":
        yield from in_python(text)
    elif path.suffix == ".sh":
        yield from in_shell(list(enumerate(text.splitlines(), 1)))
    else:
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            number = 1 + text[: max(text.find(json.dumps(source[:40])[1:-1]), 0)].count("\n")
            if cell["cell_type"] == "markdown":
                yield from in_markdown(source, number)
            else:
                shell = [line[1:] for line in source.splitlines() if line.startswith("!")]
                yield from in_shell([(number, line) for line in shell])
                python = re.sub(r"^[!%].*", "", source, flags=re.MULTILINE)
                yield from in_python(python, number)


ROOT_COMMAND = typer.main.get_command(app)


def wrong(line: Line) -> str | None:
    """What the real parser has against a command; nothing is run."""
    return refused(tuple(line.words), line.mentioned)


@functools.cache
def refused(words: tuple[str, ...], mentioned: bool) -> str | None:
    """The same for words."""
    if not words or words[0].startswith("-"):
        known = {flag for p in ROOT_COMMAND.params for flag in p.opts} | {"--help"}
        return None if {*words[:1]} <= known else f"no option {words[0]}"
    command = ROOT_COMMAND
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            context = command.make_context("mmdecode", list(words))
            while hasattr(command, "commands") and words:
                _, command, words = command.resolve_command(context, list(words))
                context = command.make_context("mmdecode", list(words), parent=context)
                words = context._protected_args + context.args
                context.close()
    except typer.Exit:
        return None
    except InputError as error:  # files need not be there
        return None if "cannot be read" in str(error) else str(error)
    except Exception as error:
        complaint = getattr(error, "format_message", lambda: "")() or repr(error)
        if "does not exist" in complaint or (
            mentioned and ("Missing" in complaint or "requires an argument" in complaint)
        ):
            return None
        return complaint
    finally:
        console.errors_only = console.tells_all = False
    return None


@pytest.fixture(scope="module")
def lines() -> list[tuple[Path, Line]]:
    return [(path, line) for path in FILES for line in in_file(path)]


def test_every_command_that_is_printed_somewhere_is_understood(lines):
    found = [
        f"{path.relative_to(ROOT)}:{line.number}: mmdecode {' '.join(line.words)}: {why}"
        for path, line in lines
        if (why := wrong(line))
    ]
    assert not found, "\n" + "\n".join(found)


def test_commands_are_found_where_they_are_printed(lines):
    counts = dict.fromkeys((*ROOMS, "README.md"), 0)
    for path, _ in lines:
        counts[path.relative_to(ROOT).parts[0]] = counts.get(path.relative_to(ROOT).parts[0], 0) + 1
    print(counts)
    assert counts["README.md"] > 5 and counts["mmdecode"] > 60 and counts["docs"] > 55
    for room in ("asr", "vlm", "image_ar", "benchmarks", "notebooks"):
        assert counts[room] > 2, counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```sh\nmmdecode ask x.png --manifest a\n```", "No such option"),
        ("```sh\nx=1 mmdecode ask \\\n  --limit a\n```", "Invalid value for '--limit'"),
        ("```sh\ncat a | mmdecode stram -\n```", "No such command"),
        ("```sh\nmmdecode train corrector --out a\n```", "Missing option '--data'"),
        ("Say `mmdecode\nask --input` here.", "No such option"),
        ("```sh\na='--lim 3'\nmmdecode ask $a # x\n```", "No such option"),
    ],
)
def test_a_wrong_command_is_found(text, message):
    [line] = in_markdown(text)
    assert message in (wrong(line) or "")


def test_what_is_mentioned_may_be_cut_short():
    for text in (
        "`mmdecode train drafter --kind`",
        "`mmdecode ask ...`",
        "`mmdecode evaluate TASK`",
    ):
        [line] = in_markdown(text)
        assert wrong(line) is None
