"""Sampling settings of image tokens: temperature, top-k, top-p and classifier-free guidance.

Guidance is applied to raw logits first; then tokens that cannot occur are masked; then temperature,
top-k and top-p are applied in the order of the model family's preset. All ways of decoding images
(raster order, parallel rows, next-scale) use these functions.

Source: published sampling code of the model families. Guidance is ``u + s (c - u)``; models that
publish a strength t of ``(1 + t) c - t u`` have s = 1 + t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmdecode.errors import OptionError

Warper = Literal["temperature", "top_k", "top_p"]
WARPERS: tuple[Warper, ...] = ("temperature", "top_k", "top_p")


@dataclass(frozen=True)
class Sampling:
    """Sampling settings, applied to guided logits.

    Args:
        temperature: Divisor of the logits, above 0; ``1`` is neutral.
        top_k: Number of most likely tokens to keep, ties with the last one included; ``0`` is
            neutral.
        top_p: Probability mass to keep: the most likely tokens up to the one that reaches it,
            included; ``1`` is neutral.
        order: Order in which temperature, top-k and top-p are applied.

    Raises:
        OptionError: A number is out of range, or ``order`` does not name each setting once.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    order: tuple[Warper, ...] = WARPERS

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise OptionError(f"temperature must be above 0, got {self.temperature}; 1 is neutral")
        if self.top_k < 0:
            raise OptionError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise OptionError(f"top_p must be above 0 and at most 1 (off), got {self.top_p}")
        if sorted(self.order) != sorted(WARPERS):
            raise OptionError(f"order must name each of {', '.join(WARPERS)} once: {self.order}")

    def warp(self, logits: Tensor) -> Tensor:
        """Returns warped logits ``(..., V)``, -inf for excluded tokens."""
        steps: dict[Warper, Callable[[Tensor], Tensor]] = {
            "temperature": lambda x: x if self.temperature == 1 else x / self.temperature,
            "top_k": lambda x: top_k(x, self.top_k),
            "top_p": lambda x: top_p(x, self.top_p),
        }
        for name in self.order:
            logits = steps[name](logits)
        return logits


def guided(conditional: Tensor, unconditional: Tensor, scale: float | Tensor) -> Tensor:
    """Returns guided logits ``u + s (c - u)``; with ``s = 1``, ``conditional`` itself."""
    if isinstance(scale, float | int) and scale == 1:
        return conditional
    return unconditional + scale * (conditional - unconditional)


def top_k(logits: Tensor, count: int) -> Tensor:
    """Masks logits ``(..., V)`` below the ``count``-th largest with minus infinity; ties stay."""
    if not 0 < count < logits.shape[-1]:
        return logits
    least = logits.topk(count, -1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def top_p(logits: Tensor, mass: float) -> Tensor:
    """Masks all but the most likely tokens that together reach ``mass`` with minus infinity."""
    if mass >= 1:
        return logits
    values, order = logits.sort(-1, descending=True)
    before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
    dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before > mass)
    return logits.masked_fill(dropped, -torch.inf)
