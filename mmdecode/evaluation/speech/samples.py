"""Samples: reference, recognised text and time of each recording; all scores are made from them.

Rows hold raw texts under the names of the Open ASR leaderboard's result files (``audio_filepath``,
``duration``, ``time``, ``text``, ``pred_text``), so that scoring can be repeated without a model,
here and by the leaderboard.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdecode.asr.output.manifest import AUDIO, ID, TEXT, Entry, seconds_of
from mmdecode.errors import InputError
from mmdecode.evaluation.report.examples import Example, audio_url
from mmdecode.evaluation.speech.wer import align_as_written
from mmdecode.runs.tables import first_of, read_rows, rows_text, text_of

HYPOTHESIS = ("pred_text", "hypothesis", "hyp", "prediction", *TEXT)
KEY = (*ID[:-1], *AUDIO, "source", *ID[-1:])
LEADERBOARD = ("audio_filepath", "duration", "time", "text", "pred_text")
_KEYS = {"repetitive_windows": "looped"}
"""Keys of rows that differ from the names of their fields."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Transcript of one recording by one mode of decoding, with its reference.

    Attributes:
        id: Id of the recording.
        mode: Name of the mode, or of the system that made the transcript.
        text: Reference text, as it was given.
        pred_text: Recognised text, not normalised; empty where decoding failed.
        audio_filepath: Path of the recording; ``None``: not known.
        duration: Length in seconds; ``None``: not known.
        time: Decoding time in seconds: time of the batch over its size; ``None``: not known.
        group: Speaker or other unit of the bootstrap; ``None``: not given.
        token_ids: Token ids of the transcript; ``None``: not known.
        batch: Counters of the batch that contained the recording; ``None``: not known.
        windows: Number of decoded windows; ``None``: not known.
        repetitive_windows: Number of windows that ended in repetition, see
            `mmdecode.asr.decoding.repetition`; key ``looped`` of rows.
        error: Error message if there is no transcript; ``None``: there is a transcript.
    """

    id: str
    mode: str
    text: str
    pred_text: str
    audio_filepath: str | None = None
    duration: float | None = None
    time: float | None = None
    group: str | None = None
    token_ids: list[int] | None = None
    batch: dict[str, float] | None = None
    windows: int | None = None
    repetitive_windows: int | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields as a JSON row."""
        return {_KEYS.get(name, name): value for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Sample:
        """Makes a sample from a JSON row, see `as_dict`."""
        names = {key: name for name, key in _KEYS.items()}
        return cls(**{names.get(key, key): value for key, value in row.items()})


def sample_of(entry: Entry, mode: str, group: str | None = None, **known: Any) -> Sample:
    """Makes a sample from an entry of a manifest (a list of recordings with their texts).

    Args:
        entry: The recording, with its reference text.
        mode: See `Sample`.
        group: Column of the manifest that is the unit of the bootstrap; ``None``: the speaker.
        **known: Further fields of `Sample`; ``pred_text`` is empty by default.

    Raises:
        InputError: The entry has no value in the column ``group``.
    """
    unit = entry.speaker
    if group is not None:
        value = entry.fields.get(group)
        if value in (None, ""):
            columns = ", ".join(map(str, entry.fields))
            raise InputError(f"{entry.id} has no {group!r} in the manifest, which has {columns}")
        unit = str(value)
    base = {"pred_text": "", "audio_filepath": entry.audio, "duration": entry.duration_s}
    return Sample(id=entry.id, mode=mode, text=entry.text or "", group=unit, **(base | known))


def match(
    entries: Sequence[Entry], hypotheses: Path, mode: str, group: str | None = None
) -> list[Sample]:
    """Matches transcripts of another system to the entries of a manifest.

    A transcript is matched by id or path. If that fails, it is matched by file name without folder,
    extension and case, provided that this name is unique among the entries and among the
    transcripts. An entry without a transcript counts as a failure: all its words are deletions.

    Args:
        entries: Recordings with texts.
        hypotheses: JSON lines, a table, a ``.trn``, or a folder of ``.txt`` files.
        mode: Name of the system.
        group: See `sample_of`.

    Raises:
        InputError: The file cannot be read, has two transcripts with the same key, or none of its
            transcripts belongs to an entry.
    """
    found: dict[str, dict[str, Any]] = {}
    for key, row in _hypotheses(hypotheses):
        if key in found:
            raise InputError(f"{hypotheses} has two transcripts of {key!r}; expected one")
        found[key] = row
    names = [(entry.id, str(first_of(entry.fields, AUDIO) or entry.id)) for entry in entries]
    wanted = Counter(stem for both in names for stem in {_stem(name) for name in both})
    offered = Counter(map(_stem, found))
    stems = {_stem(key): row for key, row in found.items() if offered[_stem(key)] == 1}
    samples = []
    for entry, both in zip(entries, names, strict=True):
        rows = [found[name] for name in both if name in found]
        rows += [stems[s] for s in map(_stem, both) if s in stems and wanted[s] == 1]
        known = rows[0] if rows else {"error": "there is no transcript of it"}
        samples.append(sample_of(entry, mode, group, **known))
    if all(sample.error for sample in samples):
        raise InputError(
            f"none of the {len(found)} transcripts of {hypotheses} belongs to a recording of the "
            f"manifest: the transcripts are called {next(iter(found), '')!r}, ..., and the "
            f"recordings {entries[0].id!r}, ..."
        )
    return samples


def _hypotheses(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yields the key (id or path) and the fields of each transcript."""
    if path.is_dir():
        files = sorted(path.glob("*.txt"))
        if not files:
            raise InputError(f"the folder {path} holds no .txt files; expected one per recording")
        for file in files:
            try:
                text = file.read_text(encoding="utf-8-sig")
            except (OSError, ValueError) as problem:
                raise InputError(f"{file} cannot be read as UTF-8 text: {problem}") from problem
            yield file.stem, {"pred_text": " ".join(text.split())}
        return
    for line, row in read_rows(path):
        where = f"{path}, line {line}"
        key, hypothesis = text_of(row, KEY, where), text_of(row, HYPOTHESIS, where)
        failed = text_of(row, ("error",), where)
        if key is None or (hypothesis is None and failed is None):
            raise InputError(f"{where} needs an id or a path, and a text; it has {', '.join(row)}")
        time = seconds_of(row, ("time",), where)
        duration = seconds_of(row, ("duration", "duration_s"), where)
        known = {} if duration is None else {"duration": duration}
        yield key, {"pred_text": hypothesis or "", "time": time, "error": failed, **known}


def _stem(name: str) -> str:
    last = re.split(r"[/\\]", name)[-1]
    return (last.rpartition(".")[0] or last).casefold()


def read_results(path: Path, mode: str) -> list[Sample]:
    """Reads a result file of the Open ASR leaderboard, which holds references and transcripts.

    Chunks of one recording (``parent_id``, ``chunk_index``) become one sample, as on the
    leaderboard: transcripts are joined in order, lengths and times are added up.

    Args:
        path: JSON lines with ``text`` and ``pred_text``.
        mode: Name of the system.

    Raises:
        InputError: The file cannot be read, or is not such a result file.
    """
    samples: list[Sample] = []
    chunks: dict[str, list[tuple[int, Sample]]] = defaultdict(list)
    for line, row in read_rows(path):
        where = f"{path}, line {line}"
        text = text_of(row, ("text",), where)
        if text is None or "pred_text" not in row:
            raise InputError(
                f"{where} lacks 'text' or 'pred_text'; give the references with a manifest"
            )
        sample = Sample(
            id=text_of(row, KEY, where) or f"sample_{line - 1}",
            mode=mode,
            text=text,
            pred_text="" if row["pred_text"] is None else str(row["pred_text"]),
            audio_filepath=text_of(row, AUDIO, where),
            duration=seconds_of(row, ("duration",), where),
            time=seconds_of(row, ("time",), where),
            group=text_of(row, ("parent_id",), where),
        )
        if sample.group is None:
            samples.append(sample)
            continue
        index = row.get("chunk_index")
        if not isinstance(index, int):
            raise InputError(f"{where} has the chunk_index {index!r}; expected a whole number")
        chunks[sample.group].append((index, sample))
    for parent, pieces in sorted(chunks.items()):
        ordered = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
        texts = (piece.pred_text.strip() for piece in ordered)
        whole = dataclasses.replace(
            ordered[0],
            id=parent,
            audio_filepath=parent,
            pred_text=" ".join(filter(None, texts)),
            duration=_total([piece.duration for piece in ordered]),
            time=_total([piece.time for piece in ordered]),
            group=None,
        )
        samples.append(whole)
    if not samples:
        raise InputError(f"{path} holds no line; expected one recording a line")
    return samples


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def leaderboard_files(model: str, data: str, samples: Sequence[Sample]) -> dict[str, str]:
    """Result files that the leaderboard's own scripts read: content of each mode's, by file name.

    Args:
        model: Name of the model, used in the file names.
        data: Name of the data set, used in the file names.
        samples: Samples of any number of modes.
    """
    by_mode: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        by_mode[sample.mode].append({name: getattr(sample, name) for name in LEADERBOARD})
    files = {}
    for mode, rows in by_mode.items():
        names = map(_in_file_name, (f"{model}-{mode}", data))
        files["MODEL_{}_DATASET_{}.jsonl".format(*names)] = rows_text(rows)
    return files


def _in_file_name(name: str, longest: int = 100) -> str:
    """A name without characters that file names lack; the end of a long one is a checksum."""
    plain = re.sub(r"[^\w.+=,-]", "-", name).encode()
    if len(plain) <= longest:
        return plain.decode()
    return f"{plain[: longest - 9].decode(errors='ignore')}-{zlib.crc32(plain):08x}"


def with_alignment(sample: Sample, errors: int, normaliser: str, **scoring: Any) -> Example:
    """Shows a recording with its alignment, whose errors are marked.

    Args:
        sample: The recording, with reference and recognised text.
        errors: Number of its word errors.
        normaliser: Name of the normaliser with which errors are counted.
        **scoring: ``scorer`` and ``segmented``, see `mmdecode.evaluation.speech.wer.align`.
    """
    return Example(
        name=sample.id,
        note=f"{errors} word error{'s' * (errors != 1)}",
        lines=[
            ("reference", sample.text),
            ("hypothesis", align_as_written(sample.text, sample.pred_text, normaliser, **scoring)),
        ],
        audio=audio_url(sample.audio_filepath),
        error=sample.error or "",
    )
