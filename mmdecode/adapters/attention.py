"""Check of a model's attention implementation, which must take the engine's masks."""

from __future__ import annotations

from typing import Any

from mmdecode._compat import attention_implementation
from mmdecode.engine.attention import NAME
from mmdecode.errors import UnsupportedModelError


def refuse_attention(model: Any) -> None:
    """Refuses a model whose attention is neither ``sdpa`` nor ``eager``.

    Flash attention takes padding masks only, so it cannot apply the mask of a tree.
    """
    used = attention_implementation(model.config)
    if used not in (None, "sdpa", "eager", NAME):
        raise UnsupportedModelError(
            f"{type(model).__name__} attends by {used!r}, which takes no tree masks; expected sdpa "
            "or eager: call model.set_attn_implementation('sdpa')"
        )
