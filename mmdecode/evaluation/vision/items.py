"""One question about one image and what one mode of decoding answered: the rows scores come from.

Readers of data sets return rows that nobody has answered yet; a run fills them with `Item.answered`
and appends them to a file. Rows hold raw outputs, so that scoring can be repeated without the
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from mmdecode.errors import InputError
from mmdecode.evaluation.vision.answers import Label, leading
from mmdecode.runs.files import complete_lines

ITEMS = "items.jsonl"
QUESTION = ("text", "question")
ANSWER = ("label", "answer", "target")
Some = TypeVar("Some", bound="Item")
LeftOut = list[str] | None
"""What is wrong with the rows of a table that are not used; ``None``: any of them is an error."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """What every row has.

    Attributes:
        id: Of the question, the same in every run.
        image: Name of the image's file or of the scene; the unit that intervals draw.
        question: As the data set asks it, without the prompt around it.
        mode: Which way of decoding; empty: not answered yet.
        output: The answer as it came; empty where it failed.
        prompt_hash: `text_hash` of the prompt as it was sent; ``None``: not known.
        seed: Of the repeat where the mode samples; ``None``: it has one answer.
        tokens: Number of tokens of the answer; ``None``: not known.
        passes: Rows sent through the model for the whole answer; a branch counts like the main
            one, also where both share a forward pass; ``None``: not known.
        forwards: Forward passes for the tokens after the first, which reading the prompt decides;
            ``None``: not known.
        changed: Tokens at which the guide's most likely is another than the plain model's, given
            the same text before; ``None``: there is no guide, no trace was kept, or the guide edits
            or replaces the main branch, so that the plain model's is not known.
        seconds: Time it took; ``None``: not known.
        error: Why there is no answer; ``None``: there is one.
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

    lists: ClassVar[tuple[str, ...]] = ()
    """Fields that JSON holds as lists."""
    derived: ClassVar[tuple[str, ...]] = ()
    """What `as_dict` adds for readers of the file and scoring finds again."""

    def answered(self, *, mode: str, output: str = "", **known: Any) -> Self:
        """The same question with an answer.

        Args:
            mode: See `Item`.
            output: See `Item`.
            **known: Further fields.
        """
        return dataclasses.replace(self, mode=mode, output=output, **known)

    def as_dict(self) -> dict[str, Any]:
        """As a row."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {name: getattr(self, name) for name in self.derived}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Self:
        """From a row.

        Raises:
            TypeError: Fields are missing or unknown.
        """
        known = {name: value for name, value in row.items() if name not in cls.derived}
        return cls(**known | {name: tuple(known[name]) for name in cls.lists if name in known})


@dataclass(frozen=True, kw_only=True)
class YesNoItem(Item):
    """A question to be answered with yes or no.

    Attributes:
        target: The right answer.
        sets: Splits, categories or dimensions it counts in, as often as it stands there.
        margin: Logit of yes over no at the first answer token, before any cut and with guidance;
            ``None``: not known.
        main_margin: The same of the model alone, without a guide; ``None``: not known, also where
            the guide edits or replaces the main branch.
    """

    target: Label
    sets: tuple[str, ...] = ("all",)
    margin: float | None = None
    main_margin: float | None = None

    lists: ClassVar[tuple[str, ...]] = ("sets",)
    derived: ClassVar[tuple[str, ...]] = ("parsed",)

    def __post_init__(self) -> None:
        if self.target not in ("yes", "no"):
            raise InputError(f"{self.id} has the answer {self.target!r}; expected 'yes' or 'no'")
        if self.margin is not None and not math.isfinite(self.margin):
            raise InputError(f"{self.id} has the margin {self.margin}; expected a finite number")

    @property
    def parsed(self) -> Label | None:
        """What the answer says by its first word."""
        return leading(self.output)


@dataclass(frozen=True, kw_only=True)
class CaptionItem(Item):
    """An image to be described.

    Attributes:
        objects: Names of what is in the image.
    """

    objects: tuple[str, ...]
    question: str = "Please describe this image in detail."

    lists: ClassVar[tuple[str, ...]] = ("objects",)


@dataclass(frozen=True, kw_only=True)
class ChoiceItem(Item):
    """A question with several possible answers, one of which is right.

    Attributes:
        options: The possible answers.
        target: The right one.
        group: What it belongs to with the questions that differ from it only in the answer: in
            What's Up the two objects; empty: nothing.
        sets: See `YesNoItem`.
    """

    options: tuple[str, ...]
    target: str
    group: str = ""
    sets: tuple[str, ...] = ("all",)

    lists: ClassVar[tuple[str, ...]] = ("options", "sets")

    def __post_init__(self) -> None:
        if self.target not in self.options:
            raise InputError(f"{self.id} has the answer {self.target!r}, of {list(self.options)}")


def places_by_set(items: Sequence[YesNoItem | ChoiceItem]) -> dict[str, np.ndarray]:
    """Places of the questions of each set; a question may stand there several times."""
    found: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        for name in item.sets:
            found.setdefault(name, []).append(place)
    return {name: np.array(places) for name, places in found.items()}


def text_hash(text: str) -> str:
    """Of a prompt: 16 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of what is in a file, the same for a file and its gzip.

    Raises:
        InputError: The file cannot be read.
    """
    return hashlib.sha256(read_bytes(path)).hexdigest()


def read_bytes(path: Path) -> bytes:
    """What is in a file; of a ``.gz`` what was packed.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path} cannot be read: {reason}") from error


