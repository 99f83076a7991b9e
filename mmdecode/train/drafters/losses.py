"""Losses for training drafters: ListMLE, ViSpec's loss, smooth L1, KL; one value per position."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def ranking_loss(logits: Tensor, wanted: Tensor, top: int = 10) -> Tensor:
    """Computes ListMLE over the target's most likely tokens, ``(..., V)`` to ``(...)``.

    This is the negative log-probability that sampling without replacement from these tokens, with
    the drafter's probabilities, yields them in the target's order. Source: Xia et al. 2008.

    Args:
        logits: Logits of the drafter.
        wanted: Logits of the target.
        top: Number of most likely tokens.
    """
    order = wanted.topk(min(top, wanted.shape[-1]), dim=-1).indices
    scores = logits.gather(-1, order)
    log_normalizers = scores.flip(-1).logcumsumexp(-1).flip(-1)
    return (log_normalizers - scores).sum(-1)


def vispec_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Computes ``10 |p - q|_1 + 0.1 ListMLE`` from logits, the loss of ViSpec's second stage.

    Source: Kang et al. 2025, arXiv:2509.15235.
    """
    distance = (logits.softmax(-1) - wanted.softmax(-1)).abs().sum(-1)
    return 10 * distance + 0.1 * ranking_loss(logits, wanted)


def smooth_distance(states: Tensor, wanted: Tensor) -> Tensor:
    """Computes the smooth L1 loss, averaged over the hidden size, ``(..., H)`` to ``(...)``."""
    return F.smooth_l1_loss(states, wanted, reduction="none").mean(-1)


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Computes ``KL(target || drafter)`` in nats from logits, ``(..., V)`` to ``(...)``."""
    distribution = wanted.log_softmax(-1)
    return (distribution.exp() * (distribution - logits.log_softmax(-1))).sum(-1)
