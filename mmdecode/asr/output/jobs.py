"""Results folder of a transcription job that can be interrupted and resumed.

The files of a recording are written first, each under a temporary name and then renamed. Then a
line about the recording is appended to ``results.jsonl`` and flushed. So a recording with a line is
complete, and a recording without a line is transcribed again. ``run.json`` holds the settings. With
several processes, each writes its lines to a file of its own, ``parts/rank-N.jsonl``. At the start
and end of a run all lines are merged into ``results.jsonl``, one per recording in the order of the
input; its content does not depend on interruptions or the number of processes.

Each line has the ``id``, the absolute ``audio`` path and, for a part of a file, its offset and
duration, so ``results.jsonl`` is itself a manifest (`mmdecode.asr.output.manifest`).

A run is continued only on request, only with the same settings (`mmdecode.runs.files`), and only if
each id in the folder still belongs to the same recording. Recordings that failed are tried again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mmdecode.asr.audio.reading import Blocks, Source
from mmdecode.asr.decoding.long_form import HINT
from mmdecode.asr.languages import language_code
from mmdecode.asr.output.formats import FORMATS, Names, ending
from mmdecode.asr.output.manifest import Entry
from mmdecode.asr.output.subtitles import DEFAULT, Layout
from mmdecode.asr.results import Failure, Transcript
from mmdecode.asr.transcriber import failure_of
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.changes import Inputs
from mmdecode.runs.crashes import Batches, InFlight, ended_over, suspects_in
from mmdecode.runs.files import (
    RUN,
    append_line,
    check_settings,
    complete_lines,
    explained,
    is_own,
    lock,
    note_settings,
    open_append,
    refuse_foreign,
    remove_partial,
    to_json,
    write_file,
)
from mmdecode.runs.items import written

RESULTS, PARTS = "results.jsonl", "parts"
JOURNAL = ".reading-{}.tmp"
BATCHES = ".decoding-{}"


class Prepared(NamedTuple):
    """State of a results folder before a run.

    Attributes:
        suspects: Names of recordings that were being read when an earlier run crashed.
        changed: Ids of recordings whose audio files changed since; their results were removed.
        alone: Ids of recordings to decode one by one, since a run ended while they were decoded in
            a batch, see `mmdecode.runs.crashes.ended_over`.
        replaced: Whether existing results are deleted when the first new one is written.
    """

    suspects: set[str]
    changed: set[str]
    alone: dict[str, int]
    replaced: bool = False


def prepare(
    folder: Path,
    settings: Mapping[str, Any],
    resume: bool,
    entries: Sequence[Entry],
    formats: Sequence[str] = (),
    overwrite: bool = False,
) -> Prepared:
    """Prepares a results folder: checks and writes the settings, cleans up after earlier runs.

    Args:
        folder: Results folder, which exists.
        settings: All settings that the results depend on.
        resume: Whether to continue an earlier run.
        entries: The input, in order.
        formats: Formats written per recording.
        overwrite: Whether files that mmdecode did not write may be replaced, and, without
            ``resume``, earlier results; these are kept until `ResultFolder` adds the first result.

    Raises:
        OptionError: The folder holds results and ``resume`` is not set, or it holds results of
            other settings or recordings, or files that mmdecode did not write would be replaced.
        InputError: The folder cannot be written.
    """
    changed: set[str] = set()
    done: set[str] = set()
    names: dict[str, str] = {}
    with explained(folder):
        there = any((folder / name).exists() for name in (RUN, RESULTS, PARTS))
        replaced = there and overwrite and not resume
        if not (folder / RUN).exists() or not is_own(folder / RUN):
            refuse_foreign([folder / RUN, folder / RESULTS], overwrite)
        if there and not replaced:
            check_settings(folder, settings, resume)
            _check_recordings(folder, entries, languages=not settings.get("language"))
            done, names = _known(folder)
            changed = _changed(folder, entries)
        taken = _named(entries, names)
        todo = [entry.id for entry in entries if entry.id not in done or entry.id in changed]
        files = [folder / f"{taken[name]}.{ending(kind)}" for name in todo for kind in formats]
        refuse_foreign(files, overwrite)
        for name in changed:
            for kind in formats:
                (folder / f"{taken[name]}.{ending(kind)}").unlink(missing_ok=True)
        journals = sorted(folder.glob(JOURNAL.format("*")))
        suspects = suspects_in(journals)
        for journal in journals:
            journal.unlink()
        remove_partial(folder, tree=bool(settings.get("keep_tree")))
        # into one note, which the leading process goes on with: the others' may never run again
        alone = {} if replaced else ended_over(_notes(folder), set(todo))
        Batches(folder / BATCHES.format(0), alone).close()
        for left in _notes(folder):
            if left.name != BATCHES.format(0):
                left.unlink()
        if not replaced:
            note_settings(folder, settings)
    if not replaced or (folder / PARTS).exists():
        merge(folder, entries, changed)
    return Prepared(set(suspects), changed, alone, replaced)


def finish(folder: Path, entries: Sequence[Entry]) -> None:
    """Finishes a run: merges all result lines and removes the notes of batches in progress.

    Args:
        folder: Results folder; no process of the run may write to it any more.
        entries: The input.

    Raises:
        InputError: A line cannot be read, or the folder cannot be written.
    """
    merge(folder, entries)
    with explained(folder):
        for note in _notes(folder):
            note.unlink(missing_ok=True)


def merge(folder: Path, entries: Sequence[Entry], without: Collection[str] = ()) -> None:
    """Merges all result lines into ``results.jsonl``: one per recording, in input order.

    Args:
        folder: Results folder.
        entries: The input.
        without: Ids whose lines are removed.

    Raises:
        InputError: A line cannot be read, or the folder cannot be written.
    """
    position = {entry.id: index for index, entry in enumerate(entries)}
    lines: dict[str, bytes] = {}
    transcribed: set[str] = set()
    with explained(folder):
        parts = _parts(folder)
        for path in parts:  # a process of a run whose leading one was killed may still be at it
            with path.open("rb") as file:
                lock(file.fileno(), folder)
        for path in [folder / RESULTS, *parts]:
            for line, found in _lines(path):
                source = found["source"]
                if source in without:
                    continue
                if "error" not in found:
                    transcribed.add(source)
                elif source in transcribed:
                    continue
                lines[source] = line
        # recordings of an earlier, larger input stay, after the others
        ordered = sorted(lines, key=lambda source: position.get(source, len(position)))
        write_file(folder / RESULTS, b"".join(lines[source] for source in ordered))
        if (folder / PARTS).exists():
            shutil.rmtree(folder / PARTS)


class ResultFolder:
    """Writes the results of one process; call `prepare` before it and `finish` after it.

    Args:
        folder: A results folder that `prepare` was called on.
        formats: Formats written per recording.
        entries: The input, in order; the same for all processes.
        layout: Layout of subtitles.
        rank: Rank of this process; ``None``: it is the only process.
        suspects: `Prepared.suspects`.
        alone: `Prepared.alone`.
        overwrite: Whether files that mmdecode did not write may be replaced.
        again: Settings to write together with the first result, when older results are deleted;
            ``None``: older results are kept.

    Attributes:
        done: Ids of the recordings that have a transcript.
        journal: Notes on disk which file is being read, to be found after a crash.
        batches: Notes on disk which recordings are being decoded, to be found after a crash.

    Raises:
        InputError: The folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        formats: Sequence[str],
        entries: Sequence[Entry],
        layout: Layout = DEFAULT,
        rank: int | None = None,
        suspects: Iterable[str] = (),
        alone: Mapping[str, int] | None = None,
        overwrite: bool = False,
        again: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.formats, self.layout = folder, formats, layout
        self._overwrite, self._inputs = overwrite, Inputs(folder)
        self.done: set[str] = set()
        self._names: dict[str, str] = {}
        self._failed: dict[str, bytes] = {}
        with explained(folder):
            for line, found in _lines(folder / RESULTS) if again is None else ():
                self._names[found["source"]] = found["name"]
                if "error" in found:
                    self._failed[found["source"]] = line
                else:
                    self.done.add(found["source"])
            self._part = folder / RESULTS
            if rank is not None:
                self._part = folder / PARTS / f"rank-{rank}.jsonl"
            self._new_settings = again
            self._file = self._opened() if again is None else None
            self.journal = InFlight(folder / JOURNAL.format(rank or 0), suspects)
            self.batches = Batches(folder / BATCHES.format(rank or 0), alone or {})
        self._names = _named(entries, self._names)
        self._entries = {entry.id: (index, entry) for index, entry in enumerate(entries)}

    def _opened(self) -> BinaryIO:
        """Opens the file for this process's lines, and deletes older results to be replaced."""
        if self._new_settings is not None:
            (self.folder / RESULTS).unlink(missing_ok=True)
            note_settings(self.folder, self._new_settings, self._overwrite)
        file = open_append(self._part)
        lock(file.fileno(), self.folder)
        return file

    def noted(self, entry: Entry, source: Source) -> Source:
        """Wraps a source so that the state of its file is recorded before it is read."""

        def read() -> Blocks:
            if entry.audio is not None and not entry.stdin:
                self._inputs.reading(entry.audio)
            return source.read()

        return dataclasses.replace(source, read=read)

    def add(self, result: Transcript | Failure) -> Transcript | Failure:
        """Writes the files of a recording, then its line in the results.

        Args:
            result: The result, whose ``source`` is the id of an entry.

        Returns:
            The result with its index in the whole input.

        Raises:
            InputError: The folder cannot be written.
        """
        name = self._names[result.source]
        index, entry = self._entries[result.source]
        result = dataclasses.replace(result, index=index)
        with explained(self.folder):
            self._file = self._file or self._opened()
            if isinstance(result, Transcript):
                result = self._written(result, name)
            if isinstance(result, Transcript):
                self.done.add(result.source)
            known, content = _recording(entry), None
            if known["audio"] is not None:
                content = self._inputs.as_read(entry.audio or "")
            line = {"id": entry.id, **known, **(content or {}), "name": name} | dataclasses.asdict(
                result
            )
            data = to_json(line).encode() + b"\n"
            if self._failed.get(result.source) != data:  # it failed just so in an earlier run
                append_line(self._file, data)
            self.batches.cleared(entry.id)
        return result

    def _written(self, transcript: Transcript, name: str) -> Transcript | Failure:
        """Writes the files of a recording; if that fails, the result becomes a `Failure`."""

        def write() -> None:
            for kind in self.formats:
                text = FORMATS[kind](transcript, self.layout)
                write_file(self.folder / f"{name}.{ending(kind)}", text, self._overwrite)

        failed = written(write, HINT)
        return failure_of(transcript.source, transcript.index, failed) if failed else transcript

    def close(self) -> None:
        """Closes the files; afterwards no more results can be added."""
        if self._file:
            self._file.close()
        self.journal.close()
        self.batches.close()


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / PARTS).glob("*.jsonl"))


