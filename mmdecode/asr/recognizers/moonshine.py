"""Moonshine: raw samples of any length, no prompt, no timestamps.

Its encoder normalises over time, padding included: the states of a recording depend on what it is
padded with, so windows are encoded alone or with others of their length. It was trained on up to
30 s, and makes text up past the end of what it hears: a window has at most `TOKENS_PER_S` tokens a
second, as its authors do it.

Source: Jeffries et al. 2024, arXiv:2410.15608; the limit is that of the published package.
"""

from __future__ import annotations

import math

from mmdecode.asr.recognizers.generic import GenericRecognizer

TOKENS_PER_S = 6.5
"""Most tokens of a second of audio; from memory of the published package, not checked again."""


class MoonshineRecognizer(GenericRecognizer):
    """A ``MoonshineForConditionalGeneration`` with its processor."""

    summary = "Moonshine: raw samples, windows cut at pauses"
    source = "Jeffries et al. 2024, arXiv:2410.15608"
    model_types = ("moonshine",)

    def most_tokens(self, seconds: float) -> int:
        """Limit by the length of the window, and by the decoder's positions."""
        return max(1, min(math.ceil(seconds * TOKENS_PER_S), super().most_tokens(seconds)))
