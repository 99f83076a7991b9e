"""Private names of transformers, in this file and nowhere else; seen in 5.17 and 5.23."""

from __future__ import annotations

from typing import Any


def attention_implementation(config: Any) -> str | None:
    """``sdpa``, ``eager``, ``flash_attention_2``, ...; ``None`` where a config names none."""
    return getattr(config, "_attn_implementation", None)


def detects_timestamps_from_logprob(processor: Any) -> bool:
    """Whether the Whisper timestamp processor weighs all timestamps against the best text token."""
    return bool(getattr(processor, "_detect_timestamp_from_logprob", True))
