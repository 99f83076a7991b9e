"""Transcripts as text, subtitles, tables and JSON, and safe names for the files.

A writer takes a `Transcript` and returns the whole file. Files are written under a temporary name
and renamed, so that a file that exists is complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mmdecode.errors import OptionError, did_you_mean

if TYPE_CHECKING:
    from mmdecode.asr.transcriber import Segment, Transcript


def txt(transcript: Transcript) -> str:
    """One line per segment."""
    return "".join(f"{_line(segment.text)}\n" for segment in _spoken(transcript))


def srt(transcript: Transcript) -> str:
    """SubRip subtitles."""
    blocks = [
        f"{number}\n{_clock(s.start_s, ',')} --> {_clock(_end(s), ',')}\n{_cue(s.text)}\n\n"
        for number, s in enumerate(_spoken(transcript), 1)
    ]
    return "".join(blocks)


def vtt(transcript: Transcript) -> str:
    """WebVTT subtitles."""
    escaped = [
        (s, _cue(s.text).replace("&", "&amp;").replace("<", "&lt;")) for s in _spoken(transcript)
    ]
    blocks = [
        f"{_clock(s.start_s, '.')} --> {_clock(_end(s), '.')}\n{text}\n\n" for s, text in escaped
    ]
    return "WEBVTT\n\n" + "".join(blocks)


def tsv(transcript: Transcript) -> str:
    """Start and end in milliseconds, and the text."""
    rows = [
        f"{round(s.start_s * 1000)}\t{round(_end(s) * 1000)}\t{_line(s.text)}\n"
        for s in _spoken(transcript)
    ]
    return "start\tend\ttext\n" + "".join(rows)


def as_json(transcript: Transcript) -> str:
    """Everything, as one indented object."""
    plain = dataclasses.asdict(transcript)
    return json.dumps(plain, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def jsonl(transcript: Transcript) -> str:
    """One segment per line."""
    return "".join(
        json.dumps(dataclasses.asdict(s), ensure_ascii=False, allow_nan=False) + "\n"
        for s in transcript.segments
    )


FORMATS: dict[str, Callable[[Transcript], str]] = {
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


_RESERVED = frozenset(
    [
        "results",
        "run",
        "con",
        "prn",
        "aux",
        "nul",
        *(f"{d}{i}" for d in ("com", "lpt") for i in range(10)),
    ]
)
_LONGEST = 120  # bytes of a name, far below what file systems take


def file_stem(source: str, taken: Iterable[str] = ()) -> str:
    """A name for a source's files: no folder, no control characters, none of ``taken``.

    Args:
        source: The path or name of a recording, whatever it holds.
        taken: Names in use; upper and lower case count as the same.
    """
    name = unicodedata.normalize("NFC", re.split(r"[/\\]", source)[-1])
    stem = name.rpartition(".")[0] or name
    stem = re.sub(r"[^\w\-. ()+,@]", "_", stem).strip(". ")
    stem = stem.encode()[:_LONGEST].decode(errors="ignore").strip(". ") or "audio"
    used = {*_RESERVED, *(name.casefold() for name in taken)}
    candidate, number = stem, 2
    while candidate.casefold() in used:
        candidate, number = f"{stem}-{number}", number + 1
    return candidate


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that either is complete or does not exist."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _spoken(transcript: Transcript) -> Iterator[Segment]:
    return (segment for segment in transcript.segments if segment.text.strip())


def _line(text: str) -> str:
    return " ".join(text.split())


def _cue(text: str) -> str:
    return _line(text).replace("-->", "->")


def _end(segment: Segment) -> float:
    return max(segment.end_s, segment.start_s)


def _clock(seconds: float, mark: str) -> str:
    milliseconds = round(max(seconds, 0.0) * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"
