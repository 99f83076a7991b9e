"""Rejection sampling: the acceptance test, and the residual distribution after a rejection."""

from __future__ import annotations

import torch
from torch import Tensor


def passes(gumbel: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Whether u q < p, for uniform u = exp(-E) with E = exp(-gumbel) exponential."""
    return (-gumbel).exp() > q.log() - p.log()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Residual distribution after a rejection: max(p - q, 0), renormalised; p where that is 0."""
    excess = (p - q).clamp_min(0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total.clamp_min(torch.finfo(p.dtype).tiny), p)
