"""Memory per row of a call, computed from the model's shape: how many rows fit.

A formula, checked against the live tensors of a decode (``tests/evaluation/test_memory.py``;
``benchmarks/memory.py`` repeats it for large shapes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmdecode import registry
from mmdecode.engine.cache import BUCKET, bucket
from mmdecode.engine.proposal import MAX_NODES

_SCORE, _ID = 4, 8  # float32, int64
_DRAW = 24  # keyed Gumbel noise is computed from three int64 or float64 at a time


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Memory of one row of a batch, in bytes.

    Attributes:
        cache: Keys and values of prompt and output, in all branches.
        source: An encoder's states, and keys and values of them in all branches.
        ids: Prompt, output and the room after it.
        scores: Scores of one round at root and nodes: logits, and noise where tokens are sampled.
        growth: Former storage of a layer, next to the new, while the cache grows.
    """

    cache: int
    source: int
    ids: int
    scores: int
    growth: int

    @property
    def total(self) -> int:
        """The most at once: a cache grows before there are scores."""
        return self.cache + self.source + self.ids + max(self.scores, self.growth)


def row_bytes(
    model: Any,
    prompt: int,
    new: int,
    *,
    nodes: int = 0,
    branches: int = 1,
    source: int = 0,
    do_sample: bool = False,
    compile: bool = False,
) -> RowBytes:
    """The bytes per row of a call, weights excluded; so many more rows cost so many times as much.

    Not counted: what a forward pass needs while it runs, most of all over a long prompt; copies
    that logits processors and guides make of the scores; what a draft keeps, for which the function
    may be asked again (an assistant is a model).

    Args:
        model: A model that has an adapter.
        prompt: Tokens of the longest prompt, images included.
        new: Most tokens that are generated.
        nodes: Drafted tokens per round.
        branches: The main one and a guide's others.
        source: States of the encoder that a row reads; 0 for decoder-only models.
        do_sample: Whether tokens are sampled by keyed noise.
        compile: Whether the decoder compiles: the cache is then allocated at once.

    Raises:
        UnsupportedModelError: The model has no adapter.
    """
    adapter = registry.adapter_for(model)
    config = model.config.get_text_config(decoder=True)
    size = model.dtype.itemsize
    slots = bucket(prompt + new + (MAX_NODES + 1 if compile else nodes))
    key = _width(config) * size
    slot = 2 * adapter.num_layers * key  # a key and a value in every layer
    # stacked branches read copies of the encoder's states
    states = config.hidden_size * size * (branches + (branches > 1))
    converted = size if size < _SCORE else 0  # logits as the model gives them
    score = branches * (_SCORE + converted)
    if do_sample:
        score = max(score, branches * _SCORE + _DRAW)
    return RowBytes(
        cache=branches * slot * slots,
        source=source * (branches * slot + states),
        ids=_ID * (prompt + new + MAX_NODES + 1),
        scores=(nodes + 1) * adapter.vocab * score,
        growth=0 if compile else branches * key * (slots - BUCKET),
    )


def _width(config: Any) -> int:
    """Numbers in one key of one layer, over all its heads."""
    heads = config.num_attention_heads
    each = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    each = each or config.hidden_size // heads
    return each * (getattr(config, "num_key_value_heads", None) or heads)
