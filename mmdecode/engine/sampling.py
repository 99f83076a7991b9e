"""Rejection sampling: the acceptance test, and the residual distribution after a rejection."""

from __future__ import annotations

import torch
from torch import Tensor


def passes(uniform: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Whether u q < p, so that a token of probability 0 never passes; ``uniform`` is float64."""
    return uniform * q < p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Residual distribution after a rejection: max(p - q, 0), renormalised; p where that is 0."""
    excess = (p - q).clamp_min(0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total.clamp_min(torch.finfo(p.dtype).tiny), p)
