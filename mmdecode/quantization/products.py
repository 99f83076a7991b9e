"""Products of float inputs and int8 matrices that do not depend on the number of rows.

A matrix has one scale per output, symmetric around 0. Each input row is divided by its largest
absolute value and rounded to 8 bits, so that its neighbours have no influence on it; the products
are summed in integers, which is exact in any order. A row of a block therefore has the same result
as the row alone, to the bit.

On x86 processors with AVX2 there are two kernels, each with its own packed form of a matrix:
FBGEMM, which reads the weights of a few rows a quarter faster, and oneDNN, which multiplies many
rows in two thirds of the time; `mmdecode.quantization.kernels` calls them. Elsewhere
``torch._int_mm`` computes the same. Without VNNI
instructions sums of two products may saturate in the first two; inputs are then rounded to 7 bits.
The processor is tested once per process, by a product of known result, and a matrix has one kernel
for all its inputs: their number of rows has no say.
"""

from __future__ import annotations

import functools
import math
import threading
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from mmdecode.quantization import kernels
from mmdecode.quantization.kernels import LEAST, Integers, scaled

CHUNK = 256
"""Rows that oneDNN multiplies at once; what they need then stays in the processor's cache."""
FEWEST = 8
"""Rows that oneDNN multiplies at least; fewer are padded."""
_engine = threading.Lock()


class Matrix:
    """An int8 matrix ``(O, I)`` with a scale for each output, ready for products.

    Args:
        ints: Integers from -127 to 127, int8 ``(O, I)``.
        scale: Scale of each output, float32 ``(O,)``; ``None``: 1 for all, packed in less time.
        many: Whether inputs have many rows, as those of an encoder.
    """

    def __init__(self, ints: Tensor, scale: Tensor | None = None, many: bool = False) -> None:
        self.shape = tuple(ints.shape)
        self.scale, self.steps = torch.ones(len(ints)) if scale is None else scale, steps()
        self._many = many and self.steps > 0
        self.packed: Any
        if not self.steps:
            self.packed = Integers(ints.contiguous(), self.scale)
            kernels.Scripted.enabled = False  # TorchScript has no type for both
        elif many:
            self.packed = torch.ops.onednn.qlinear_prepack(ints, None)
            self._zeros = torch.zeros(len(ints), dtype=torch.long)
        else:
            self.packed = _packed(ints, scale)

    @classmethod
    def of(cls, weight: Tensor, many: bool = False) -> Matrix:
        """Rounds a float matrix."""
        return cls(*rounded(weight), many)

    def ints(self) -> tuple[Tensor, Tensor]:
        """Returns integers and scales; unpacks the matrix if it is packed."""
        if isinstance(self.packed, Integers):
            return self.packed
        if self._many:
            return self.packed.to_dense().t().contiguous(), self.scale
        return torch.ops.quantized.linear_unpack(self.packed)[0].int_repr(), self.scale

    @property
    def nbytes(self) -> int:
        """Bytes of integers and scales, without what a packed form adds."""
        return math.prod(self.shape) + self.scale.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies ``(..., I)`` to ``(..., O)`` and adds a bias ``(O,)``."""
        if not self._many:
            return kernels.run_linear(x, self.packed, bias, self.steps)
        found = x.new_empty(*x.shape[:-1], self.shape[0])
        parts = zip(x.flatten(0, -2).split(CHUNK), found.flatten(0, -2).split(CHUNK), strict=True)
        grid = kernels.grid(self.steps)
        for part, into in parts:  # rows do not depend on each other
            # with AMX, oneDNN rounds the product of one or two rows in another way
            given, largest = scaled(pad(part, (0, 0, 0, max(0, FEWEST - len(part)))))
            product = _onednn(given, *grid, self.packed, self.scale, self._zeros)[: len(part)]
            largest = largest[: len(part)]
            if bias is None:
                torch.mul(product, largest, out=into)
            else:
                torch.addcmul(bias, product, largest, out=into)
        return found

    def __reduce__(self) -> Any:
        return Matrix, (*self.ints(), self._many)

    def __deepcopy__(self, memo: Any) -> Matrix:
        return self  # nothing changes it


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a matrix ``(O, I)`` to integers from -127 to 127; returns them and ``(O,)`` scales."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1).clamp_min(LEAST) / 127
    return (weight / scale[:, None]).round_().to(torch.int8), scale


@functools.cache
def steps() -> int:
    """Steps between the least and the largest input of packed products; 0 if there are none.

    255 if sums of two products of extreme values are exact, else 127.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return 0
    for most in (255, 127):
        ones, scale = torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16)
        x, zeros = torch.ones(2, 64), torch.zeros(16, dtype=torch.long)
        try:
            few = kernels.product(x, _packed(ones, scale), most, True)
            many = torch.ops.onednn.qlinear_prepack(ones, None)
            found = few, _onednn(x, *kernels.grid(most), many, scale, zeros)
        except (RuntimeError, AttributeError):
            return 0
        if all(torch.allclose(one, torch.tensor(127.0 * 64)) for one in found):
            return most
    return 0


def _onednn(
    x: Tensor, scale: float, zero: int, packed: Any, scales: Tensor, zeros: Tensor
) -> Tensor:
    ints = torch.quantize_per_tensor(x, scale, zero, torch.quint8).int_repr()
    return torch.ops.onednn.qlinear_pointwise(
        ints, scale, zero, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )


def _packed(ints: Tensor, scale: Tensor | None) -> Any:
    """Packs integers with a scale for each output; ``None``: 1 for all, which takes less time."""
    if scale is None:
        weight = torch._make_per_tensor_quantized_tensor(ints, 1.0, 0)
    else:
        zeros = torch.zeros(len(scale), dtype=torch.long)
        weight = torch._make_per_channel_quantized_tensor(ints, scale.double(), zeros, 0)
    with _fbgemm_packs():
        return torch.ops.quantized.linear_prepack(weight, None)


@contextmanager
def _fbgemm_packs() -> Iterator[None]:
    """Sets torch's process-wide engine, which decides how matrices are packed, for a moment."""
    with _engine:
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        try:
            yield
        finally:
            torch.backends.quantized.engine = before


@functools.cache
def gain(to: str) -> float:
    """How many times as fast as in float32 a row is multiplied here, measured once per process.

    Args:
        to: ``int8``, or a dtype of torch such as ``bfloat16``.
    """
    weight, x = torch.ones(2048, 2048), torch.ones(1, 2048)
    kind = torch.float32 if to == "int8" else getattr(torch, to)
    other: Callable[[], Any] = functools.partial(linear, x.to(kind), weight.to(kind))
    if to == "int8":
        other = functools.partial(Matrix.of(weight), x)
    float32, found = fastest(functools.partial(linear, x, weight), other)
    return float32 / found


@torch.no_grad()
def fastest(*calls: Callable[[], Any], repeats: int = 12) -> list[float]:
    """Seconds of each call at its fastest, which other work on the machine changes least.

    They take turns, with the threads of the process and without autocast.
    """
    least = [math.inf] * len(calls)
    with torch.autocast("cpu", enabled=False):
        for _ in range(repeats):
            for index, call in enumerate(calls):
                least[index] = min(least[index], timeit.timeit(call, number=1))
    return least
