"""Reads and writes N-best lists in several formats, and reads them from transcription results.

`FORMS` are the formats that can be written. The format of a row is detected when it is read:

* ``lists``: this package's format, with ``hypotheses`` and, if known, ``id``, ``scores``,
  ``reference`` and ``audio``.
* ``generator``: the format of HyPoradise's published sets (Chen et al., 2023, arXiv:2309.15701),
  with ``input`` (the hypotheses, best first), ``output`` (the reference), ``id`` and ``am_score``.
* ``lora``: the format that HyPoradise's training scripts read, with ``input1`` (the best
  hypothesis), ``input2`` (the other hypotheses as one text) and ``output``. The scripts do not
  specify how hypotheses are separated; here each ends with a full stop, as in later prompts of the
  authors. One hypothesis per line is read too.

A row with ``n_best`` is a result of `mmdecode.asr.Transcriber`, or a line of the ``results.jsonl``
of ``mmdecode transcribe --n-best``: each of its windows is one list.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.asr.output.manifest import AUDIO, ID
from mmdecode.errors import InputError, UnknownNameError
from mmdecode.runs.files import write_file
from mmdecode.runs.tables import first_of, read_rows, text_of

if TYPE_CHECKING:
    from mmdecode.asr.results import Transcript

FORMS = ("lists", "generator", "lora")
SCORES = ("scores", "am_score")
REFERENCE = ("reference", "output")


@dataclass(frozen=True)
class NBestList:
    """N-best list of a recogniser for a recording, or for a window of a recording.

    Attributes:
        id: Name of the list, unique among lists that are used together.
        hypotheses: Texts, the best first; may contain duplicates.
        scores: Score of each hypothesis, the mean log-probability per token; ``None``: not known.
        reference: Reference text; ``None``: not known.
        audio: The recording; ``None``: not known.

    Raises:
        InputError: The list is empty, or the number of scores is wrong.
    """

    id: str
    hypotheses: tuple[str, ...]
    scores: tuple[float, ...] | None = None
    reference: str | None = None
    audio: str | None = None

    def __post_init__(self) -> None:
        if not self.hypotheses:
            raise InputError(f"the list {self.id!r} is empty; expected at least one hypothesis")
        if self.scores is not None and len(self.scores) != len(self.hypotheses):
            raise InputError(
                f"the list {self.id!r} has {len(self.scores)} scores for {len(self.hypotheses)} "
                "hypotheses; expected one score per hypothesis, or no scores"
            )

    @property
    def best(self) -> str:
        """The first hypothesis: the recogniser's own result."""
        return self.hypotheses[0]


def read_lists(path: str | os.PathLike[str]) -> list[NBestList]:
    """Reads N-best lists from JSON lines or one JSON list, with rows in any of the formats.

    A row without an id gets a hash of its hypotheses as id, so that a list has the same id in any
    file and order; a number is appended for further equal lists. Failed recordings in transcription
    results have no list and are left out.

    Args:
        path: Path of the file, which may be packed by gzip.

    Raises:
        InputError: The file cannot be read, a row has none of the formats, or two rows have the
            same id.
    """
    path = Path(path)
    found: list[NBestList] = []
    lines: dict[str, int] = {}
    repeats: Counter[str] = Counter()
    for line, row in read_rows(path):
        try:
            lists = [*_lists(row)]
        except InputError as error:
            raise InputError(f"{path}, line {line}: {error}") from error.__cause__
        for one in lists:
            if one.id in lines and one.id == _digest(one.hypotheses):
                repeats[one.id] += 1
                one = replace(one, id=f"{one.id}-{repeats[one.id] + 1}")
            if one.id in lines:
                raise InputError(
                    f"{path}, line {line}: the id {one.id!r} is already the id of line "
                    f"{lines[one.id]}; give each list a different 'id'"
                )
            lines[one.id] = line
            found.append(one)
    if not found:
        raise InputError(f"{path} holds no list; expected one N-best list per line")
    return found


def write_lists(
    lists: Iterable[NBestList], path: str | os.PathLike[str], form: str = "lists"
) -> None:
    """Writes N-best lists; if writing fails, no incomplete file is left.

    Args:
        lists: The lists, in order.
        path: Path of the file: ``.json`` for one JSON list, any other extension for JSON lines; if
            ``.gz`` follows, the file is packed.
        form: Format of the rows, one of `FORMS`.

    Raises:
        InputError: A list cannot be written in this format.
        UnknownNameError: There is no such format.
    """
    path = Path(path)
    if form not in FORMS:
        raise UnknownNameError.of("format of N-best lists", form, FORMS)
    rows = [json.dumps(_row(one, form), ensure_ascii=False, allow_nan=False) for one in lists]
    packed = path.suffix.lower() == ".gz"
    if (path.with_suffix("") if packed else path).suffix.lower() == ".json":
        text = "[\n" + ",\n".join(rows) + "\n]\n"
    else:
        text = "".join(f"{row}\n" for row in rows)
    data = text.encode()
    write_file(path, gzip.compress(data, mtime=0) if packed else data)


