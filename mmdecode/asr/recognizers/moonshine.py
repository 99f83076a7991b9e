"""Recogniser for Moonshine: reads raw samples of any length; has no prompt and no timestamps.

Moonshine's encoder normalises over time, so padding would change the states of a recording. Only
windows of the same length are therefore encoded together. The model was trained on recordings of up
to 30 s, and hallucinates text after the end of the audio. A window is therefore limited to
`TOKENS_PER_S` tokens per second, as in the package of its authors.

Source: Jeffries et al. 2024, arXiv:2410.15608; the limit is that of the authors' package.
"""

from __future__ import annotations

import math

from mmdecode.asr.recognizers.generic import GenericRecognizer

TOKENS_PER_S = 6.5
"""Most tokens per second of audio; written from memory of the authors' package, not verified."""


class MoonshineRecognizer(GenericRecognizer):
    """Recogniser of a ``MoonshineForConditionalGeneration`` with its processor."""

    summary = "Moonshine: raw samples, windows cut at pauses"
    source = "Jeffries et al. 2024, arXiv:2410.15608"
    model_types = ("moonshine",)

    def most_tokens(self, seconds: float) -> int:
        """Returns the limit from the window's length and the decoder's number of positions."""
        return max(1, min(math.ceil(seconds * TOKENS_PER_S), super().most_tokens(seconds)))
