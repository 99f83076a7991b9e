"""Cross-attention to encoder states in int8, without keys and values.

A score is ``q . (K x) = (K^T q) . x``, and an output ``sum(p V x) = V sum(p x)``: queries and sums
go through the projections K and V, instead of all states (multi-head latent attention calls this
absorbed projections). The states ``x`` of a row are rounded and packed once for all layers. At
Whisper's 1,500 states this leaves out most of the work between the encoder and the first token,
and the memory of keys and values.

The states have one scale for each channel, since some channels are large in all states. One product
computes the scores of all heads. Attention weights are relative to the largest one, from 0 to 1,
and rounded to 1/255; a row of ones among the states sums the rounded weights, by which the result
is divided.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmdecode._compat import version
from mmdecode.quantization.kernels import LEAST, run_cross_attention
from mmdecode.quantization.modules import Int8Linear
from mmdecode.quantization.products import Matrix

GROUP = 256
"""Channels of keys, and of values, that are projected by one product."""


class Int8States(NamedTuple):
    """Encoder states of every row of a batch; padding is left out.

    Attributes:
        scored: A matrix ``(S, C)`` for each row, multiplied by queries.
        summed: A matrix ``(C + 1, S)`` for each row, multiplied by weights; its last row has only
            ones.
        scale: Value of one step in each channel, ``(B, 1, C)``.
    """

    scored: tuple[Matrix, ...]
    summed: tuple[Matrix, ...]
    scale: Tensor

    @classmethod
    def of(cls, states: Tensor, read: Tensor | None = None) -> Int8States:
        """Rounds states ``(B, S, C)``; ``read (B, S)`` is False at padding."""
        if read is not None:
            return cls._of(states, read)
        made = getattr(states, "_mmdecode_rounded", None)  # for a drafter that reads them too
        if made is None or made[0] is None or made[0] != version(states):
            made = version(states), cls._of(states, None)
            states._mmdecode_rounded = made  # type: ignore[attr-defined]
        return made[1]

    @classmethod
    def _of(cls, states: Tensor, read: Tensor | None) -> Int8States:
        scored, summed, scales = [], [], []
        for row in range(len(states)):
            own = states[row] if read is None else states[row, read[row]]
            scale = own.abs().amax(0, keepdim=True).clamp_min(LEAST).float() / 127
            ints = (own / scale).round_().to(torch.int8)
            scored.append(Matrix(ints))
            summed.append(Matrix(torch.cat([ints.t(), ints.new_ones(1, len(ints))])))
            scales.append(scale)
        return cls(tuple(scored), tuple(summed), torch.stack(scales))

    def select_rows(self, rows: Tensor) -> Int8States:
        """Returns the rows ``rows``."""
        chosen = rows.tolist()
        return Int8States(
            tuple(self.scored[row] for row in chosen),
            tuple(self.summed[row] for row in chosen),
            self.scale[rows],
        )


class Int8Source(NamedTuple):
    """The states, and the projections of one layer's cross-attention.

    Attributes:
        states: The states of every row.
        keys: The layer's projection to keys.
        values: The layer's projection to values.
    """

    states: Int8States
    keys: Int8Linear
    values: Int8Linear

    def attend(self, layer: Any, queries: Tensor) -> Tensor:
        """Computes the attention output ``(B, Q, heads * D)`` of ``(B, Q, heads, D)`` queries."""
        heads, width = queries.shape[2:]
        groups = next(n for n in range(max(1, heads * width // GROUP), 0, -1) if heads % n == 0)
        scale = width**-0.5 if layer.scale is None else layer.scale
        bias = self.values.bias
        found = run_cross_attention(
            queries.float(),
            (self.keys.packed.scale * scale).view(heads, width),
            [one.packed for one in self.keys.grouped(groups, transposed=True)],
            [one.packed for one in self.values.grouped(groups)],
            None if bias is None else bias.float(),
            [one.packed for one in self.states.scored],
            [one.packed for one in self.states.summed],
            self.states.scale,
            self.keys.packed.steps,
        )
        return found.to(queries.dtype)

    def select_rows(self, rows: Tensor) -> Int8Source:
        """Returns the rows ``rows``."""
        return self._replace(states=self.states.select_rows(rows))
