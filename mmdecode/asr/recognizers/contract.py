"""Types of the interface of recognisers: capabilities, windows, segments, encoded windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from mmdecode.asr.decoding.segmentation import TokenSegment


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a family; options that need others are errors.

    Attributes:
        timestamps: The model predicts timestamps of segments; else segments are windows.
        languages: The language and the task can be set.
        prompts: The decoder prompt can have context before a window.
        silence: The model has a no-speech probability.
        word_times: Words can be timed.
        fixed_windows: All windows have one length, and the last one is padded.
        audio_transforms: Guides may change the waveform, see `Recognizer.waveform`.
        drafts: The engine has an adapter, so that drafts and guides work; else plain ``generate``
            decodes.
    """

    timestamps: bool = False
    languages: bool = False
    prompts: bool = False
    silence: bool = False
    word_times: bool = False
    fixed_windows: bool = False
    audio_transforms: bool = False
    drafts: bool = True


class Span(NamedTuple):
    """A window of a recording, in frames of the recogniser.

    Attributes:
        frames: Number of its frames.
        following: First frame of the next window; ``None``: this window's tokens determine it.
        joined: Whether the next window overlaps it, so that their texts are merged.
    """

    frames: int
    following: int | None
    joined: bool = False


class Split(NamedTuple):
    """Segments of a window, in its timestamp steps.

    Attributes:
        segments: Its segments.
        forward: Steps from the start of the window to that of the next one; ``None``: the next one
            starts at the end of this one.
        rest: Tokens after the last complete segment, which the next window probably repeats.
    """

    segments: list[TokenSegment]
    forward: int | None = None
    rest: list[int] = []  # noqa: RUF012 (never changed)


@dataclass(frozen=True)
class Encoded:
    """A batch of encoded windows, a row each.

    Attributes:
        inputs: Inputs of the encoder: ``(B, ...)``, or one entry per row.
        seconds: Length of each window.
        states: Encoder states, ``(B, S, H)``; ``None``: ``generate`` encodes the inputs.
        mask: True for states that are not padding, bool ``(B, S)``; ``None``: none is.
        waveforms: Waveforms of the windows for guides that change them; empty if no guide does.
    """

    inputs: Any
    seconds: Sequence[float]
    states: Tensor | None = None
    mask: Tensor | None = None
    waveforms: Sequence[Any] = field(default=())

    def rows(self, chosen: Sequence[int]) -> Encoded:
        """The rows with the given indices, in that order."""

        def pick(values: Any) -> Any:
            if values is None:
                return None
            if isinstance(values, Tensor):
                return values[list(chosen)]
            return [values[row] for row in chosen] if len(values) else values

        return Encoded(**{part.name: pick(getattr(self, part.name)) for part in fields(self)})

    def repeated(self, count: int) -> Encoded:
        """Each row repeated ``count`` times."""
        return self.rows([row for row in range(len(self.seconds)) for _ in range(count)])
