"""Moonshine: raw samples of any length, no prompt, no timestamps.

Its encoder normalises over time, padding included: padding would change the states of a recording,
so windows are encoded alone or with others of their length. It was trained on up to 30 s, and
hallucinates text after the end of the audio: a window is limited to `TOKENS_PER_S` tokens per
second, as in its authors' package.

Source: Jeffries et al. 2024, arXiv:2410.15608; the limit is that of the published package.
"""

from __future__ import annotations

import math

from mmdecode.asr.recognizers.generic import GenericRecognizer

TOKENS_PER_S = 6.5
"""Most tokens per second of audio; recalled from the published package, not verified."""


class MoonshineRecognizer(GenericRecognizer):
    """A ``MoonshineForConditionalGeneration`` with its processor."""

    summary = "Moonshine: raw samples, windows cut at pauses"
    source = "Jeffries et al. 2024, arXiv:2410.15608"
    model_types = ("moonshine",)

    def most_tokens(self, seconds: float) -> int:
        """Limit by the length of the window, and by the decoder's positions."""
        return max(1, min(math.ceil(seconds * TOKENS_PER_S), super().most_tokens(seconds)))
