"""Products of float inputs and int8 matrices that do not depend on the number of rows.

A matrix has one scale per output, symmetric around 0. Each input row is divided by its largest
absolute value and rounded to 8 bits, so that its neighbours have no influence on it; the products
are summed in integers, which is exact in any order. A row of a block therefore has the same result
as the row alone, to the bit.

Two kernels compute the same: FBGEMM, on x86 processors with AVX2, which takes matrices in its own
packed form; and ``torch._int_mm``, everywhere else. Without VNNI instructions FBGEMM's sums of two
products may saturate; inputs are then rounded to 7 bits. The kernel is chosen once per process, by
a product of known result; the number of rows has no say.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

LEAST = 1e-30
"""Smallest divisor of a row: rows of zeros stay zero."""
_engine = threading.Lock()


class Matrix:
    """An int8 matrix ``(O, I)`` with a scale for each output, ready for products.

    Args:
        ints: Integers from -127 to 127, int8 ``(O, I)``.
        scale: Scale of each output, float32 ``(O,)``.
        passing: Whether the matrix is packed in less time, and each of its products
            multiplied by the scales, for one that is used a few times.
    """

    def __init__(self, ints: Tensor, scale: Tensor, passing: bool = False) -> None:
        self.shape = tuple(ints.shape)
        self._packed: Any = None
        self._ints: Tensor | None = None
        self._scale = scale
        self._outside = scale if passing else None
        if steps():
            self._packed = _packed(ints, None if passing else scale)
        else:
            self._ints = ints.contiguous()

    @classmethod
    def of(cls, weight: Tensor, passing: bool = False) -> Matrix:
        """Rounds a float matrix."""
        return cls(*rounded(weight), passing)

    def ints(self) -> tuple[Tensor, Tensor]:
        """Returns integers and scales; unpacks the matrix if it is packed."""
        if self._ints is not None:
            return self._ints, self._scale
        return torch.ops.quantized.linear_unpack(self._packed)[0].int_repr(), self._scale

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies ``(..., I)`` to ``(..., O)`` and adds a bias ``(O,)``."""
        return self.multiply(*scaled(x), bias)

    def multiply(self, x: Tensor, largest: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same of an input that `scaled` has prepared, for several matrices with one input."""
        product = self.signed(x)
        return product.mul_(largest) if bias is None else torch.addcmul(bias, product, largest)

    def signed(self, x: Tensor) -> Tensor:
        """Multiplies inputs between -1 and 1."""
        return self._product(x, 127, 128)

    def unsigned(self, x: Tensor) -> Tensor:
        """Multiplies inputs between 0 and 1, which are rounded twice as finely."""
        return self._product(x, 255, 0)

    def _product(self, x: Tensor, most: int, zero: int) -> Tensor:
        if self._packed is not None:
            most, zero = (most, zero) if steps() == 255 else (most // 2, zero // 2)
            product = _fbgemm(x, 1 / most, zero, self._packed)
            return product if self._outside is None else product.mul_(self._outside)
        assert self._ints is not None
        # 255 steps do not fit int8; the difference to 127 is in the scale alone
        ints = (x.flatten(0, -2) * 127).round_().to(torch.int8)
        sums = torch._int_mm(ints, self._ints.t())
        return (sums * (self._scale / 127)).unflatten(0, x.shape[:-1])

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
    """Steps between the least and the largest input of FBGEMM's products; 0 if it cannot be used.

    255 if sums of two products of extreme values are exact, else 127.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return 0
    try:
        ones = torch.full((16, 64), 127, dtype=torch.int8)
        exact = _fbgemm(torch.ones(2, 64), 1 / 127, 128, _packed(ones, torch.ones(16)))
        small = _fbgemm(torch.ones(2, 64), 1 / 63, 64, _packed(ones, torch.ones(16)))
    except (RuntimeError, AttributeError):
        return 0
    if bool((exact == 127 * 64).all()):
        return 255
    return 127 if bool((small == 127 * 64).all()) else 0


def _fbgemm(x: Tensor, scale: float, zero: int, packed: Any) -> Tensor:
    op = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return op(x, scale, zero, packed)


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
