"""Items: a question about an image and the answer of one mode; scores are computed from items.

Readers of data sets return items without answers. A run adds the answers with `Item.answered` and
appends the items to a file. Items hold raw outputs, so that scoring can be repeated without the
model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.vision.answers import Label, leading
from mmdecode.runs.files import complete_lines
from mmdecode.runs.tables import any_of, first_of, lines_of, rows_of

ITEMS = "items.jsonl"
IMAGE = ("image", "image_path", "path", "file")
QUESTION = ("text", "question", "prompt")
ANSWER = ("label", "answer", "target")
Some = TypeVar("Some", bound="Item")
LeftOut = list[str] | None
"""List that receives the errors of unusable rows; ``None``: an unusable row raises."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """Base of all items: a question about an image, and the answer of one mode.

    Attributes:
        id: Id of the question, the same in every run.
        image: Name of the image's file or of the scene; the unit that the bootstrap resamples.
        question: Question of the data set, without the prompt around it.
        mode: Name of the mode of decoding; empty: not answered yet.
        output: Raw answer; empty where decoding failed.
        prompt_hash: `text_hash` of the prompt as it was sent; ``None``: not known.
        seed: Seed with which the answer was sampled; ``None``: the mode does not sample.
        tokens: Number of tokens of the answer; ``None``: not known.
        passes: Passes for the whole answer, counted once per branch (each context that a guide
            contrasts is a branch), even if branches share a forward pass; ``None``: not known.
        forwards: Forward passes after the prefill, which yields the first token; ``None``: not
            known.
        changed: Number of tokens at which the guided most likely token differs from the plain
            model's after the same text; ``None``: there is no guide, no trace was kept, or the
            guide edits or replaces the plain branch, so that the plain choice is not known.
        seconds: Decoding time in seconds; ``None``: not known.
        error: Error message if decoding failed; ``None``: it did not.
    """

    id: str
    image: str
    question: str
    mode: str = ""
    output: str = ""
    prompt_hash: str | None = None
    seed: int | None = None
    tokens: int | None = None
    passes: int | None = None
    forwards: int | None = None
    changed: int | None = None
    seconds: float | None = None
    error: str | None = None

    derived: ClassVar[tuple[str, ...]] = ()
    """Properties that `as_dict` adds for readers of the file; `from_dict` ignores them."""

    def __post_init__(self) -> None:
        for name in self._lists():
            if isinstance(value := getattr(self, name), str):
                raise InputError(f"{self.id} has the {name} {value!r}; expected ({value!r},)")

    @property
    def sets(self) -> tuple[str, ...]:
        """Names of the question sets whose score includes the item."""
        return ("all",)

    def key(self) -> tuple[str, int | None, str]:
        """Mode, seed and id, which tell the answers of a run apart."""
        return self.mode, self.seed, self.id

    def answered(self, *, mode: str, output: str = "", **known: Any) -> Self:
        """Returns a copy of the question with an answer.

        Args:
            mode: See `Item`.
            output: See `Item`.
            **known: Further fields.
        """
        return dataclasses.replace(self, mode=mode, output=output, **known)

    def as_dict(self) -> dict[str, Any]:
        """The item as a JSON row."""
        return vars(self) | {name: getattr(self, name) for name in self.derived}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Self:
        """Makes an item from a row of JSON.

        Raises:
            TypeError: Fields are missing or unknown.
        """
        known = {name: value for name, value in row.items() if name not in cls.derived}
        for name in known.keys() & cls._lists():
            known[name] = tuple(known[name])  # JSON has lists
        return cls(**known)

    @classmethod
    def _lists(cls) -> set[str]:
        """Names of the fields that hold tuples."""
        return {f.name for f in dataclasses.fields(cls) if str(f.type).startswith("tuple")}


@dataclass(frozen=True, kw_only=True)
class YesNoItem(Item):
    """A question to be answered with yes or no.

    Attributes:
        target: The right answer.
        sets: Splits, categories or dimensions whose score includes the question; a name that occurs
            twice counts the question twice.
        margin: Logit of yes minus logit of no at the first answer token, with guidance and before
            top-k, top-p or a plausibility cut; ``None``: not known.
        main_margin: The same margin without the guide; ``None``: not known, for example because the
            guide edits or replaces the plain model's branch.
    """

    target: Label
    sets: tuple[str, ...] = ("all",)
    margin: float | None = None
    main_margin: float | None = None

    derived: ClassVar[tuple[str, ...]] = ("parsed",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target not in ("yes", "no"):
            raise InputError(f"{self.id} has the answer {self.target!r}; expected 'yes' or 'no'")
        if self.margin is not None and not math.isfinite(self.margin):
            raise InputError(f"{self.id} has the margin {self.margin}; expected a finite number")

    @property
    def parsed(self) -> Label | None:
        """The answer by its first word: yes or no; ``None``: neither."""
        return leading(self.output)


@dataclass(frozen=True, kw_only=True)
class CaptionItem(Item):
    """An image to be described in a caption.

    Attributes:
        objects: Names of the objects in the image.
    """

    objects: tuple[str, ...]
    question: str = "Please describe this image in detail."


@dataclass(frozen=True, kw_only=True)
class ChoiceItem(Item):
    """A question with several possible answers, one of which is right.

    Attributes:
        options: The possible answers.
        target: The right answer.
        group: Name of a group of questions that differ only in image and answer, such as the two
            objects in What's Up; empty: no group.
        sets: See `YesNoItem`.
    """

    options: tuple[str, ...]
    target: str
    group: str = ""
    sets: tuple[str, ...] = ("all",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target not in self.options:
            raise InputError(
                f"{self.id} has the answer {self.target!r}; expected one of {list(self.options)}"
            )


def text_hash(text: str) -> str:
    """Hash of a text such as a prompt: 16 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of the content of a file; a ``.gz`` file has the hash of its unpacked content.

    Raises:
        InputError: The file cannot be read.
    """
    return hashlib.sha256(read_bytes(path)).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Reads the content of a file; a ``.gz`` file is unpacked.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path} cannot be read: {reason}") from error


def read_json_list(path: Path, content: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects of a JSON list, each after its location; other values as empty objects.

    Args:
        path: The file, gzipped or not.
        content: Name of the list's objects, for the message.

    Raises:
        InputError: The file cannot be read, or is no JSON list.
    """
    rows = _parsed(read_bytes(path), str(path))
    if not isinstance(rows, list):
        raise InputError(f"{path} is no list of {content}")
    for number, row in enumerate(rows, 1):
        yield f"{path}, item {number}", row if isinstance(row, dict) else {}


