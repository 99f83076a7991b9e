"""`GrowingSource`: keys and values of encoder states, kept while a stream's source grows.

A decoder reads encoder states through keys and values that it computes in every layer. The calls of
a stream read the same states again, and a few new ones. A `GrowingSource` is shared by these calls:
it keeps the keys and values of the states that a call has in common with the last one, and computes
those of the others.

Results do not depend on it, apart from rounding: states are compared, and those that changed are
computed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

SOURCES = "growing_sources"
"""Name among a call's inputs of the `GrowingSource` of each row, or ``None`` for a row."""

Projections = Sequence[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]
"""Functions from states ``(S, H)`` to keys and to values ``(S, H')``, of each layer."""


class GrowingSource:
    """Keys and values of one source, for each decoder that reads it."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[Any, tuple[Tensor, list[tuple[Tensor, Tensor]]]]
        self._kept = weakref.WeakKeyDictionary()

    def extend(
        self, states: Tensor, reader: Any, projections: Projections
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns keys and values of states in each layer, and keeps them.

        Args:
            states: All states of the source so far, ``(S, H)``.
            reader: Module that identifies the decoder.
            projections: Its projections, by layer.

        Returns:
            Keys and values ``(S, H')`` of each layer.
        """
        before, kept = self._kept.get(reader, (states[:0], []))
        same = common_prefix(before, states)
        new, found = states[same:], []
        for index, (to_keys, to_values) in enumerate(projections):
            keys, values = to_keys(new), to_values(new)
            if same:
                keys = torch.cat([kept[index][0][:same], keys])
                values = torch.cat([kept[index][1][:same], values])
            found.append((keys, values))
        self._kept[reader] = states, found
        return found


def extended_rows(
    sources: Sequence[GrowingSource | None],
    states: Tensor,
    lengths: Sequence[int],
    reader: Any,
    projections: Projections,
) -> list[tuple[Tensor, Tensor]]:
    """Returns keys and values ``(B, S, H')`` of a batch in each layer, padded with zeros.

    Args:
        sources: Source of each row; ``None``: the row's keys and values are not kept.
        states: States ``(B, S, H)``, padded on the right.
        lengths: Number of states of each row that are no padding.
        reader: See `GrowingSource.extend`.
        projections: See `GrowingSource.extend`.
    """
    rows = [
        (source or GrowingSource()).extend(own[:length], reader, projections)
        for source, own, length in zip(sources, states, lengths, strict=True)
    ]
    stacked = partial(pad_sequence, batch_first=True)
    return [
        (stacked(keys), stacked(values)) for keys, values in map(_columns, zip(*rows, strict=True))
    ]


def _columns(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    keys, values = zip(*pairs, strict=True)
    return list(keys), list(values)


def common_prefix(first: Tensor, second: Tensor) -> int:
    """Returns how many rows at the start of two matrices are equal."""
    size = min(len(first), len(second))
    different = (first[:size] != second[:size]).any(1).nonzero()
    return int(different[0]) if len(different) else size
