"""``zoo:real-clips``: recordings of human speech with references, at original sampling rates.

The package contains eleven short English clips, 65 s and 174 words in total: enough to see that a
recogniser works, too few to measure its word error rate. `all_clips` adds further clips from the
folder ``../shared/data/speech`` next to a checkout of the repository, if it exists.
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
"""Folder with further clips, next to a checkout of the repository; not part of the package."""
RATE = 16_000


@dataclass(frozen=True, kw_only=True)
class RealClip:
    """One recording of a person.

    Attributes:
        name: Unique name.
        path: Path of the audio file.
        text: Reference text as the source has it: some texts in capitals, some without punctuation.
        duration_s: Duration in seconds.
        speaker: Name or id of the speaker; ``None``: unknown.
        origin: Work or corpus of the recording.
        licence: Licence of the recording.
        source: Repository and path that the recording was taken from.
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
        """Returns the audio as mono float32, ``(samples,)``: channels averaged, then resampled.

        Args:
            rate: Sampling rate in hertz.
        """
        return np.concatenate([*blocks(recording(self.path), rate)])


def real_clips(folder: str | os.PathLike[str] = FOLDER) -> list[RealClip]:
    """Reads the English clips of a folder; by default those in the package.

    Args:
        folder: Folder of audio files with a ``manifest.jsonl``, which has each clip's text,
            language and licence.

    Raises:
        InputError: The manifest cannot be read.
    """
    entries = read_manifest(Path(folder) / "manifest.jsonl", text=True)
    return [_clip(entry) for entry in entries if entry.language == "en"]


def all_clips(more: Path = MORE) -> list[RealClip]:
    """Returns the 11 clips of the package and, if the folder exists, further clips.

    Args:
        more: Folder of the further clips; `MORE` has 11.
    """
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
