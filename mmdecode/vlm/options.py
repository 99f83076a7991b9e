"""Settings of an answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from mmdecode.engine.prompt_cache import PromptCache
from mmdecode.errors import OptionError, refuse_unknown
from mmdecode.vlm.videos import FRAMES

WARPERS = ("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Sampling settings of ``generate`` that `AnswerOptions` does not have and switches off."""


_NUMBERS = (
    (Integral, "a whole number", ("max_new_tokens", "batch_size", "frames", "top_k")),
    (Integral, "a whole number of bytes", ("prompt_cache",)),
    (Real, "a number", ("fps", "temperature", "top_p")),
)
"""Types of the options that are numbers."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Settings of an answer.

    Attributes:
        max_new_tokens: Maximum number of tokens of an answer.
        do_sample: Whether tokens are sampled; otherwise decoding is greedy.
        temperature: Divisor of the logits; 1 is neutral.
        top_p: Sample from the most likely tokens that reach this total probability; 1 is neutral.
        top_k: Sample from the k most likely tokens; 0 is neutral. The checkpoint's own ``top_k`` is
            not used.
        batch_size: Questions decoded at once.
        prompt_cache: Bytes of prompts to keep, so that what questions about one image have in
            common, and the image itself, is read once; 0: every prompt is read whole; ``None``: as
            the `mmdecode.PromptCache` of the `Answerer` says, 1 GiB.
        noise_by: Seed of a question's random numbers: ``request``, its id or else its text and
            images; or ``image``, its images alone. With ``image``, guides that change images at
            random change an image alike for all questions, so that it is read once (other tokens
            than with ``request``, for the same seed).
        frames: Number of frames that are read of a video.
        fps: Frames per second that are read of a video; ``None``: as many as ``frames``.
        text_only: Whether questions without an image are allowed.
        margins: Whether `Answer.margin` is computed; the logits of all new tokens then stay in
            memory.
        trace: Whether answers record their decoding rounds and, with ``margins``, a margin for each
            branch of the guide; each round then waits for the device.
        first_logits: Whether answers hold the final logits of their first token; the logits of all
            new tokens then stay in memory.

    Raises:
        OptionError: A value is out of range, or of another type.
    """

    max_new_tokens: int = 128
    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 8
    prompt_cache: int | None = None
    noise_by: str = "request"
    frames: int = FRAMES
    fps: float | None = None
    text_only: bool = False
    margins: bool = True
    trace: bool = False
    first_logits: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.prompt_cache, PromptCache):
            raise OptionError(
                "prompt_cache is a PromptCache; expected a number of bytes: give the cache itself "
                "to Answerer(..., prompt_cache=...)"
            )
        for kind, what, names in _NUMBERS:
            for name in names:
                value = getattr(self, name)
                none = value is None and name in ("fps", "prompt_cache")
                if not none and (isinstance(value, bool) or not isinstance(value, kind)):
                    raise OptionError(f"{name}={value!r:.80}; expected {what}")
        for name in ("max_new_tokens", "batch_size", "frames"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}; expected at least 1")
        if self.fps is not None and not 0 < self.fps < math.inf:
            raise OptionError(f"fps={self.fps}; expected more than 0 frames per second")
        refuse_unknown([self.noise_by], ("request", "image"), "noise_by")
        if self.prompt_cache is not None and self.prompt_cache < 0:
            raise OptionError(f"prompt_cache={self.prompt_cache}; expected bytes, or 0 for none")
        if not 0 < self.temperature < math.inf:
            raise OptionError(
                f"temperature={self.temperature}; expected more than 0: for greedy decoding, leave "
                "do_sample and temperature out"
            )
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p={self.top_p}; expected more than 0 and at most 1")
        if self.top_k < 0:
            raise OptionError(f"top_k={self.top_k}; expected a number of tokens, or 0 for all")
        if not self.do_sample and (self.temperature, self.top_p, self.top_k) != (1.0, 1.0, 0):
            raise OptionError(
                "temperature, top_p and top_k are for sampling; set do_sample=True too, or leave "
                "them out"
            )

    def generation(self) -> dict[str, Any]:
        """Returns arguments of ``generate`` that override the checkpoint's own sampling settings.

        The checkpoint's penalties, such as ``repetition_penalty``, still apply: they are part of
        its greedy decoding too.
        """
        given: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "num_beams": 1}
        given |= dict.fromkeys(WARPERS)
        if not self.do_sample:
            return given | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return given | {"do_sample": True, **sampling}


def make_options(options: Mapping[str, Any]) -> AnswerOptions:
    """Builds `AnswerOptions` from keyword arguments.

    Raises:
        OptionError: A name is unknown, or a value is out of range.
    """
    refuse_unknown(options, list(AnswerOptions.__dataclass_fields__))
    return AnswerOptions(**options)
