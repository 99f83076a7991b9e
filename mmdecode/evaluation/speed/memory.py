"""Memory of weights, and the memory that one row of a batch needs, from the model's shape.

The formula of a row is checked against the live tensors of a call in
``tests/evaluation/test_memory.py``, and for large shapes in ``benchmarks/memory.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmdecode import registry
from mmdecode._compat import input_device
from mmdecode.engine.cache import BUCKET, bucket
from mmdecode.engine.proposal import MAX_NODES

_SCORE, _ID = 4, 8  # float32, int64
_DRAW = 28  # bytes of the float64 Gumbel noise of a score, with what it is computed from
_DRAW_CPU = 16  # there a bound in float32; of many scores, it is made a part at a time


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Memory of one row of a batch, in bytes.

    Attributes:
        cache: Keys and values of prompt and output, in all branches (a guide adds branches).
        source: Hidden states of the encoder, and cross-attention keys and values of all branches;
            with int8 weights a speech model has two rounded copies of the states instead.
        ids: Token ids of prompt and output, with spare room for drafted tokens.
        scores: Logits of one draft-and-verify round, for the last committed token and each drafted
            token; with sampling also the noise.
        growth: Old storage of a layer, which exists next to the new one while the cache grows.
    """

    cache: int
    source: int
    ids: int
    scores: int
    growth: int

    @property
    def total(self) -> int:
        """Peak memory; ``growth`` and ``scores`` are never needed at the same time."""
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
    argmax_only: bool = False,
    compile: bool = False,
) -> RowBytes:
    """Computes the memory of one row of a call, without weights; it is proportional to the rows.

    Not counted are activations of a forward pass, which are large for a long prompt; copies of the
    scores that logits processors and guides make; and memory of the drafter. For an assistant
    model, call this function with the assistant.

    Args:
        model: A model that has an adapter.
        prompt: Number of tokens of the longest prompt, image tokens included.
        new: Largest number of generated tokens.
        nodes: Number of drafted tokens per round.
        branches: Number of branches: the model's own, and each further context of a guide.
        source: Number of encoder states that a row attends to; 0 for decoder-only models.
        do_sample: Whether tokens are sampled.
        argmax_only: Whether rounds need no logits but for their argmax, as in greedy decoding
            without guide, processors and scores: they then stay in the model's dtype, and for many
            rows a part at a time is made, which is not counted.
        compile: Whether the decoder compiles; the cache is then allocated in full at the start.

    Raises:
        UnsupportedModelError: The model has no adapter.
    """
    adapter = registry.adapter_for(model)
    config = model.config.get_text_config(decoder=True)
    size = model.dtype.itemsize
    slots = bucket(prompt + new + (MAX_NODES + 1 if compile else nodes))
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    width = width or config.hidden_size // heads
    key = size * width * (getattr(config, "num_key_value_heads", None) or heads)
    slot = 2 * adapter.num_layers * key  # a key and a value in every layer
    # stacked branches read copies of the encoder's states
    states = config.hidden_size * size * (branches + (branches > 1))
    read = 2 * config.hidden_size if getattr(adapter, "rounds_source", False) else slot
    converted = size if size < _SCORE else 0  # logits as the model gives them
    score = branches * (_SCORE + converted)
    if do_sample:
        draw = _DRAW_CPU if input_device(model).type == "cpu" else _DRAW
        score = max(score, branches * _SCORE + draw)
    if argmax_only:
        score = size
    return RowBytes(
        cache=branches * slot * slots,
        source=source * (branches * read + states),
        ids=_ID * (prompt + new + MAX_NODES + 1),
        scores=(nodes + 1) * adapter.vocab * score,
        growth=0 if compile else branches * key * (slots - BUCKET),
    )