def read_table(path: Path, left_out: LeftOut = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a table as `mmdecode.runs.tables` reads it, each after its location.

    Each line of JSON lines is an object of its own, so that a broken line affects no other.

    Args:
        path: A csv or tsv file with a header, a JSON list or JSON lines, packed or not.
        left_out: See `leaving_out`.

    Raises:
        InputError: The file cannot be read, or a row is no object.
    """
    kind = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
    data = read_bytes(path)
    if kind in (".csv", ".tsv") or data.lstrip()[:1] == b"[":
        rows = rows_of(path)
    else:
        rows = lines_of(data.decode("utf-8-sig", "surrogateescape"), path, _object)
    for number, row in rows:
        with leaving_out(left_out):
            if isinstance(row, InputError):
                raise row
            yield f"{path}, line {number}", row


@contextlib.contextmanager
def leaving_out(left_out: LeftOut) -> Iterator[None]:
    """Context in which errors of a row are appended to ``left_out``; ``None``: they are raised."""
    try:
        yield
    except InputError as error:
        if left_out is None:
            raise
        left_out.append(str(error))


def refuse_empty(items: Sequence[Any], left_out: LeftOut, otherwise: str) -> None:
    """Raises an error if a table has no usable row.

    Args:
        items: Usable rows.
        left_out: See `leaving_out`.
        otherwise: Error message for a table from which no row was left out.

    Raises:
        InputError: There is no usable row.
    """
    if not items:
        raise InputError(f"{left_out[0]}; no other row can be used" if left_out else otherwise)


def items_of(
    path: Path, make: Callable[[dict[str, Any], str], Some], left_out: LeftOut, content: str
) -> list[Some]:
    """Makes items of the lines of a file of JSON lines.

    Args:
        path: The file, gzipped or not.
        make: Makes an item of the object in a line; takes the location too, for messages.
        left_out: See `leaving_out`.
        content: Name of a line's content, for the message that there is none.

    Raises:
        InputError: The file cannot be read, or a line cannot be used.
    """
    items = []
    for where, row in read_table(path, left_out):
        with leaving_out(left_out):
            items.append(make(row, where))
    refuse_empty(items, left_out, f"{path} holds no line; expected one {content} a line")
    return items


def field_of(row: dict[str, Any], names: Sequence[str], where: str) -> str:
    """Returns the value of the first of several fields that a row has, as text.

    Raises:
        InputError: The row has none of the fields, or the value is neither text nor a whole number.
    """
    value = first_of(row, names)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InputError(f"{where} has {value!r} under {any_of(names)}; expected text")
    return str(value)


def one_file(path: Path, task: str) -> Path:
    """Returns the path of a file.

    Raises:
        OptionError: It is a folder.
    """
    if path.is_dir():
        raise OptionError(f"{path} is a folder; {task} reads one file: give it with --data")
    return path


def label_of(value: str, where: str) -> Label:
    """Parses the right answer to a question: its first word, yes or no, in any case.

    Raises:
        InputError: The first word is neither yes nor no.
    """
    found = leading(value)
    if found is None:
        raise InputError(f"{where} has the answer {value!r}; expected yes or no")
    return found


def read_items(path: Path, kind: type[Some]) -> list[Some]:
    """Reads the items of a run; of several lines for one question, mode and seed the last counts.

    Args:
        path: File, or folder of the run. An incomplete last line, left by a crash, is ignored.
        kind: `YesNoItem`, `CaptionItem` or `ChoiceItem`.

    Raises:
        InputError: The file cannot be read, or a line is damaged.
    """
    if path.is_dir():
        path = path / ITEMS
    found: dict[tuple[str, int | None, str], Some] = {}
    try:
        lines = [*complete_lines(path)]
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}; expected the rows of an earlier run"
        ) from error
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            item = kind.from_dict(_parsed(line, where))
        except (TypeError, AttributeError) as error:
            raise InputError(f"{where} is no {kind.__name__}: {error}") from error
        found[item.key()] = item
    return list(found.values())


def _object(line: str, where: str) -> dict[str, Any]:
    row = _parsed(line, where)
    if not isinstance(row, dict):
        raise InputError(f"{where} holds {type(row).__name__}; expected an object")
    return row


def _parsed(data: str | bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from error
