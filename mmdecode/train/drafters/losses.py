"""Losses of drafters beyond EAGLE's, at each row: means are the trainer's."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def ranking_loss(logits: Tensor, wanted: Tensor, top: int = 10) -> Tensor:
    """ListMLE of the target's most likely tokens, ``(..., V)`` to ``(...)``, Xia et al. 2008.

    How unlikely their order is where the drafter's distribution over them draws one after the
    other.
    """
    order = wanted.topk(min(top, wanted.shape[-1]), dim=-1).indices
    scores = logits.gather(-1, order)
    behind = scores.flip(-1).logcumsumexp(-1).flip(-1)
    return (behind - scores).sum(-1)


def vispec_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """``10 |p - q|_1 + 0.1 ListMLE`` of distributions, Kang et al. 2025 (its second stage)."""
    distance = (logits.softmax(-1) - wanted.softmax(-1)).abs().sum(-1)
    return 10 * distance + 0.1 * ranking_loss(logits, wanted)


def smooth_distance(states: Tensor, wanted: Tensor) -> Tensor:
    """Smooth L1, the mean over the width: ``(..., H)`` to ``(...)``."""
    return F.smooth_l1_loss(states, wanted, reduction="none").mean(-1)


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """``KL(target, drafter)`` in nats, ``(..., V)`` to ``(...)``."""
    distribution = wanted.log_softmax(-1)
    return (distribution.exp() * (distribution - logits.log_softmax(-1))).sum(-1)
