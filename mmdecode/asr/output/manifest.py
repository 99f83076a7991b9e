"""Reads manifests: tables of recordings with their reference texts.

A ``.csv`` or ``.tsv`` file begins with a header; a ``.trn``, ``.ref`` or ``.hyp`` file has lines in
NIST's format, ``some words (id)``; any other file holds JSON lines or one JSON list, such as NeMo's
manifests and the result files of the Open ASR leaderboard. The path of a recording is in one of the
columns `AUDIO`, its text in one of `TEXT`, its language in one of `LANGUAGE`; all other columns are
kept. Paths are relative to the folder of the manifest.

A line with an ``offset`` stands for the part of its recording that begins there and has the length
``duration``, both in seconds, as in NeMo's manifests. Without an offset the duration is information
only.

``zoo:NAME`` is a manifest of shipped recordings: ``zoo:real-clips`` or ``zoo:speech-test``.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mmdecode.asr.audio.reading import Blocks, Source, part, recording
from mmdecode.checkpoints import ZOO
from mmdecode.errors import InputError, UnknownNameError
from mmdecode.runs.inputs import path_in
from mmdecode.runs.tables import any_of, first_of, own_id, refuse_all, rows_of, text_of

AUDIO = ("audio", "audio_filepath", "audio_path", "path", "file")
TEXT = ("text", "transcript", "transcription", "sentence", "reference")
ID = ("id", "utt_id", "name")
DURATION = ("duration", "duration_s")
OFFSET = ("offset",)
SPEAKER = ("speaker", "speaker_id", "client_id")
LANGUAGE = ("language", "lang")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One recording of a manifest.

    Attributes:
        id: Id, unique in its manifest: the given id, else the path as written in the manifest; the
            id of a part of a file ends with its offset and duration, as ``talk.ogg@1.5+4.0``.
        audio: Path to open; ``None``: the manifest names no recording here.
        text: Reference text; ``None``: not given.
        offset_s: Start of the part of the file, in seconds; ``None``: the whole file.
        duration_s: Length according to the manifest, in seconds; ``None``: not given, and a part
            extends to the end of the file.
        speaker: Speaker; ``None``: not given.
        language: Spoken language; ``None``: not given.
        folder: Folder for its files, relative to the results folder; empty: that folder itself.
        stdin: Whether it came from standard input; its path is then a temporary file.
        fields: All columns of its row.
        problem: Reason why it cannot be transcribed; ``None``: no problem is known.
    """

    id: str
    audio: str | None
    text: str | None = None
    offset_s: float | None = None
    duration_s: float | None = None
    speaker: str | None = None
    language: str | None = None
    folder: str = ""
    stdin: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    problem: str | None = None


def opened(entry: Entry, language: str | None = None) -> Source:
    """Makes the source of an entry's recording or part of it; the file is not opened yet.

    Args:
        entry: An entry with a path.
        language: Language of all recordings; ``None``: the language of each entry.
    """
    source = recording(entry.audio or "", entry.id, shown="stdin" if entry.stdin else None)
    if entry.problem is not None:
        return replace(source, read=partial(_refuse, entry.problem))
    if entry.offset_s is not None:
        source = part(source, entry.offset_s, entry.duration_s)
    return replace(source, language=None if language else entry.language)


def _refuse(problem: str) -> Blocks:
    raise InputError(problem)


def holds_more(path: str | os.PathLike[str], limit: int | None) -> bool:
    """Whether a manifest has more than ``limit`` rows; ``None``: no limit.

    Raises:
        InputError: The file cannot be read.
        UnknownNameError: The package ships no recordings of that name.
    """
    rows = rows_of(manifest_path(path))
    return limit is not None and next(itertools.islice(rows, limit, None), None) is not None


