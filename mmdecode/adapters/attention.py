"""Checks that a model's attention implementation accepts the engine's attention masks."""

from __future__ import annotations

import weakref
from typing import Any

from mmdecode._compat import attention_implementation
from mmdecode.engine import attention, flex
from mmdecode.errors import UnsupportedModelError
from mmdecode.quantization.attention import NAME as BY_ROWS
from mmdecode.quantization.foreign import warn_of_rows

TAKES_TREES = (None, "sdpa", "eager", attention.NAME, flex.NAME, BY_ROWS)
"""Attention implementations that take any mask."""
_known: weakref.WeakSet[Any] = weakref.WeakSet()


def refuse_attention(model: Any) -> None:
    """Raises an error if a model's attention implementation is neither ``sdpa`` nor ``eager``.

    Flash attention accepts padding masks only, so it cannot score a tree of drafted tokens. Also
    warns, once per model, if a row's products depend on other rows.

    Raises:
        UnsupportedModelError: The model has another attention implementation, or was rounded and
            has another since.
    """
    if (used := attention_implementation(model.config)) not in TAKES_TREES:
        raise UnsupportedModelError(
            f"{type(model).__name__} has attention {used!r}, which takes no tree masks; use sdpa "
            "or eager: call model.set_attn_implementation('sdpa')"
        )
    by_rows = getattr(getattr(model, "hf_quantizer", None), "by_rows", False)
    if by_rows and used in ("eager", "sdpa"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has int8 weights and attention {used!r}, with which drafted "
            "tokens may differ from undrafted ones: call "
            f"model.set_attn_implementation({BY_ROWS!r})"
        )
    if model not in _known:
        _known.add(model)
        warn_of_rows(model)
