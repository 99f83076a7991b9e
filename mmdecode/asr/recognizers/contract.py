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
    """Capabilities of a model family; an option that needs a missing capability is an error.

    Attributes:
        timestamps: Whether the model predicts timestamps of segments; if not, each window is one
            segment.
        languages: Whether the language and the task can be set.
        prompts: Whether the decoder prompt can contain previous text, a prompt and hotwords.
        silence: Whether the model predicts a no-speech probability.
        word_times: Whether words can be timed.
        fixed_windows: Whether all windows have the same length, the last one being padded.
        audio_transforms: Whether guides may change the waveform, see `Recognizer.waveform`.
        drafts: Whether the engine has an adapter for the model, so that drafts and guides work; if
            not, plain ``generate`` decodes.
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
        joined: Whether the next window overlaps this window, so that their texts are merged.
    """

    frames: int
    following: int | None
    joined: bool = False


class Split(NamedTuple):
    """Segments of a window, with times in timestamp steps from the start of the window.

    Attributes:
        segments: Start, end and tokens of each segment.
        forward: Start of the next window, in timestamp steps; ``None``: the next window starts at
            the end of this one.
        rest: Tokens after the last complete segment, which the next window probably repeats.
    """

    segments: list[TokenSegment]
    forward: int | None = None
    rest: list[int] = []  # noqa: RUF012 (never changed)


@dataclass(frozen=True)
class Encoded:
    """A batch of encoded windows, one per row.

    Attributes:
        inputs: Inputs of the encoder: ``(B, ...)``, or one entry per row.
        seconds: Length of each window, in seconds.
        states: Encoder states, ``(B, S, H)``; ``None``: ``generate`` encodes the inputs.
        mask: True for states that are not padding, bool ``(B, S)``; ``None``: there is no padding.
        waveforms: Waveforms of the windows for guides that change them; empty if no guide does.
        sources: For windows of streams, keys and values of their states, see
            `mmdecode.engine.growing_source`; empty if there is none.
    """

    inputs: Any
    seconds: Sequence[float]
    states: Tensor | None = None
    mask: Tensor | None = None
    waveforms: Sequence[Any] = field(default=())
    sources: Sequence[Any] = field(default=())

    def rows(self, chosen: Sequence[int]) -> Encoded:
        """Returns the rows with the given indices, in that order."""

        def pick(values: Any) -> Any:
            if values is None:
                return None
            if isinstance(values, Tensor):
                return values[list(chosen)]
            return [values[row] for row in chosen] if len(values) else values

        return Encoded(**{part.name: pick(getattr(self, part.name)) for part in fields(self)})

    def repeated(self, count: int) -> Encoded:
        """Returns the batch with each row repeated ``count`` times."""
        return self.rows([row for row in range(len(self.seconds)) for _ in range(count)])


def changes_audio(guide: Any) -> bool:
    """Whether a guide has a branch whose input is a modified waveform."""
    return any(spec.transform == "audio" for spec in getattr(guide, "branches", ()))
