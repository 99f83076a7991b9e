"""Test of whether tokens were sampled from given distributions; it can reject, but never prove.

Source: uniform ranks as in Rosenblatt 1952 (probability integral transform). The test of the total
surprise (sum of ``-log p`` of the tokens) is this project's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmdecode.engine.noise import Noise, Role, request_key
from mmdecode.evaluation.audit.plain import Replay

LEVEL = 1e-4
"""The claim that tokens follow the given distributions is rejected below this p-value."""
FEWEST = 200
"""Smallest number of tokens for which the test gives a verdict."""
_BINS = 20


def surprise(distribution: Tensor, tokens: Tensor) -> tuple[Tensor, float, float]:
    """Computes the inputs of `p_of_draws` from tokens ``(T,)`` and their logits ``(T, V)``.

    Returns:
        Randomised ranks ``(T,)``; the sum of ``-log p`` of the tokens minus the sum of the
        entropies; and the variance of this difference.
    """
    log_p = distribution.double().log_softmax(-1)
    p, order = log_p.exp(), torch.arange(distribution.shape[1], device=distribution.device)
    chosen = p.gather(1, tokens[:, None])
    above = (p > chosen) | ((p == chosen) & (order < tokens[:, None]))
    key = Noise.of(0, [request_key(*tokens.tolist())], distribution.device)
    index = torch.arange(len(tokens), device=distribution.device)
    spread = key.uniform(index[None], Role.ACCEPT)[0]
    ranks = (p * above).sum(-1) + spread * chosen[:, 0]
    nats = torch.where(p > 0, -log_p, 0.0)
    entropy = (p * nats).sum(-1)
    excess = nats.gather(1, tokens[:, None])[:, 0] - entropy
    variance = (p * nats**2).sum(-1) - entropy**2
    return ranks.cpu(), float(excess.sum()), float(variance.sum())


def p_of_draws(parts: Sequence[tuple[Tensor, float, float]]) -> float:
    """Returns the p-value of tokens under the distributions they should have been sampled from.

    Two tests are combined with Bonferroni's correction: a chi-square test of the ranks in 20 bins,
    and a normal test of the excess (central limit theorem for martingales).

    Args:
        parts: Results of `surprise` for parts of the tokens: the randomised rank of each token,
            which is the probability mass of all more likely tokens plus a uniform share of the
            token's own, 0..1; the excess; and its variance if the tokens were sampled from the
            distributions.
    """
    all_ranks, excesses, variances = zip(*parts, strict=True)
    ranks, excess, variance = torch.cat(all_ranks), sum(excesses), sum(variances)
    cells = (ranks * _BINS).long().clamp(0, _BINS - 1)
    counts = torch.bincount(cells, minlength=_BINS).double()
    expected = len(ranks) / _BINS
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((_BINS - 1) / 2, dtype=torch.float64)
    by_rank = float(torch.special.gammaincc(freedom, statistic / 2))
    by_surprise = math.erfc(abs(excess) / math.sqrt(2 * max(variance, 1e-12)))
    return min(1.0, 2 * min(by_rank, by_surprise))


def on_the_edge(replay: Replay, position: int, noise: float) -> bool:
    """Whether a token removed by top-k, top-p or the like would pass with slightly other logits.

    Logits larger than the token's are lowered by ``noise``, and all others, the token's included,
    are raised by it.

    Args:
        replay: The generated tokens with the target model's logits for each of them.
        position: Index of the token.
        noise: Largest rounding error of a logit.
    """
    assert replay.process is not None, "asked of sampled tokens alone"
    raw, token = replay.logits[position], replay.tokens[position]
    moved = raw + torch.where(raw > raw[token], -noise, noise)
    return bool(replay.process(replay.tokens[:position], moved)[token].isfinite())
