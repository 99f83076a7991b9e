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

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "mmdecode_rows"
LONGEST = 65
"""Largest number of queries that are computed one by one: a root and 64 nodes."""


class Seen(NamedTuple):
    """Keys that one query may attend to.

    Attributes:
        first: The first of them.
        last: The slot after the last one, once they lie side by side.
        path: Slots of the last ones, if they do not lie side by side; empty otherwise.
    """

    first: int
    last: int
    path: tuple[int, ...] = ()


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
    batch, heads, count, _ = query.shape
    found = query.new_empty(batch, count, heads, value.shape[-1])
    grouped: dict[str, Any] = {"enable_gqa": True} if key.shape[1] != heads else {}
    everything = [[Seen(0, key.shape[2])] * count] * batch
    rows = everything if mask is None else seen_by_rows(mask, batch)
    for row, nodes in enumerate(rows):
        nodes = nodes if len(nodes) == count else nodes * count  # padding, the same for all queries
        keys, values = key[row : row + 1], value[row : row + 1]
        moved = _Moved(keys, values, nodes)
        for node, seen in enumerate(nodes):
            moved.show(seen.path)
            found[row, node] = scaled_dot_product_attention(
                query[row : row + 1, :, node : node + 1],
                keys[:, :, seen.first : seen.last],
                values[:, :, seen.first : seen.last],
                scale=scale,
                **grouped,
            )[0, :, 0]
        moved.show(())
    return found


class _Moved:
    """Keys and values of a row, some of which are moved next to those that a node attends to."""

    def __init__(self, keys: Tensor, values: Tensor, nodes: Sequence[Seen]) -> None:
        paths = [seen for seen in nodes if seen.path]
        self._shown: tuple[int, ...] = ()
        if paths:
            self._first = min(seen.path[0] for seen in paths)
            end = 1 + max(slot for seen in paths for slot in seen.path)
            self._views = [states[:, :, self._first : end] for states in (keys, values)]
            self._kept = [view.clone() for view in self._views]

    def show(self, path: tuple[int, ...]) -> None:
        """Moves the slots of a path to its first slot and those after it; none: all are back."""
        if path == self._shown:
            return
        index = torch.tensor([slot - self._first for slot in path])
        for view, kept in zip(self._views, self._kept, strict=True):
            view.copy_(kept)
            if path:
                begin = path[0] - self._first
                view[:, :, begin : begin + len(path)] = kept[:, :, index]
        self._shown = path


def seen_by_rows(mask: Tensor, batch: int) -> list[list[Seen]]:
    """Keys that each query of each row may attend to, read once for all layers that share a mask.

    Args:
        mask: ``(B or 1, 1, Q, K)``, bool or additive.
        batch: Number of rows.
    """
    kept = getattr(mask, "_mmdecode_seen", None)
    if kept is not None:
        return kept
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > torch.finfo(mask.dtype).min / 2
    slots = torch.arange(seen.shape[-1], device=seen.device)
    first = torch.where(seen, slots, seen.shape[-1]).amin(-1)
    count = seen.sum(-1)
    solid = torch.where(seen, slots, -1).amax(-1) + 1 - first == count
    rows = [
        [
            # a row that has ended may see nothing
            Seen(0, 1) if not many else Seen(begin, begin + many) if whole else _tree(line)
            for begin, many, whole, line in zip(*columns, strict=True)
        ]
        for columns in zip(first.tolist(), count.tolist(), solid.tolist(), seen, strict=True)
    ]
    rows = rows if len(rows) == batch else rows * batch
    mask._mmdecode_seen = rows  # type: ignore[attr-defined]
    return rows


def _tree(seen: Tensor) -> Seen:
    """Keys of a node whose ancestors do not lie side by side."""
    slots = seen.nonzero()[:, 0].tolist()
    hole = next(i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1)
    # from the slot before the hole on, so that the first slot stays where it is
    return Seen(slots[0], slots[0] + len(slots), tuple(slots[hole - 1 :]))


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
