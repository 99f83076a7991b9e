"""Adapter of a causal Whisper, whose windows have different lengths."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from mmdecode.adapters.audio.whisper import WhisperAdapter
from mmdecode.engine.call import Call
from mmdecode.models.causal_whisper import is_audio


class CausalWhisperAdapter(WhisperAdapter):
    """Whisper with a causal encoder; encoder states that are all zeros are padding."""

    summary = "Whisper whose encoder reads audio chunk by chunk"
    source = "Krichli et al. 2025 (CarelessWhisper)"
    model_types = ("causal_whisper",)
    source_is_padded: ClassVar = True
    takes_source_mask: ClassVar = False
    inputs = frozenset()

    def source_mask(self, call: Call) -> Tensor | None:
        """Returns True at states that are not padding, ``(B, S)``; ``None``: no padding."""
        given = call.request.model_kwargs["encoder_outputs"]
        if hasattr(given, "attention_mask"):  # of our recogniser, which knows the lengths
            mask: Tensor | None = given.attention_mask
            return mask
        return is_audio(given[0])
