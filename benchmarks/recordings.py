"""Recordings of any length, joined from the real clips, with known texts and times.

    from recordings import joined
    minute = joined(60)

All clips follow one another in random orders, each with its own reader, room and level, and pauses
between them. The same length gives the same recording.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmdecode.zoo.real_clips import RATE, RealClip, all_clips

PAUSE_S = (0.5, 1.5)


class Part(NamedTuple):
    """A clip in a recording.

    Attributes:
        name: Name of the clip.
        text: Reference text of the clip.
        start_s, end_s: Start and end in the recording, in seconds.
    """

    name: str
    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Joined:
    """Clips one after another.

    Attributes:
        samples: Mono float32 at 16 kHz, ``(samples,)``.
        parts: The clips, in order.
    """

    samples: np.ndarray
    parts: list[Part]

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return len(self.samples) / RATE

    @property
    def text(self) -> str:
        """Reference text of the recording."""
        return " ".join(part.text for part in self.parts)


def joined(seconds: float, clips: Sequence[RealClip] | None = None, seed: int = 0) -> Joined:
    """A recording of at least so many seconds; it ends with the clip and pause that fill it.

    Args:
        seconds: Least length.
        clips: Clips to join; ``None``: those that ship, and those next to a checkout.
        seed: Seed of orders and pauses.
    """
    rng = random.Random(f"joined/{seed}")
    clips = all_clips() if clips is None else clips
    waves = {clip.name: clip.samples() for clip in clips}
    pieces: list[np.ndarray] = []
    parts: list[Part] = []
    length, order = 0, []
    while length < seconds * RATE:
        order = order or rng.sample(clips, len(clips))
        clip = order.pop()
        wave = waves[clip.name]
        parts.append(Part(clip.name, clip.text, length / RATE, (length + len(wave)) / RATE))
        pause = np.zeros(round(rng.uniform(*PAUSE_S) * RATE), np.float32)
        pieces += [wave, pause]
        length += len(wave) + len(pause)
    return Joined(np.concatenate(pieces), parts)
