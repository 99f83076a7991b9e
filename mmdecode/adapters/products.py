"""Float32 products of few rows on CPUs: by oneDNN, where that is faster than ``F.linear``.

A decoder step multiplies few rows by large matrices. The BLAS libraries behind ``F.linear`` read
memory at a third to a half of its speed then, and six rows cost up to three times as much as one.
oneDNN multiplies by the same weights, as they lie in memory, in less time. The gain depends on
processor and libraries: it is measured once per process and shape, and a matrix then has one kernel
for all its inputs, whatever their number of rows. ``torch.backends.mkldnn.flags(enabled=False)``
leaves all of them to ``F.linear``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from mmdecode import _compat
from mmdecode.quantization.products import fastest

ROWS = (1, 6)
"""Numbers of rows that are measured: a step without a draft, and one that verifies a draft."""
GAIN = 1.1
"""How many times as fast oneDNN must be over these numbers of rows."""
SMALLEST = 2**16
"""Elements of the smallest matrix that is measured; below it, calls take the time."""
MEASURED = 2**22
"""Elements of the matrices that are multiplied to measure: more than a core's caches hold."""

Product = Callable[[Tensor], Tensor]
"""A linear layer: inputs ``(..., I)`` to outputs ``(..., O)``."""
_lock = threading.Lock()
_chosen: dict[tuple[int, int], bool] = {}
"""Whether oneDNN multiplies by matrices of a shape ``(O, I)``."""


def float_product(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Returns a linear layer ``(O, I)`` as a function, by the faster kernel for its shape."""
    usual = weight.device.type == "cpu" and weight.dtype == torch.float32
    usual = usual and weight.dim() == 2 and weight.is_contiguous() and _compat.has_onednn_linear()
    kernel = onednn if usual and chosen(*weight.shape) else linear
    return functools.partial(kernel, weight=weight, bias=bias)


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Same as ``F.linear``, by oneDNN in float32, without gradients and autocast."""
    left = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    if left or x.dtype != torch.float32 or torch.compiler.is_compiling():
        return linear(x, weight, bias)
    return _compat.onednn_linear(x, weight, bias)


def chosen(outputs: int, inputs: int) -> bool:
    """Whether oneDNN multiplies by matrices ``(outputs, inputs)``, decided once per process."""
    shape = outputs, inputs
    with _lock:
        if shape not in _chosen:
            _chosen[shape] = outputs * inputs >= SMALLEST and gain(outputs, inputs) >= GAIN
        return _chosen[shape]


def gain(outputs: int, inputs: int) -> float:
    """Measures how many times as fast oneDNN is, over the numbers of rows of `ROWS`.

    A large matrix is multiplied in part, and several small ones.
    """
    outputs = max(min(outputs, MEASURED // inputs), 1)
    weights = [torch.ones(outputs, inputs) for _ in range(max(MEASURED // (outputs * inputs), 1))]
    given = [torch.ones(rows, inputs) for rows in ROWS]

    def products(kernel: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
        return [kernel(x, one) for one in weights]

    calls = [functools.partial(products, kernel, x) for kernel in (linear, onednn) for x in given]
    found = fastest(*calls, repeats=5)
    return sum(found[: len(ROWS)]) / sum(found[len(ROWS) :])
