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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

LEAST = 1e-30
"""Smallest divisor of a row: rows of zeros stay zero."""
if TYPE_CHECKING:
    Packed = Any
else:
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
        compiled: The compiled function, after the first call.
        enabled: Whether functions are compiled; else Python runs them, with `Integers` too.
    """

    enabled = True
    _compiling = threading.Lock()

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.compiled: Callable[..., Any] | None = None

    def __call__(self, *given: Any) -> Any:
        """Runs the function."""
        if not self.enabled:
            return self.function(*given)
        if self.compiled is None:
            with self._compiling, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self.compiled = self.compiled or scripted(self.function)
        return self.compiled(*given)


def scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function compiled by TorchScript; itself where that fails."""
    try:
        return torch.jit.script(function)
    except (AttributeError, OSError, RuntimeError) as error:  # gone, no source, or of a new form
        warnings.warn(f"TorchScript is not at hand, int8 is slower: {error}", stacklevel=4)
        return function


def scaled(x: Tensor, least: float = LEAST) -> tuple[Tensor, Tensor]:
    """Divides rows ``(..., I)`` by their largest absolute values, and returns those too."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min_(least)
    return x / largest, largest


def product(x: Tensor, matrix: Packed, steps: int, signed: bool) -> Tensor:
    """Multiplies inputs ``(..., I)`` between -1 and 1, or between 0 and 1 if they have no sign."""
    if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript skips a block of this form
        if steps == 0:
            return _of_integers(x, matrix)
    step, zero = grid(steps) if signed else (1.0 / steps, 0)
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, step, zero, matrix)


def grid(steps: int) -> tuple[float, int]:
    """Value of one step of inputs between -1 and 1, and the step of 0."""
    return 1.0 / (steps // 2), (steps + 1) // 2


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


def attention_by_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: list[int],
    last: list[int],
    paths: list[list[int]],
    scale: float | None,
) -> Tensor:
    """Computes attention by a call for each query, see `mmdecode.quantization.attention`.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H', K, D)``; slots of paths are moved for their queries, and moved back.
        value: Likewise.
        first: First slot that each of B * Q queries attends to.
        last: The slot after the last one.
        paths: Slots of the last ones, where they do not lie side by side.
        scale: Factor of the scores; ``None``: 1 / sqrt(D).

    Returns:
        ``(B, Q, H, D)``.
    """
    batch, heads, count, _ = query.shape
    grouped = key.shape[1] != heads
    rows: list[Tensor] = []
    for row in range(batch):
        keys, values = key.narrow(0, row, 1), value.narrow(0, row, 1)
        begin, end = key.shape[2], 0
        for path in paths[row * count : (row + 1) * count]:
            for slot in path:
                begin, end = min(begin, slot), max(end, slot + 1)
        width = max(0, end - begin)
        views = [states.narrow(2, begin, width) for states in (keys, values)]
        kept = [view.clone() for view in views]
        shown: list[int] = []
        found: list[Tensor] = []
        for node in range(count):
            index = row * count + node
            path = paths[index]
            if path != shown:
                show(views, kept, begin, path)
                shown = path
            seen = first[index], last[index] - first[index]
            own = torch.nn.functional.scaled_dot_product_attention(
                query.narrow(0, row, 1).narrow(2, node, 1),
                keys.narrow(2, seen[0], seen[1]),
                values.narrow(2, seen[0], seen[1]),
                scale=scale,
                enable_gqa=grouped,
            )
            found.append(own)
        if len(shown) > 0:
            show(views, kept, begin, [])
        rows.append(torch.cat(found, 2))
    return torch.cat(rows).transpose(1, 2)


def show(views: list[Tensor], kept: list[Tensor], begin: int, path: list[int]) -> None:
    """Writes the slots of a path side by side, from its first one on; none: all are back.

    Args:
        views: Keys and values ``(1, H', W, D)`` of W slots from ``begin`` on.
        kept: Their content when none is moved.
        begin: The first slot.
        path: Slots.
    """
    for which, view in enumerate(views):
        own = kept[which]
        view.copy_(own)
        if len(path) > 0:
            index = torch.tensor([slot - begin for slot in path])
            view.narrow(2, path[0] - begin, len(path)).copy_(own.index_select(2, index))


run_linears, run_linear = Scripted(linears), Scripted(linear)
run_cross_attention = Scripted(cross_attention)
run_attention_by_rows = Scripted(attention_by_rows)
