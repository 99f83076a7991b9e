"""Attention whose queries do not depend on their neighbours, for models with int8 weights.

Torch's fused attention computes a block of queries by other instructions than a single one, and its
sums depend on the number of keys, their slots and the thread that works on them. Differences of
1e-7 are harmless in float models; where activations are rounded to 8 bits, they may move a value to
the next step, and a drafted block then disagrees with single steps. Here every query is computed by
a call of its own, over exactly the keys that it may attend to, in the order in which they were
committed: the same call for a token in a block, in a tree, in a batch or alone.

Registered with transformers under `NAME`. Prompts longer than `LONGEST` tokens are left to the
stock function: they are read in the same way with and without a draft.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mmdecode._compat import version
from mmdecode.errors import UnsupportedModelError
from mmdecode.quantization.kernels import run_attention_by_rows

NAME = "mmdecode_rows"
LONGEST = 65
"""Largest number of queries that are computed one by one: a root and 64 nodes."""


class Seen(NamedTuple):
    """Keys that each query of a batch may attend to, in lists with an entry per query.

    Attributes:
        first: The first of them.
        last: The slot after the last one, once they lie side by side.
        paths: Slots of the last ones, if they do not lie side by side; empty otherwise.
    """

    first: list[int]
    last: list[int]
    paths: list[list[int]]


def attend_by_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Computes the attention output ``(B, Q, H, D)`` of queries ``(B, H, Q, D)``, one by one.

    Args:
        query: Queries.
        key: Keys ``(B, H', K, D)``, where H' divides H. Keys of a tree's nodes are moved while a
            query is computed, and moved back.
        value: Values, likewise.
        mask: ``(B or 1, 1, Q or 1, K)``, bool or additive; ``None``: queries attend to all keys.
        scale: Factor of the scores; ``None``: 1 / sqrt(D).
    """
    batch, _, count, _ = query.shape
    if mask is None:
        each = batch * count
        seen = Seen([0] * each, [key.shape[2]] * each, [[]] * each)
    else:
        seen = seen_by_rows(mask, batch, count)
    return run_attention_by_rows(query, key, value, *seen, scale)


def seen_by_rows(mask: Tensor, batch: int, count: int) -> Seen:
    """Keys that each query may attend to, read once for all layers that share a mask.

    Args:
        mask: ``(B or 1, 1, Q or 1, K)``, bool or additive.
        batch: Number B of rows.
        count: Number Q of queries of a row.
    """
    kept = getattr(mask, "_mmdecode_seen", None)
    if kept is not None and kept[0] == version(mask) is not None:
        return kept[1]
    seen = mask[:, 0]
    if mask.dtype != torch.bool:
        seen = seen > torch.finfo(mask.dtype).min / 2
        if bool((mask[:, 0][seen] != 0).any()):
            raise UnsupportedModelError(
                "attention has a bias, which is not supported with int8 weights; use float weights"
            )
    seen = seen.expand(batch, count, -1).flatten(0, 1)
    slots = torch.arange(seen.shape[-1], device=seen.device)
    first = torch.where(seen, slots, seen.shape[-1]).amin(-1)
    many = seen.sum(-1)
    solid = torch.where(seen, slots, -1).amax(-1) + 1 - first == many
    first = torch.where(many == 0, 0, first)
    last = first + many.clamp_min(1)  # a row that has ended may see nothing
    holes = (~solid & (many > 0)).tolist()
    paths = [_path(line) if hole else [] for line, hole in zip(seen, holes, strict=True)]
    found = Seen(first.tolist(), last.tolist(), paths)
    mask._mmdecode_seen = (version(mask), found)  # type: ignore[attr-defined]
    return found


def _path(seen: Tensor) -> list[int]:
    """Slots of a node's last keys, which do not lie side by side."""
    slots = seen.nonzero()[:, 0].tolist()
    hole = next(i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1)
    return slots[hole - 1 :]  # from before the hole, so that the first slot stays where it is


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: ``(B, H, Q, D)`` in, ``(B, Q, H, D)`` out."""
    count = query.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if count > LONGEST or query.device.type != "cpu":
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    if attention_mask is None and causal and count > 1:
        attention_mask = torch.ones(1, 1, count, count, dtype=torch.bool).tril()
        attention_mask = nn.functional.pad(attention_mask, (key.shape[2] - count, 0), value=True)
    return attend_by_rows(query, key, value, attention_mask, scaling), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
