"""`Job`: the state of a recording while it is decoded; `Window`, a part of it; and `Ended`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from mmdecode.asr.audio.vad import Timeline
from mmdecode.asr.decoding.fallback import Result

if TYPE_CHECKING:
    from mmdecode.asr.audio.recording import Recording
    from mmdecode.asr.results import Piece

Outcome = TypeVar("Outcome", covariant=True)


@dataclass
class Job:
    """State of one recording that is being decoded.

    Attributes:
        index: Its index in the input.
        name: Its name.
        speech: Its audio without cut-out silence; ``None``: no speech was found in it.
        frame_s: Seconds per frame.
        timeline: Maps times in the transcribed stretches of speech to times in the recording.
        language: Its language token; ``None``: not detected yet, or the model has no such tokens.
        conditioned: Whether the prompt of the next window contains ``context``.
        context: Last tokens of the text so far.
        source: Token ids that a drafter may copy from in the next window.
        draft: Token ids that a drafter may copy from in any window, see `Source.draft`.
        evidence: Kind of evidence that its tokens get, see `Source.evidence`; ``None``: none.
        seek: First frame not yet read, the start of the next window.
        joins: Whether the window that begins at ``seek`` overlaps the one before.
        windows: Number of windows begun.
        attempts: Number of decoding attempts of all windows, repeats included.
        results: Results of the windows decoded so far.
        pieces: Segments so far.
        last_word_end_s: End of the last word so far in seconds, for
            ``hallucination_silence_threshold``.
        missing: Description of the missing part of a truncated recording.
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
    draft: Sequence[int] = ()
    evidence: str | None = None
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
        """Number of frames to transcribe; 0: no speech was found."""
        return self.speech.frames if self.speech else 0

    @property
    def done_s(self) -> float:
        """Seconds of the recording that are transcribed."""
        if self.speech is None or self.seek >= self.frames:
            return self.timeline.duration_s
        return self.timeline.window_at(self.seek * self.frame_s)


@dataclass(frozen=True)
class Window:
    """A part of a recording that the model decodes at once.

    Attributes:
        job: The recording.
        number: Index of the window in its recording, from 0.
        seek: Its first frame.
        count: Number of its frames, padding not counted.
        joined: Whether it overlaps the window before, so that their texts are merged.
        samples: Its samples, if word times come from a CTC model that reads them; else ``None``.
        waveform: Its waveform, if a guide changes the audio, else ``None``; see
            `mmdecode.adapters.audio.transforms`.
    """

    job: Job
    number: int
    seek: int
    count: int
    joined: bool = False
    samples: np.ndarray | None = None
    waveform: Any = None


@dataclass(frozen=True, eq=False)
class Ended(Generic[Outcome]):
    """A recording of which nothing is left to decode.

    Attributes:
        index: Its index in the input.
        result: Its transcript, or its failure.
        job: The decoded recording; ``None``: it failed before the end.
    """

    index: int
    result: Outcome
    job: Job | None = None
