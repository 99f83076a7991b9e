"""Int8 products and cross-attention, run by TorchScript: without Python between their operations.

A product of one row takes 15 microseconds, and what is called around it from Python twice that.
These functions are ordinary Python; where the processor has packed products, `Scripted` has
TorchScript run the same operations in the same order, with the same results to the bit. Torch calls
TorchScript deprecated: without it, or with ``PYTORCH_JIT=0``, Python runs them, more slowly.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST = 1e-30
"""Smallest divisor of a row: rows of zeros stay zero."""
Packed = torch.classes.quantized.LinearPackedParamsBase
"""A matrix packed by FBGEMM; in Python also `Integers`."""


class Integers(NamedTuple):
    """An int8 matrix ``(O, I)`` that is not packed, with its scales ``(O,)``."""

    ints: Tensor
    scale: Tensor


class Scripted:
    """A function that TorchScript compiles when it is first called.

    Args:
        function: Function of this module.

    Attributes:
        enabled: Whether functions are compiled; else Python runs them.
    """

    enabled = True
    _compiling = threading.Lock()

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *given: Any) -> Any:
        """Runs the function, whose last argument is ``steps``; 0: matrices are not packed."""
        if not (self.enabled and given[-1]):
            return self.function(*given)
        if self._compiled is None:
            with self._compiling, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self._compiled = torch.jit.script(self.function)
        return self._compiled(*given)


def scaled(x: Tensor, least: float = LEAST) -> tuple[Tensor, Tensor]:
    """Divides rows ``(..., I)`` by their largest absolute values, and returns those too."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min_(least)
    return x / largest, largest


def product(x: Tensor, matrix: Packed, steps: int, signed: bool) -> Tensor:
    """Multiplies inputs ``(..., I)`` between -1 and 1, or between 0 and 1 if they have no sign."""
    if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript skips a block of this form
        if steps == 0:
            return _of_integers(x, matrix)
    most, zero = (steps // 2, (steps + 1) // 2) if signed else (steps, 0)
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        x, 1.0 / most, zero, matrix
    )


def _of_integers(x: Tensor, matrix: Integers) -> Tensor:
    # 255 steps do not fit int8; the difference to 127 is in the scale alone
    ints = (x.flatten(0, -2) * 127).round_().to(torch.int8)
    sums = torch._int_mm(ints, matrix.ints.t())
    return (sums * (matrix.scale / 127)).unflatten(0, x.shape[:-1])


def linears(
    x: Tensor, matrices: list[Packed], biases: list[Tensor | None], steps: int
) -> list[Tensor]:
    """Applies linear layers to one input ``(..., I)``, whose rows are scaled once."""
    given, largest = scaled(x)
    found: list[Tensor] = []
    for index, bias in enumerate(biases):
        own = product(given, matrices[index], steps, True)
        found.append(own.mul_(largest) if bias is None else torch.addcmul(bias, own, largest))
    return found


def linear(x: Tensor, matrix: Packed, bias: Tensor | None, steps: int) -> Tensor:
    """Applies a linear layer to ``(..., I)``."""
    return linears(x, [matrix], [bias], steps)[0]


def cross_attention(
    queries: Tensor,
    key_scale: Tensor,
    keys: list[Packed],
    values: list[Packed],
    bias: Tensor | None,
    scored: list[Packed],
    summed: list[Packed],
    channels: Tensor,
    steps: int,
) -> Tensor:
    """Computes attention to rounded states, see `mmdecode.quantization.source`.

    Args:
        queries: ``(B, Q, heads, D)``, float32.
        key_scale: Scales of the keys' projection times that of the scores, ``(heads, D)``.
        keys: Projections ``(C, heads * D / G)`` of G groups of heads.
        values: Projections ``(heads * D / G, C)``, likewise.
        bias: Bias of the values, ``(heads * D,)``.
        scored: States ``(S, C)`` of each row of the batch.
        summed: States ``(C + 1, S)``, with a last row of ones.
        channels: Value of one step in each channel of the states, ``(B, 1, C)``.
        steps: See `product`.

    Returns:
        ``(B, Q, heads * D)``.
    """
    batch, count, heads, width = queries.shape
    groups = len(keys)
    each = heads // groups

    # (B, G, Q, heads of a group, D); a query is zero in the channels of its group's other heads
    given, first = scaled((queries * key_scale).unflatten(2, (groups, each)).transpose(1, 2))
    own = torch.eye(each).unsqueeze(-1)
    alone = (given.unsqueeze(-2) * own).flatten(4)
    found = [product(alone.select(1, g), keys[g], steps, True) for g in range(groups)]
    given = torch.stack(found, 1).view(batch, -1, channels.shape[-1])

    given, largest = scaled(given.mul_(channels))
    factor = largest * first.view(batch, -1, 1)
    sums: list[Tensor] = []
    for row in range(batch):
        scores = product(given[row], scored[row], steps, True)
        scores.sub_(scores.amax(-1, keepdim=True)).mul_(factor[row]).exp_()
        sums.append(product(scores, summed[row], steps, False))
    whole = torch.stack(sums)
    mean, largest = scaled(whole[..., :-1] * channels)
    factor = (largest / whole[..., -1:]).view(batch, groups, count, each, 1)

    mean = mean.view(batch, groups, count, each, -1)
    found = [product(mean.select(1, g), values[g], steps, True) for g in range(groups)]
    own = torch.stack(found, 1).unflatten(4, (each, width)).diagonal(0, 3, 4).transpose(-1, -2)
    own = (own * factor).transpose(1, 2).flatten(2)
    return own if bias is None else own.add_(bias)


run_linears, run_linear = Scripted(linears), Scripted(linear)
run_cross_attention = Scripted(cross_attention)