def _notes(folder: Path) -> list[Path]:
    return sorted(folder.glob(BATCHES.format("*")))


def _recording(entry: Entry) -> dict[str, Any]:
    """Returns the keys of a line that identify the recording; standard input has no path."""
    known = entry.audio is not None and not entry.stdin
    found: dict[str, Any] = {"audio": os.path.abspath(entry.audio or "") if known else None}
    if entry.offset_s is not None:
        found |= {"offset": entry.offset_s, "duration": entry.duration_s}
    if entry.language:  # a transcript's own takes its place
        found["language"] = entry.language
    return found


def _known(folder: Path) -> tuple[set[str], dict[str, str]]:
    """Returns the ids that have a transcript, and the file names of all ids with a line."""
    done: set[str] = set()
    names: dict[str, str] = {}
    for path in [folder / RESULTS, *_parts(folder)]:
        for _, found in _lines(path):
            names[found["source"]] = found["name"]
            if "error" not in found:
                done.add(found["source"])
    return done, names


def _named(entries: Sequence[Entry], known: Mapping[str, str]) -> dict[str, str]:
    """Returns file names by id, which do not depend on the recordings already done."""
    names, found = Names(known.values()), dict(known)
    for entry in entries:
        if entry.id not in found:
            found[entry.id] = names.new(entry.id, entry.folder)
    return found


