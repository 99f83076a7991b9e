"""The test of rejection sampling, and what is sampled from after a rejection."""

from __future__ import annotations

import torch
from torch import Tensor


def passes(gumbel: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Whether u q < p, for u = exp(-E) of exponential draws E = exp(-gumbel)."""
    return (-gumbel).exp() > q.log() - p.log()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What to draw from after a rejection: max(p - q, 0), renormalised; p where nothing is left."""
    excess = (p - q).clamp_min(0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total.clamp_min(torch.finfo(p.dtype).tiny), p)