def lists_of(transcript: Transcript) -> list[NBestList]:
    """Returns the N-best lists of a transcript's windows, in order.

    The id of a list is the recording's name; if the recording has several windows, followed by the
    window's number, as ``clip.wav#2``.

    Raises:
        InputError: The recording was transcribed without N-best lists.
    """
    if transcript.n_best is None:
        raise InputError(
            f"{transcript.source} was transcribed without N-best lists; transcribe it with n_best, "
            "for instance n_best=5"
        )
    windows = [
        (tuple(h.text for h in window), tuple(h.score for h in window))
        for window in transcript.n_best
    ]
    return list(_of_windows(windows, transcript.source, transcript.source))


def split(lists: Sequence[NBestList], share: float) -> tuple[list[NBestList], list[NBestList]]:
    """Splits lists into a development and a test set, by a hash of each list's id.

    Args:
        lists: N-best lists; the two sets keep their order.
        share: Approximate share of the lists in the development set, from 0 to 1.

    Returns:
        The development set and the test set.
    """
    parts: tuple[list[NBestList], list[NBestList]] = ([], [])
    for one in lists:
        parts[hash_fraction(one.id) >= share].append(one)
    return parts


def hash_fraction(name: str) -> float:
    """Returns a pseudo-random number in [0, 1) from the hash of an id."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest[:6]) / 2**48  # exact as a float, and below 1


_Window = tuple[tuple[str, ...], tuple[float, ...] | None]
_ROW = "the row"


def _lists(row: Mapping[str, Any]) -> Iterator[NBestList]:
    name, audio = text_of(row, ID, _ROW), text_of(row, AUDIO, _ROW)
    if row.get("error") is not None:
        return
    if "n_best" in row:
        name = name or text_of(row, ("source",), _ROW)
        if name is None:
            raise InputError(f"{_ROW} names no recording; expected 'id' or 'source'")
        yield from _of_windows(_transcribed(row), name, audio)
        return
    texts: Any = first_of(row, ("hypotheses", "input"))
    if texts is None and "input1" in row:
        texts = [row["input1"], *_others(text_of(row, ("input2",), _ROW) or "")]
    if not isinstance(texts, list):
        raise InputError(
            f"{_ROW} has no hypotheses; expected a list under 'hypotheses' or 'input', 'input1' "
            "with 'input2', or the 'n_best' of a transcript"
        )
    hypotheses, scores = _texts(texts), first_of(row, SCORES)
    yield NBestList(
        name or _digest(hypotheses),
        hypotheses,
        None if scores is None else _numbers(scores),
        text_of(row, REFERENCE, _ROW),
        audio,
    )


def _transcribed(row: Mapping[str, Any]) -> list[_Window]:
    """Returns the texts and scores of each window of a transcript."""
    if row["n_best"] is None:
        raise InputError(f"{_ROW} was transcribed without N-best lists; transcribe with --n-best")
    windows: list[_Window] = []
    try:
        for window in row["n_best"]:
            scores = [h["score"] for h in window]  # null where it was no finite number
            known = None if None in scores else _numbers(scores)
            windows.append((_texts([h["text"] for h in window]), known))
    except (TypeError, KeyError):
        raise InputError(
            f"{_ROW} has an invalid 'n_best'; expected a list per window, of hypotheses with "
            "'text' and 'score'"
        ) from None
    return windows


def _of_windows(windows: Sequence[_Window], name: str, audio: str | None) -> Iterator[NBestList]:
    for number, (texts, scores) in enumerate(windows, 1):
        own = name if len(windows) == 1 else f"{name}#{number}"
        yield NBestList(own, texts, scores, audio=audio)


def _others(text: str) -> list[str]:
    """Splits a text of several hypotheses at line breaks, or at full stops if it has one line."""
    parts = text.split("\n") if "\n" in text else f"{text} ".split(". ")
    return [part.strip() for part in parts if part.strip()]


def _row(one: NBestList, form: str) -> dict[str, Any]:
    named: dict[str, Any] = {"id": one.id}
    if form == "lists":
        named |= {"hypotheses": one.hypotheses, "scores": one.scores, "reference": one.reference}
    else:
        if one.reference is None:
            raise InputError(
                f"the list {one.id!r} has no reference, which the format {form!r} needs; choose "
                "the format 'lists'"
            )
        if form == "generator":
            named |= {"input": one.hypotheses}
        else:
            best, *others = one.hypotheses
            joined = " ".join(f"{other}." for other in others)
            if _others(joined) != others:
                raise InputError(
                    f"the list {one.id!r} has empty hypotheses or full stops in hypotheses, so "
                    "that the format 'lora' cannot separate them; choose 'generator' or 'lists'"
                )
            named |= {"input1": best, "input2": joined}
        named |= {"output": one.reference, "am_score": one.scores}
    return {
        key: value for key, value in (named | {"audio": one.audio}).items() if value is not None
    }


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    found = [text_of({"hypothesis": value}, ("hypothesis",), _ROW) for value in values]
    if None in found:
        raise InputError(f"{_ROW} has a hypothesis that is null; expected a text")
    return tuple(text or "" for text in found)


def _numbers(values: Any) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        numbers = (math.nan,)
    if not all(map(math.isfinite, numbers)):
        raise InputError(f"{_ROW} has the scores {str(values)[:60]}; expected a list of numbers")
    return numbers


def _digest(hypotheses: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(hypotheses).encode(), digest_size=6).hexdigest()