def _changed(folder: Path, entries: Sequence[Entry]) -> set[str]:
    """Returns the ids of recordings whose audio files changed since they were transcribed."""
    given = {entry.id: entry for entry in entries if entry.audio is not None and not entry.stdin}
    inputs, found = Inputs(folder), set()
    for path in [folder / RESULTS, *_parts(folder)]:
        for _, line in _lines(path):
            entry = given.get(line["source"])
            if "error" not in line and entry and inputs.changed(entry.audio or "", line):
                found.add(entry.id)
    return found


def _check_recordings(folder: Path, entries: Sequence[Entry], languages: bool) -> None:
    """Checks that the ids in a results folder still belong to the same recordings.

    Args:
        folder: Results folder.
        entries: The input.
        languages: Whether entries' own languages apply; they do not if one is set for all.

    Raises:
        OptionError: An id now belongs to another recording, part of a recording or language.
    """
    given = {entry.id: entry for entry in entries}
    for path in [folder / RESULTS, *_parts(folder)]:
        for _, found in _lines(path):
            entry = given.get(found["source"])
            if entry is None or "error" in found:
                continue
            now = _recording(entry)
            before = {name: found.get(name) for name in ("audio", "offset", "duration")}
            if languages and entry.language and found.get("language"):
                now["language"] = language_code(entry.language)
                before["language"] = found["language"]
            differing = [name for name in before if before[name] != now.get(name)]
            if differing:
                shown = "; ".join(f"{n} was {before[n]!r}, is {now.get(n)!r}" for n in differing)
                raise OptionError(
                    f"{folder} holds a transcript with the id {entry.id!r}, which is now the id of "
                    f"another recording ({shown}); resume in the folder in which the run was "
                    "started, with the same input, or choose another --out"
                )


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields complete lines and their contents; skips a line that was cut off by a crash."""
    if not path.exists():
        return
    for number, line in enumerate(complete_lines(path), 1):
        try:
            found = json.loads(line)
            _ = found["source"], found["name"]
            inside = not {"", ".", ".."} & {*re.split(r"[/\\]", found["name"])}
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{path}, line {number} is not a result; remove the line, then --resume will "
                "transcribe that recording again"
            ) from None
        if not inside:
            raise InputError(
                f"{path}, line {number} names files outside of the results folder "
                f"({found['name']!r}); remove the line"
            )
        yield line, found