def read_manifest(
    path: str | os.PathLike[str],
    limit: int | None = None,
    *,
    audio: bool = True,
    text: bool = False,
    failing: bool = False,
    left_out: list[str] | None = None,
) -> list[Entry]:
    """Reads a manifest.

    Args:
        path: Path of the manifest, or ``zoo:NAME``.
        limit: Number of recordings to take, from the first; ``None``: all.
        audio: Whether every line must name a recording; its file need not exist.
        text: Whether every line must have a text; the text may be empty.
        failing: Whether an invalid line becomes an entry with a ``problem`` instead of an error. If
            several lines have the same id, ``#`` and the line number are appended to all but the
            first.
        left_out: List to which the problems of invalid lines are appended; these lines are then
            left out instead of being an error.

    Raises:
        InputError: The file cannot be read, a line lacks a required column, or two lines have the
            same id; with ``failing`` or ``left_out``: every line is invalid.
        UnknownNameError: The package ships no recordings of that name.
    """
    path = manifest_path(path)
    entries: list[Entry] = []
    seen: dict[str, int] = {}
    for line, found in itertools.islice(rows_of(path), limit):
        where = f"{path}, line {line}"
        row = {} if isinstance(found, InputError) else found
        try:
            if isinstance(found, InputError):
                raise found
            entry = _entry(row, where, path.parent)
            if audio and entry.audio is None:
                raise InputError(f"{where} names no recording; expected {any_of(AUDIO)}")
            if text and entry.text is None:
                raise InputError(f"{where} has no text; expected {any_of(TEXT)}")
            if entry.id in seen:
                raise InputError(
                    f"{where} has the id {entry.id!r} of line {seen[entry.id]}; give each line an "
                    "'id' of its own"
                )
        except InputError as error:
            if not failing and left_out is None:
                raise
            given = first_of(row, ID) or first_of(row, AUDIO)
            name = str(given) if isinstance(given, (str, int)) else ""
            entry = Entry(id=own_id(name, line, seen), audio=None, problem=str(error), fields=row)
        seen[entry.id] = line
        entries.append(entry)
    if not entries:
        raise InputError(f"{path} holds no line; expected one recording per line")
    refuse_all(entry.problem for entry in entries)
    if left_out is None:
        return entries
    left_out += [entry.problem for entry in entries if entry.problem is not None]
    return [entry for entry in entries if entry.problem is None]


def shipped_manifests() -> dict[str, Path]:
    """Returns the manifests of the shipped recordings by name, without ``zoo:``."""
    return {path.parent.name: path for path in sorted(ZOO.parent.glob("data/*/manifest.jsonl"))}


def manifest_path(path: str | os.PathLike[str]) -> Path:
    """Returns the path of a manifest's file, also for ``zoo:NAME``.

    Raises:
        UnknownNameError: The package ships no recordings of that name.
    """
    scheme, colon, name = str(path).partition(":")
    if not colon or scheme != "zoo" or Path(path).exists():
        return Path(path)
    known = shipped_manifests()
    if name not in known:
        raise UnknownNameError.of("recordings", f"zoo:{name}", [f"zoo:{one}" for one in known])
    return known[name]


def _entry(row: dict[str, Any], where: str, folder: Path) -> Entry:
    audio = text_of(row, AUDIO, where)
    if audio is not None and (not audio.strip() or "\0" in audio):
        raise InputError(f"{where} has the path {audio!r}; expected the path of a recording")
    name = text_of(row, ID, where) or None  # an empty one names nothing
    if name is None and audio is None:
        raise InputError(f"{where} has neither {any_of(ID)} nor {any_of(AUDIO)}")
    offset, duration = seconds_of(row, OFFSET, where), seconds_of(row, DURATION, where)
    if not offset and duration is None:
        offset = None
    if name is None:
        length = "" if duration is None else f"+{duration}"
        name = audio if offset is None else f"{audio}@{offset}{length}"
    return Entry(
        id=str(name),
        audio=None if audio is None else path_in(folder, audio),
        text=text_of(row, TEXT, where),
        offset_s=offset,
        duration_s=duration,
        speaker=text_of(row, SPEAKER, where),
        language=text_of(row, LANGUAGE, where) or None,
        fields=row,
    )


def seconds_of(row: Mapping[str, Any], names: Iterable[str], where: str) -> float | None:
    """Returns the number of seconds in the first of some columns; ``None``: the row has none.

    Raises:
        InputError: The value is not a number of seconds.
    """
    value = first_of(row, names)
    if value in (None, ""):
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InputError(f"{where} has {str(value)[:40]!r} under {any_of(names)}; expected seconds")
    return seconds
