"""Captions of a stream: a WebVTT file that grows with every update that commits words.

The file is complete up to its last empty line at any time, also if the program is killed. A cue
begins where its first word does, if words have times; else with the update after which its words
were first shown. Cues are in order of time and do not overlap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmdecode.asr.output.formats import cue_text
from mmdecode.asr.output.subtitles import Layout, cues
from mmdecode.asr.results import Segment
from mmdecode.errors import InputError, OptionError
from mmdecode.runs.files import append_line, open_append, write_file

if TYPE_CHECKING:
    from mmdecode.asr.streaming.stream import Update

_LAYOUT = Layout(max_reading_speed=None, min_duration_s=0.1)


class Captions:
    """Writes the captions of one stream.

    Args:
        path: Path of the file; missing folders are created.
        overwrite: Whether to replace a file, see `refuse_existing`.

    Raises:
        OptionError: There is a file already, and ``overwrite`` is false.
        InputError: The file cannot be written.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        refuse_existing([path], overwrite)
        self.path = path
        self._end_s = 0.0  # of the last cue
        self._since_s = 0.0  # time of the last update after which no word was open
        try:
            write_file(path, "WEBVTT\n\n", overwrite)
            self._file = open_append(path)
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> InputError:
        return InputError(
            f"cannot write to {self.path}: {error.strerror}; choose another --out, or free disk "
            "space"
        )

    def add(self, update: Update) -> None:
        """Appends cues of the words that an update commits.

        Raises:
            InputError: The file cannot be written.
        """
        if update.committed and (found := cues([self._segment(update)], _LAYOUT)):
            self._end_s = found[-1].end_ms / 1000
            try:
                append_line(self._file, "".join(map(cue_text, found)).encode())
            except OSError as error:
                raise self._unwritten(error) from error
        if not update.provisional:
            self._since_s = update.audio_s

    def _segment(self, update: Update) -> Segment:
        """Returns the committed words with times that do not begin before the last cue ended."""
        words = [
            replace(
                word,
                start_s=max(word.start_s, self._end_s),
                end_s=max(word.end_s, word.start_s, self._end_s),
            )
            for word in update.words or ()
        ]
        start_s = words[0].start_s if words else max(self._since_s, self._end_s)
        end_s = words[-1].end_s if words else max(update.audio_s, start_s)
        return Segment(
            start_s=start_s, end_s=end_s, text=update.text, tokens=[], words=words or None
        )

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def refuse_existing(paths: Iterable[Path], overwrite: bool = False) -> None:
    """Raises if there are captions already, also of an earlier run: they cannot be made again.

    Args:
        paths: Paths of files that would be written.
        overwrite: Whether the user allows replacing them.

    Raises:
        OptionError: Files that are not empty exist, or a path is a folder.
    """
    paths = list(paths)
    for path in paths:
        if path.is_dir():
            raise OptionError(f"{path} is a folder; expected a file; choose another --out")
    there = [str(path) for path in paths if os.path.lexists(path) and path.stat().st_size]
    if there and not overwrite:
        shown = ", ".join(there[:5]) + (f" and {len(there) - 5} more" if there[5:] else "")
        raise OptionError(
            f"{shown}: there already; choose another --out, or replace with --overwrite"
        )
