"""Formats transcripts as text, subtitles, tables and JSON; makes safe names for their files.

``whisper-json`` is the JSON that openai-whisper's command line writes, for tools that read it.

The function of a format takes a `Transcript` and returns the content of its file. Files are written
under a temporary name and then renamed, so that every file with its final name is complete.
"""

from __future__ import annotations

import dataclasses
import os
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mmdecode.asr.alignment.words import SPACELESS
from mmdecode.asr.audio.reading import SUFFIXES
from mmdecode.asr.output.subtitles import DEFAULT, Cue, Layout, clean, cues
from mmdecode.errors import OptionError, did_you_mean
from mmdecode.runs.files import to_json

if TYPE_CHECKING:
    from mmdecode.asr.results import Segment, Transcript


def txt(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """Formats a transcript as plain text, one line per segment."""
    return "".join(f"{text}\n" for _, text in _spoken(transcript))


def srt(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """Formats a transcript as SubRip subtitles."""
    blocks = [
        f"{number}\n{_clock(cue.start_ms, ',')} --> {_clock(cue.end_ms, ',')}\n"
        + "".join(f"{line.replace('-->', '->')}\n" for line in cue.lines)
        for number, cue in enumerate(cues(transcript.segments, layout), 1)
    ]
    return "".join(f"{block}\n" for block in blocks)


def vtt(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """Formats a transcript as WebVTT subtitles."""
    blocks = map(cue_text, cues(transcript.segments, layout))
    return "WEBVTT\n\n" + "".join(blocks)


def cue_text(cue: Cue) -> str:
    """Formats a cue as WebVTT, with the empty line that ends it."""
    lines = "".join(f"{_escaped(line)}\n" for line in cue.lines)
    return f"{_clock(cue.start_ms, '.')} --> {_clock(cue.end_ms, '.')}\n{lines}\n"


def tsv(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """Formats a transcript as a tab-separated table: start and end in milliseconds, and text."""
    rows = [
        f"{round(1000 * s.start_s)}\t{round(1000 * max(s.end_s, s.start_s))}\t{text}\n"
        for s, text in _spoken(transcript)
    ]
    return "start\tend\ttext\n" + "".join(rows)


def as_json(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """Formats all fields of a transcript as one indented JSON object."""
    return to_json(dataclasses.asdict(transcript), indent=1) + "\n"


def jsonl(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """Formats a transcript as JSON lines, with one segment per line."""
    return "".join(to_json(dataclasses.asdict(s)) + "\n" for s in transcript.segments)


def whisper_json(transcript: Transcript, layout: Layout = DEFAULT) -> str:
    """Formats a transcript as openai-whisper's JSON: ``text``, ``segments`` and ``language``.

    Segments of one window share ``seek`` (the window's start in hundredths of a second),
    ``avg_logprob``, ``compression_ratio`` and ``no_speech_prob``; the last one is null for models
    without timestamps. Texts begin with a space, as in openai-whisper.

    Raises:
        OptionError: The scores of segments were not computed; see ``scores`` of
            `mmdecode.asr.TranscribeOptions`.
    """
    space = "" if transcript.language in SPACELESS else " "
    texts: dict[float, str] = {}  # by window
    for segment in transcript.segments:
        texts[segment.window_s] = texts.get(segment.window_s, "") + space + segment.text
    segments = []
    for number, segment in enumerate(transcript.segments):
        known = transcript.timed_by == "windows" or segment.no_speech_prob is not None
        if segment.avg_logprob is None or not known:
            raise OptionError(
                "whisper-json needs avg_logprob and no_speech_prob of every segment, which were "
                "not computed; transcribe with scores=True"
            )
        found: dict[str, Any] = {
            "id": number,
            "seek": round(100 * segment.window_s),
            "start": segment.start_s,
            "end": segment.end_s,
            "text": space + segment.text,
            "tokens": segment.tokens,
            "temperature": segment.temperature,
            "avg_logprob": max(segment.avg_logprob, _LEAST),
            "compression_ratio": _compression_ratio(texts[segment.window_s]),
            "no_speech_prob": segment.no_speech_prob,
        }
        if segment.words is not None:
            found["words"] = [
                {"word": w.text, "start": w.start_s, "end": w.end_s, "probability": w.confidence}
                for w in segment.words
            ]
        segments.append(found)
    whole = {
        "text": "".join(segment["text"] for segment in segments),
        "segments": segments,
        "language": transcript.language or "en",  # models of one language are English
    }
    return to_json(whole) + "\n"


_LEAST = -1e4
"""Log-probability written instead of minus infinity, which JSON does not have."""


def _compression_ratio(text: str) -> float:
    """Returns the zlib compression ratio of a text, as in openai-whisper.

    The ratio that ``compression_ratio_threshold`` uses is of token ids instead.
    """
    data = text.strip().encode(errors="replace")
    return len(data) / len(zlib.compress(data))


FORMATS: dict[str, Callable[[Transcript, Layout], str]] = {
    "txt": txt,
    "srt": srt,
    "vtt": vtt,
    "tsv": tsv,
    "json": as_json,
    "jsonl": jsonl,
    "whisper-json": whisper_json,
}
ALL = "all"
"""Name that stands for all formats together."""


def ending(kind: str) -> str:
    """Returns the file name extension of a format, without the first dot."""
    return "whisper.json" if kind == "whisper-json" else kind


def parse_formats(text: str) -> list[str]:
    """Splits a list of format names such as ``txt,srt``; ``all`` stands for every format.

    Raises:
        OptionError: A name is unknown, or the list is empty.
    """
    names = [part.strip().lower() for part in text.split(",") if part.strip()]
    known = [*FORMATS, ALL]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise OptionError(f"no format named {name!r}{hint}; expected {', '.join(known)}")
    if not names:
        raise OptionError(f"no format in {text!r}; expected some of {', '.join(known)}")
    return list(FORMATS) if ALL in names else list(dict.fromkeys(names))


_DEVICES = ("con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(10)))
_RESERVED = frozenset(["results", "run", "parts", *_DEVICES])
_LONGEST = 120  # bytes of a name, far below what file systems take


def file_stem(source: str) -> str:
    """Returns a safe file name for a recording, without folder, extension and special characters.

    Args:
        source: The path or name of a recording; may contain any characters.
    """
    name = unicodedata.normalize("NFC", re.split(r"[/\\]", source)[-1])
    stem, suffix = os.path.splitext(name)
    stem = stem if suffix.lower() in SUFFIXES else name
    if stem.lower().endswith(".whisper"):  # x.whisper.json is x in whisper-json
        stem = stem[: -len(".whisper")] + "_whisper"
    return _safe(stem) or "audio"


def _folder_stem(folder: str) -> str:
    """Returns a relative folder path with safe names, each followed by a slash.

    A folder name that a results file could also have is changed, so that the two cannot collide.
    """
    endings = tuple(f".{ending(kind)}" for kind in FORMATS)
    parts = []
    for part in re.split(r"[/\\]", folder):
        name = _safe(unicodedata.normalize("NFC", part)) or "folder"
        taken = name.casefold() in _RESERVED or name.casefold().endswith(endings)
        parts.append(f"{name}_/" if taken else f"{name}/")
    return "".join(parts) if folder else ""


def _safe(name: str) -> str:
    """Removes characters that file systems refuse, and dots at the beginning and end of a name."""
    name = re.sub(r"[^\w\-. ()+,@]", "_", name).strip(". ")
    return name.encode()[:_LONGEST].decode(errors="ignore").strip(". ")


class Names:
    """Assigns distinct file names to many recordings.

    Args:
        taken: Names already in use; names are compared without case.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*_RESERVED, *(name.casefold() for name in taken)}
        self._numbers: dict[str, int] = {}

    def new(self, source: str, folder: str = "") -> str:
        """Returns the source's `file_stem`, with a number appended if that name is in use.

        Args:
            source: The path or name of a recording.
            folder: Folder for its files, relative to the results folder.
        """
        above = _folder_stem(folder)
        stem = above + file_stem(source)
        name, number = stem, self._numbers.get(stem.casefold(), 1)
        while name.casefold() in self._taken or name.casefold()[len(above) :] in _DEVICES:
            number += 1
            name = f"{stem}-{number}"
        self._numbers[stem.casefold()] = number
        self._taken.add(name.casefold())
        return name


def _spoken(transcript: Transcript) -> Iterator[tuple[Segment, str]]:
    """Yields the segments that have text, each with its text on one line."""
    for segment in transcript.segments:
        if text := clean(segment.text):
            yield segment, text


def _escaped(line: str) -> str:
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _clock(milliseconds: int, mark: str) -> str:
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"
