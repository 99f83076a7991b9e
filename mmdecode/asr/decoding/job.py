"""A recording while it is decoded: its windows and what they gave."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.asr.audio.vad import Timeline
from mmdecode.asr.decoding.fallback import Result

if TYPE_CHECKING:
    from mmdecode.asr.audio.recording import Recording
    from mmdecode.asr.results import Piece


@dataclass
class Job:
    """One recording on its way.

    Attributes:
        index: Its place in the input.
        name: Its name.
        speech: Its audio; ``None``: nobody speaks.
        frame_s: Seconds in a frame.
        timeline: Where the stretches that are transcribed stand in the recording.
        language: Its language token.
        conditioned: Whether the next window is shown the text so far.
        shown: The last tokens of the text so far.
        source: Text that a drafter may copy from in the next window.
        seek: First frame not yet read.
        joins: Whether the window that begins there overlaps the one before.
        windows: Windows begun.
        attempts: Windows decoded, repeats included.
        results: Results of the windows that ended.
        pieces: Segments so far.
        said_s: End of the last word so far, where the options ask for it.
        missing: Missing part of the recording, where that is allowed.
    """

    index: int
    name: str
    speech: Recording | None
    frame_s: float
    timeline: Timeline
    language: int | None
    conditioned: bool
    context: list[int]
    source: list[int] = field(default_factory=list)
    seek: int = 0
    joins: bool = False
    windows: int = 0
    attempts: int = 0
    results: list[Result] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    last_word_end_s: float = 0.0
    missing: list[str] = field(default_factory=list)

    @property
    def frames(self) -> int:
        """Feature frames to transcribe."""
        return self.speech.frames if self.speech else 0

    @property
    def done_s(self) -> float:
        """Seconds of the recording after which nothing is transcribed yet."""
        if self.speech is None or self.seek >= self.frames:
            return self.timeline.duration_s
        return self.timeline.at(self.seek * self.frame_s)


@dataclass(frozen=True)
class Window:
    """A part of a recording that the model hears at once.

    Attributes:
        job: The recording.
        number: Index among its windows, from 0.
        seek: Its first frame.
        count: Frames of the recording in it.
        joined: Whether it overlaps the window before, so that their texts are joined.
        samples: Samples it was made of, where words are timed by them.
        heard: The same as a guide may change it, where one does.
    """

    job: Job
    number: int
    seek: int
    count: int
    joined: bool = False
    samples: np.ndarray | None = None
    waveform: Any = None
