"""Private names of transformers, in this file and nowhere else; seen in 5.17 and 5.23."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def attention_implementation(config: Any) -> str | None:
    """``sdpa``, ``eager``, ``flash_attention_2``, ...; ``None`` where a config names none."""
    return getattr(config, "_attn_implementation", None)


@contextmanager
def attention_configs(model: Any, name: str) -> Iterator[dict[int, str]]:
    """Lets every part of a model attend by ``name``; yields what each config, by id, said before.

    ``set_attn_implementation`` cannot give a model back that mixes implementations.
    """
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    before = {key: used for key, c in found.items() if (used := attention_implementation(c))}
    try:
        for key in before:
            found[key]._attn_implementation = name
        yield before
    finally:
        for key, used in before.items():
            found[key]._attn_implementation = used


def detects_timestamps_from_logprob(processor: Any) -> bool:
    """Whether the Whisper timestamp processor weighs all timestamps against the best text token."""
    return bool(getattr(processor, "_detect_timestamp_from_logprob", True))
