"""Results folder of a transcription job, see `mmdecode.runs.journal`.

Each line has the ``id``, the absolute ``audio`` path and, for a part of a file, its offset and
duration, so ``results.jsonl`` is itself a manifest (`mmdecode.asr.output.manifest`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mmdecode.asr.audio.reading import Source
from mmdecode.asr.decoding.long_form import HINT
from mmdecode.asr.languages import language_code
from mmdecode.asr.output.formats import FORMATS, Names, ending
from mmdecode.asr.output.inputs import sizes
from mmdecode.asr.output.manifest import Entry, opened
from mmdecode.asr.output.subtitles import DEFAULT, Layout
from mmdecode.asr.results import Failure, Transcript
from mmdecode.asr.transcriber import Transcriber, failure_of
from mmdecode.errors import InputError
from mmdecode.runs.ahead import read_ahead
from mmdecode.runs.crashes import watched
from mmdecode.runs.files import explained, write_file
from mmdecode.runs.items import Failed, written
from mmdecode.runs.journal import Journal, Unit
from mmdecode.runs.work import Tally

READ = """
import sys
from mmdecode.asr.audio.reading import blocks, recording
for _ in blocks(recording(sys.argv[1]), 16_000):
    pass
"""
"""Program that decodes the recording whose path is its argument."""


@dataclass
class TranscriptTally(Tally):
    """Counts and results of a run."""

    audio_s: float = 0.0
    windows: int = 0
    repetitive: int = 0
    truncated: dict[str, str] = field(default_factory=dict)

    @property
    def rtfx(self) -> float | None:
        """Seconds of audio transcribed per second of wall-clock time."""
        return self.audio_s / self.wall_s if self.audio_s and self.wall_s else None

    def add(self, position: int, result: Transcript | Failure, keep: bool) -> bool:
        """Counts a result; see `Tally.add`."""
        if isinstance(result, Transcript):
            self.audio_s += result.duration_s
            self.windows += result.stats["windows"]
            self.repetitive += result.stats["looped"]
            if result.truncated is not None:
                self.truncated[result.source] = result.truncated
        return super().add(position, result, keep)


class ResultFolder(Journal[Entry]):
    """Transcripts in a folder: a file for each recording and format, and a line in the results.

    Args:
        folder: Results folder, which exists.
        settings: All settings that the results depend on.
        entries: The input, in order; the same for all processes.
        formats: Formats written per recording.
        layout: Layout of subtitles.
        **how: See `Journal`.
    """

    what, other = "a result", "another recording"
    again = "transcribes that recording again"
    doing, measure, tally = "transcribing", "s of audio", TranscriptTally

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        entries: Sequence[Entry],
        formats: Sequence[str] = (),
        layout: Layout = DEFAULT,
        **how: Any,
    ) -> None:
        super().__init__(folder, settings, entries, tree=bool(settings.get("keep_tree")), **how)
        self.formats, self.layout = formats, layout
        self.language = settings.get("language")  # without it, entries' own count
        self._known_names: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._order = {entry.id: index for index, entry in enumerate(entries)}

    def check_line(self, line: Mapping[str, Any]) -> str:
        """Returns the id in a line, and learns the name of the recording's files.

        Raises:
            InputError: The files would be outside of the folder.
        """
        source, name = line["source"], line["name"]
        if {"", ".", ".."} & {*re.split(r"[/\\]", name)}:
            raise InputError(
                f"{self.path} names files outside of the results folder ({name!r}); remove the line"
            )
        self._known_names[source] = name
        return str(source)

    def known(self, item: Entry) -> dict[str, Any]:
        """Path, part and language of a recording; standard input has no path."""
        path = None if item.stdin or item.audio is None else os.path.abspath(item.audio)
        found: dict[str, Any] = {"audio": path}
        if item.offset_s is not None:
            found |= {"offset": item.offset_s, "duration": item.duration_s}
        if item.language:  # a transcript's own takes its place
            found["language"] = item.language
        return found

    def differing(self, item: Entry, line: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Differences in path, part or language; see `Journal.differing`."""
        now, names = self.known(item), ["audio", "offset", "duration"]
        if not self.language and item.language and line.get("language"):
            now["language"] = language_code(item.language)
            names.append("language")
        return [(n, line.get(n), now.get(n)) for n in names if line.get(n) != now.get(n)]

    def inputs(self, item: Entry) -> list[str]:
        """The audio file."""
        return [item.audio] if item.audio is not None and not item.stdin else []

    def files(self, item: Entry) -> Iterable[Path]:
        """A file for each format."""
        name = self._name(item.id)
        return [self.folder / f"{name}.{ending(kind)}" for kind in self.formats]

    def _name(self, source: str) -> str:
        """Name of a recording's files, which does not depend on the recordings already done."""
        if not self._names:
            names, self._names = Names(self._known_names.values()), dict(self._known_names)
            for entry in self.items:
                if entry.id not in self._names:
                    self._names[entry.id] = names.new(entry.id, entry.folder)
        return self._names[source]

    def decode(
        self, model: Transcriber, unit: Unit[Entry], meter: Callable[[float], None]
    ) -> Iterator[Transcript | Failure]:
        """Transcribes the recordings of a unit; see `Journal.decode`."""
        sources = read_ahead([self.source(entry) for entry in unit.items], unit.batch_size)
        return model.stream(sources, meter, watch=self.watch, batch_size=unit.batch_size)

    def sizes(self, items: Sequence[Entry]) -> Sequence[float]:
        """Seconds of audio, if known for all, else bytes."""
        return sizes(items)

    def id_of_result(self, result: Transcript | Failure) -> str:
        """The name of the recording."""
        return result.source

    def crashed(self, item: Entry, failed: Failed) -> Failure:
        """The failure of a recording; see `Journal.crashed`."""
        return failure_of(item.id, self._order[item.id], failed)

    def source(self, entry: Entry) -> Source:
        """A recording whose state is recorded before it is read, and whose reading is noted.

        Args:
            entry: The recording. One that crashed an earlier run is first read by another process.
        """
        source = opened(entry, self.language)
        path, hint = entry.audio or "", "convert it with ffmpeg"
        return self.sources.noting(
            watched(source, self.reading, path, READ, hint), self.inputs(entry)
        )

    def add(self, result: Transcript | Failure) -> Transcript | Failure:
        """Writes the files of a recording, then its line in the results.

        Args:
            result: The result, whose ``source`` is the id of an entry.

        Returns:
            The result with its index in the whole input.

        Raises:
            InputError: The folder cannot be written.
        """
        index = self._order[result.source]
        entry = self.items[index]
        result = dataclasses.replace(result, index=index)
        if entry.id in self.done:
            return result
        if isinstance(result, Transcript):
            with explained(self.folder):
                self.begin_writing()
                failed = written(partial(self._write, entry, result), HINT)
            if failed:
                result = failure_of(entry.id, index, failed)
        line = {"id": entry.id, **self.known(entry)}
        for path in self.inputs(entry):
            line |= self.sources.as_read(path) or {}
        line["name"] = self._name(entry.id)
        fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
        self.append(entry, line | fields)
        return result

    def _write(self, entry: Entry, transcript: Transcript) -> None:
        for kind, path in zip(self.formats, self.files(entry), strict=True):
            write_file(path, FORMATS[kind](transcript, self.layout), self._overwrite)
