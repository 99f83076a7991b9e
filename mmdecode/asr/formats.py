"""Transcripts as text, subtitles, tables and JSON, and safe names for the files.

A writer takes a `Transcript` and returns the whole file. Files are written under a temporary name
and renamed, so that a file that exists is complete.
"""

from __future__ import annotations

import dataclasses
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from mmdecode.asr.audio import SUFFIXES
from mmdecode.asr.subtitles import DEFAULT, Layout, clean, cues
from mmdecode.errors import OptionError, did_you_mean
from mmdecode.files import to_json

if TYPE_CHECKING:
    from mmdecode.asr.transcriber import Segment, Transcript


def txt(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """One line per segment."""
    return "".join(f"{text}\n" for _, text in _spoken(transcript))


def srt(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """SubRip subtitles."""
    blocks = [
        f"{number}\n{_clock(cue.start_ms, ',')} --> {_clock(cue.end_ms, ',')}\n"
        + "".join(f"{line.replace('-->', '->')}\n" for line in cue.lines)
        for number, cue in enumerate(cues(transcript.segments, layout), 1)
    ]
    return "".join(f"{block}\n" for block in blocks)


def vtt(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """WebVTT subtitles."""
    blocks = [
        f"{_clock(cue.start_ms, '.')} --> {_clock(cue.end_ms, '.')}\n"
        + "".join(f"{_escaped(line)}\n" for line in cue.lines)
        for cue in cues(transcript.segments, layout)
    ]
    return "WEBVTT\n\n" + "".join(f"{block}\n" for block in blocks)


def tsv(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """Start and end in milliseconds, and the text."""
    rows = [
        f"{round(1000 * s.start_s)}\t{round(1000 * max(s.end_s, s.start_s))}\t{text}\n"
        for s, text in _spoken(transcript)
    ]
    return "start\tend\ttext\n" + "".join(rows)


def as_json(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """Everything, as one indented object."""
    return to_json(dataclasses.asdict(transcript), indent=1) + "\n"


def jsonl(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """One segment per line."""
    return "".join(to_json(dataclasses.asdict(s)) + "\n" for s in transcript.segments)


FORMATS: dict[str, Callable[[Transcript, Layout], str]] = {
    "txt": txt,
    "srt": srt,
    "vtt": vtt,
    "tsv": tsv,
    "json": as_json,
    "jsonl": jsonl,
}


def parse_formats(text: str) -> list[str]:
    """Names from ``txt,srt``.

    Raises:
        OptionError: A name is unknown, or none is given.
    """
    names = [part.strip().lower() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in FORMATS:
            hint = did_you_mean(name, FORMATS)
            raise OptionError(f"no format named {name!r}{hint}; known: {', '.join(FORMATS)}")
    if not names:
        raise OptionError(f"no format in {text!r}; expected some of {', '.join(FORMATS)}")
    return list(dict.fromkeys(names))


_DEVICES = ("con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(10)))
_RESERVED = frozenset(["results", "run", "parts", *_DEVICES])
_LONGEST = 120  # bytes of a name, far below what file systems take


def file_stem(source: str) -> str:
    """A name for a source's files: no folder, no ending of audio, no control characters.

    Args:
        source: The path or name of a recording, whatever it holds.
    """
    name = unicodedata.normalize("NFC", re.split(r"[/\\]", source)[-1])
    stem, ending = os.path.splitext(name)
    stem = stem if ending.lower() in SUFFIXES else name
    stem = re.sub(r"[^\w\-. ()+,@]", "_", stem).strip(". ")
    return stem.encode()[:_LONGEST].decode(errors="ignore").strip(". ") or "audio"


class Names:
    """Names for the files of many sources, each given once.

    Args:
        taken: Names in use; upper and lower case count as the same.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*_RESERVED, *(name.casefold() for name in taken)}
        self._numbers: dict[str, int] = {}

    def new(self, source: str) -> str:
        """A source's `file_stem`, with a number where that is taken."""
        stem = file_stem(source)
        name, number = stem, self._numbers.get(stem.casefold(), 1)
        while name.casefold() in self._taken:
            number += 1
            name = f"{stem}-{number}"
        self._numbers[stem.casefold()] = number
        self._taken.add(name.casefold())
        return name


def _spoken(transcript: Transcript) -> Iterator[tuple[Segment, str]]:
    """Segments that have a text, and that text on one line."""
    for segment in transcript.segments:
        if text := clean(segment.text):
            yield segment, text


def _escaped(line: str) -> str:
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clock(milliseconds: int, mark: str) -> str:
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"
