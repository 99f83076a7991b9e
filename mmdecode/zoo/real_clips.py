"""``zoo:real-clips``: recordings of people with references, at their original sampling rates.

Eleven short English clips ship, 65 s and 174 words: enough to see that a recogniser works, and too
little for a claim about its word error rate. `all_clips` adds further clips from
``../shared/data/speech`` next to a checkout, if that folder exists.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mmdecode
from mmdecode.asr.audio.reading import blocks, recording
from mmdecode.asr.output.manifest import Entry, read_manifest

FOLDER = Path(__file__).parent / "data" / "real-clips"
MORE = Path(mmdecode.__file__).parents[2] / "shared" / "data" / "speech"
"""Folder next to a checkout with further clips, which are not part of the package."""
RATE = 16_000


@dataclass(frozen=True, kw_only=True)
class RealClip:
    """One recording of a person.

    Attributes:
        name: Unique.
        path: Its file.
        text: Reference text as in its source: some in capitals, some without punctuation.
        duration_s: Seconds.
        speaker: Speaker; ``None``: not known.
        origin: Work or corpus of the recording.
        licence: Licence of the recording.
        source: Repository and path it was taken from.
    """

    name: str
    path: Path
    text: str
    duration_s: float
    speaker: str | None
    origin: str
    licence: str
    source: str

    def samples(self, rate: int = RATE) -> np.ndarray:
        """Mono float32 samples at ``rate``, ``(samples,)``: channels averaged, resampled."""
        return np.concatenate([*blocks(recording(self.path), rate)])


def real_clips(folder: str | os.PathLike[str] = FOLDER) -> list[RealClip]:
    """Reads the English clips of a folder with a ``manifest.jsonl``; by default those that ship.

    Args:
        folder: Folder whose manifest has text, language, licence and so on of each clip.

    Raises:
        InputError: The manifest cannot be read.
    """
    entries = read_manifest(Path(folder) / "manifest.jsonl", text=True)
    return [_clip(entry) for entry in entries if entry.language == "en"]


def all_clips(more: Path = MORE) -> list[RealClip]:
    """The shipped clips, and those of another folder if it exists: 11, or 22 with `MORE`."""
    shipped = real_clips()
    if not (more / "manifest.jsonl").exists():
        return shipped
    known = {clip.source for clip in shipped}
    return [*shipped, *(clip for clip in real_clips(more) if clip.source not in known)]


def _clip(entry: Entry) -> RealClip:
    facts: dict[str, Any] = {key: entry.fields.get(key) for key in ("origin", "licence", "source")}
    return RealClip(
        name=entry.id,
        path=Path(entry.audio or ""),
        text=entry.text or "",
        duration_s=entry.duration_s or 0.0,
        speaker=entry.speaker,
        **facts,
    )
