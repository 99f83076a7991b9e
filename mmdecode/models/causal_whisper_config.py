"""Configuration of a causal Whisper; importing it registers it, and loads no model code."""

from __future__ import annotations

from transformers import AutoConfig, WhisperConfig


class CausalWhisperConfig(WhisperConfig):
    """Shape of a Whisper with the blocks of its encoder.

    Attributes:
        chunk: Number of encoder states of a block.
        extra: Number of blocks that are read together with the first one.
        base: Name of the Whisper whose weights a LoRA adapter changes; ``None``: the checkpoint has
            all weights.
    """

    model_type = "causal_whisper"
    chunk: int = 15
    extra: int = 0
    base: str | None = None


AutoConfig.register(CausalWhisperConfig.model_type, CausalWhisperConfig)
