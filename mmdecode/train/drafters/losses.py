"""Losses of drafters beyond EAGLE's, one value per position; the trainer averages them."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def ranking_loss(logits: Tensor, wanted: Tensor, top: int = 10) -> Tensor:
    """ListMLE over the target's ``top`` most likely tokens, ``(..., V)`` to ``(...)``.

    The negative log-probability of drawing these tokens in the target's order, one after the other
    without replacement, from the drafter's distribution. Source: Xia et al. 2008.
    """
    order = wanted.topk(min(top, wanted.shape[-1]), dim=-1).indices
    scores = logits.gather(-1, order)
    log_normalizers = scores.flip(-1).logcumsumexp(-1).flip(-1)
    return (log_normalizers - scores).sum(-1)


def vispec_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """``10 |p - q|_1 + 0.1 ListMLE`` of distributions, Kang et al. 2025 (its second stage)."""
    distance = (logits.softmax(-1) - wanted.softmax(-1)).abs().sum(-1)
    return 10 * distance + 0.1 * ranking_loss(logits, wanted)


def smooth_distance(states: Tensor, wanted: Tensor) -> Tensor:
    """Smooth L1 loss, averaged over the hidden size, ``(..., H)`` to ``(...)``."""
    return F.smooth_l1_loss(states, wanted, reduction="none").mean(-1)


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """``KL(target, drafter)`` in nats, ``(..., V)`` to ``(...)``."""
    distribution = wanted.log_softmax(-1)
    return (distribution.exp() * (distribution - logits.log_softmax(-1))).sum(-1)
