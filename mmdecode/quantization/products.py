"""Products of float inputs and int8 matrices that do not depend on the number of rows.

A matrix has one scale per output, symmetric around 0. Each input row is divided by its largest
absolute value and rounded to 8 bits, so that its neighbours have no influence on it; the products
are summed in integers, which is exact in any order. A row of a block therefore has the same result
as the row alone, to the bit.

On x86 processors with AVX2 there are two kernels, each with its own packed form of a matrix:
FBGEMM, which reads the weights of a few rows a quarter faster, and oneDNN, which multiplies many
rows in two thirds of the time. Elsewhere ``torch._int_mm`` computes the same. Without VNNI
instructions sums of two products may saturate in the first two; inputs are then rounded to 7 bits.
The processor is tested once per process, by a product of known result, and a matrix has one kernel
for all its inputs: their number of rows has no say.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

LEAST = 1e-30
"""Smallest divisor of a row: rows of zeros stay zero."""
CHUNK = 256
"""Rows that oneDNN multiplies at once; what they need then stays in the processor's cache."""
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
        self.scale, self._many = torch.ones(len(ints)) if scale is None else scale, many
        self._packed: Any = None
        self._ints: Tensor | None = None
        if not steps():
            self._ints = ints.contiguous()
        elif many:
            self._packed = torch.ops.onednn.qlinear_prepack(ints, None)
            self._zeros = torch.zeros(len(ints), dtype=torch.long)
        else:
            self._packed = _packed(ints, scale)

    @classmethod
    def of(cls, weight: Tensor, many: bool = False) -> Matrix:
        """Rounds a float matrix."""
        return cls(*rounded(weight), many)

    def ints(self) -> tuple[Tensor, Tensor]:
        """Returns integers and scales; unpacks the matrix if it is packed."""
        if self._ints is not None:
            return self._ints, self.scale
        if self._many:
            return self._packed.to_dense().t().contiguous(), self.scale
        return torch.ops.quantized.linear_unpack(self._packed)[0].int_repr(), self.scale

    @property
    def nbytes(self) -> int:
        """Bytes of integers and scales, without what a packed form adds."""
        return math.prod(self.shape) + self.scale.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies ``(..., I)`` to ``(..., O)`` and adds a bias ``(O,)``."""
        if not self._many or x.shape[:-1].numel() <= CHUNK:
            return self.multiply(*scaled(x), bias)
        found = x.new_empty(*x.shape[:-1], self.shape[0])
        parts = zip(x.flatten(0, -2).split(CHUNK), found.flatten(0, -2).split(CHUNK), strict=True)
        for part, into in parts:  # rows do not depend on each other
            self.multiply(*scaled(part), bias, into)
        return found

    def multiply(
        self, x: Tensor, largest: Tensor, bias: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """The same of an input that `scaled` has prepared, for several matrices with one input."""
        product = self.signed(x)
        if bias is not None:
            return torch.addcmul(bias, product, largest, out=into)
        return torch.mul(product, largest, out=product if into is None else into)

    def signed(self, x: Tensor) -> Tensor:
        """Multiplies inputs between -1 and 1."""
        return self._product(x, 127, 128)

    def unsigned(self, x: Tensor) -> Tensor:
        """Multiplies inputs between 0 and 1, which are rounded twice as finely."""
        return self._product(x, 255, 0)

    def _product(self, x: Tensor, most: int, zero: int) -> Tensor:
        if self._ints is not None:
            # 255 steps do not fit int8; the difference to 127 is in the scale alone
            ints = (x.flatten(0, -2) * 127).round_().to(torch.int8)
            sums = torch._int_mm(ints, self._ints.t())
            return (sums * (self.scale / 127)).unflatten(0, x.shape[:-1])
        most, zero = (most, zero) if steps() == 255 else (most // 2, zero // 2)
        if self._many:
            return _onednn(x, 1 / most, zero, self._packed, self.scale, self._zeros)
        return _fbgemm(x, 1 / most, zero, self._packed)

    def __reduce__(self) -> Any:
        return Matrix, (*self.ints(), self._many)

    def __deepcopy__(self, memo: Any) -> Matrix:
        return self  # nothing changes it


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a matrix ``(O, I)`` to integers from -127 to 127; returns them and ``(O,)`` scales."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1).clamp_min(LEAST) / 127
    return (weight / scale[:, None]).round_().to(torch.int8), scale


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Divides rows ``(..., I)`` by their largest absolute values, and returns those too."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min_(LEAST)
    return x / largest, largest


@functools.cache
def steps() -> int:
    """Steps between the least and the largest input of packed products; 0 if there are none.

    255 if sums of two products of extreme values are exact, else 127.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return 0
    for most in (255, 127):
        ones, scale = torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16)
        given = (torch.ones(2, 64), 1 / (most // 2), (most + 1) // 2)
        try:
            few = _fbgemm(*given, _packed(ones, scale))
            many = torch.ops.onednn.qlinear_prepack(ones, None)
            found = few, _onednn(*given, many, scale, torch.zeros(16, dtype=torch.long))
        except (RuntimeError, AttributeError):
            return 0
        if all(torch.allclose(one, torch.tensor(127.0 * 64)) for one in found):
            return most
    return 0


def _fbgemm(x: Tensor, scale: float, zero: int, packed: Any) -> Tensor:
    op = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return op(x, scale, zero, packed)


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
def gain() -> float:
    """How many times as fast as in float32 a row is multiplied here, measured once per process."""
    weight, x = torch.ones(2048, 2048), torch.ones(1, 2048)
    rounded_one = Matrix.of(weight)
    float32, int8 = (
        statistics.median(timeit.repeat(product, number=1, repeat=7))
        for product in (lambda: torch.mv(weight, x[0]), lambda: rounded_one(x))
    )
    return float32 / int8
