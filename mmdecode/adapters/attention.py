"""Checks that a model's attention implementation accepts the engine's attention masks."""

from __future__ import annotations

from typing import Any

from mmdecode._compat import attention_implementation
from mmdecode.engine import attention, flex
from mmdecode.errors import UnsupportedModelError
from mmdecode.quantization.attention import NAME as BY_ROWS


def refuse_attention(model: Any) -> None:
    """Raises an error if a model's attention implementation is neither ``sdpa`` nor ``eager``.

    Flash attention accepts padding masks only, so it cannot score a tree of drafted tokens.

    Raises:
        UnsupportedModelError: The model has another attention implementation.
    """
    used = attention_implementation(model.config)
    if used not in (None, "sdpa", "eager", attention.NAME, flex.NAME, BY_ROWS):
        raise UnsupportedModelError(
            f"{type(model).__name__} has attention {used!r}, which takes no tree masks; use sdpa "
            "or eager: call model.set_attn_implementation('sdpa')"
        )