def read_json(path: Path) -> Any:
    """A JSON file, packed or not.

    Raises:
        InputError: It cannot be read or is no JSON.
    """
    return _parsed(read_bytes(path), str(path))


def read_json_lines(path: Path, left_out: LeftOut = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of JSON lines, packed or not, each with where it stands.

    Args:
        path: The file.
        left_out: See `leaving_out`.

    Raises:
        InputError: The file cannot be read, or a line is no object.
    """
    for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = None
        with leaving_out(left_out):
            row = _parsed(line, where)
            if not isinstance(row, dict):
                raise InputError(f"{where} holds {type(row).__name__}; expected an object")
        if isinstance(row, dict):
            yield where, row


@contextlib.contextmanager
def leaving_out(left_out: LeftOut) -> Iterator[None]:
    """What is wrong with a row in here goes to a list; without one it is raised."""
    try:
        yield
    except InputError as error:
        if left_out is None:
            raise
        left_out.append(str(error))


def refuse_empty(items: Sequence[Any], left_out: LeftOut, otherwise: str) -> None:
    """Refuses a table without a row that can be used.

    Args:
        items: What was read.
        left_out: See `leaving_out`.
        otherwise: What is wrong where nothing was left out.

    Raises:
        InputError: There is no item.
    """
    if not items:
        raise InputError(f"{left_out[0]}; and no other row is better" if left_out else otherwise)


def field_of(row: dict[str, Any], names: Sequence[str], where: str) -> str:
    """The first of some fields that a row has, as text.

    Raises:
        InputError: It has none of them, or what stands there is neither text nor a number.
    """
    value = next((row[name] for name in names if row.get(name) is not None), None)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        named = " or ".join(map(repr, names))
        raise InputError(f"{where} has {value!r} under {named}; expected text")
    return str(value)


def label_of(value: str, where: str) -> Label:
    """A right answer in any spelling.

    Raises:
        InputError: It is neither yes nor no.
    """
    found = leading(value)
    if found is None:
        raise InputError(f"{where} has the answer {value!r}; expected yes or no")
    return found


def read_items(path: Path, kind: type[Some]) -> list[Some]:
    """Rows of a run; of several for one question, mode and seed the last counts.

    Args:
        path: The file, or the folder of the run. A last line that a crash cut off is left out.
        kind: `YesNoItem`, `CaptionItem` or `ChoiceItem`.

    Raises:
        InputError: It cannot be read, or a line is damaged.
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
        found[item.mode, item.seed, item.id] = item
    return list(found.values())


def _parsed(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from error
