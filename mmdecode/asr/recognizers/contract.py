"""Declarations and results of recognisers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from mmdecode.asr.decoding.segmentation import TokenSegment


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a family; other requests are refused by name.

    Attributes:
        timestamps: Its tokens say when segments begin and end; else segments are windows.
        languages: It can be told the language or the task.
        prompts: It can be shown a text before a window.
        silence: It says how probable it is that nobody speaks.
        word_times: Words can be timed.
        fixed_windows: All windows have one length, and the last one is filled up.
        audio_transforms: Guides may change the waveform, see `Recognizer.heard`.
        drafts: The engine decodes it, so that drafts and guides work; else plain ``generate`` does.
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
        frames: How many it has.
        following: The first frame of the next window; ``None``: the window's tokens decide.
        joined: Whether the next window overlaps it, so that their texts are joined.
    """

    frames: int
    following: int | None
    joined: bool = False


class Split(NamedTuple):
    """Segments of a window, in its timestamp steps.

    Attributes:
        cuts: Its segments.
        forward: Steps from the start of the window to that of the next one; ``None``: the next one
            follows this one.
        rest: Text after the last complete segment, which the next window may repeat.
    """

    segments: list[TokenSegment]
    forward: int | None = None
    rest: list[int] = []  # noqa: RUF012 (never changed)


@dataclass(frozen=True)
class Encoded:
    """Windows that the encoder has read, one a row.

    Attributes:
        inputs: Inputs of the encoder: ``(B, ...)``, or one entry a row.
        seconds: Length of each.
        states: Encoder states, ``(B, S, H)``; ``None``: the model encodes them by itself.
        mask: True for states that are no padding, bool ``(B, S)``; ``None``: all.
        heard: Their waveforms, for guides that change them; empty where nothing asks for them.
    """

    inputs: Any
    seconds: Sequence[float]
    states: Tensor | None = None
    mask: Tensor | None = None
    waveforms: Sequence[Any] = field(default=())

    def rows(self, chosen: Sequence[int]) -> Encoded:
        """Some of the rows, in the order given."""

        def pick(values: Any) -> Any:
            if values is None:
                return None
            if isinstance(values, Tensor):
                return values[list(chosen)]
            return [values[row] for row in chosen] if len(values) else values

        return Encoded(**{part.name: pick(getattr(self, part.name)) for part in fields(self)})

    def repeated(self, count: int) -> Encoded:
        """Each row ``count`` times."""
        return self.rows([row for row in range(len(self.seconds)) for _ in range(count)])
