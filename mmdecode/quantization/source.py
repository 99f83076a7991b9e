"""Keys and values of encoder states in int8, for the cross-attention of one decoder layer.

At Whisper's 1,500 states they are 40 % of the bytes that a step with int8 weights reads. Both are
matrices like those of the weights: keys have a scale for each state, values one for each channel.
One product computes the scores of all heads: a query of a head is zero in the channels of the
others. Weights are relative to the largest one, from 0 to 1, and rounded to 1/255; a row of ones
among the values sums the rounded weights, by which the result is divided.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmdecode.quantization.products import Matrix, scaled


class Int8Source(NamedTuple):
    """Keys and values of every row.

    Attributes:
        keys: A matrix ``(S, heads * D)`` for each row.
        values: A matrix ``(heads * D + 1, S)`` for each row, whose last row has only ones.
    """

    keys: tuple[Matrix, ...]
    values: tuple[Matrix, ...]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> Int8Source:
        """Rounds float keys and values, ``(B, S, heads * D)`` each."""
        ones = values.new_ones(1, values.shape[1])
        return cls(
            tuple(Matrix.of(row, passing=True) for row in keys),
            tuple(Matrix.of(torch.cat([row.t(), ones]), passing=True) for row in values),
        )

    def attend(self, layer: Any, queries: Tensor) -> Tensor:
        """Computes the attention output ``(B, Q, heads * D)`` of ``(B, Q, heads, D)`` queries."""
        heads, width = queries.shape[2:]
        scale = width**-0.5 if layer.scale is None else layer.scale
        given, largest = scaled(queries.float())
        own = torch.eye(heads, dtype=given.dtype)[:, :, None]
        found = []
        for row, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            alone = (given[row, :, :, None] * own).flatten(2)  # zero for the other heads
            scores = keys.signed(alone).mul_(largest[row] * scale)
            weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
            summed = values.unsigned(weights)
            each = summed[..., :-1].unflatten(-1, (heads, width)).diagonal(0, 1, 2).mT
            found.append(each / summed[..., -1:])
        return torch.stack(found).flatten(2).to(queries.dtype)

    def select_rows(self, rows: Tensor) -> Int8Source:
        """Returns the rows ``rows``."""
        chosen = rows.tolist()
        return Int8Source(
            tuple(self.keys[row] for row in chosen), tuple(self.values[row] for row in chosen)
        )
