"""Tests whether sampled images follow the model's distribution; valid for tiny models too.

A faster way to sample must not change the distribution of images. It gives other images, so
distributions are compared, not images. Four kinds of evidence, none of which is enough alone:

* likelihood of samples under the guided target (`likelihood`,
`mmdecode.evaluation.stats.image_means`):
  sees a sampler that is too bold or too timid, and nothing that keeps the typical set;
* histograms of tokens and of neighbours against plain samples
(`mmdecode.evaluation.stats.image_tables`); * each token against the very distribution it should
have been drawn from (`TokenTest`), all of them and
  those that were committed first in a pass: there what was looked at before decides which token is
  tested, and never the token itself, so the test stays valid where pairs picked by their border
  would be no fair sample of anything;
* what a classifier trained apart makes of the images (`mmdecode.evaluation.images.features`).

A p-value below a level can reject a distribution and none can prove it; an equivalence test is what
shows that a difference is small. Inputs are arrays; nothing here draws images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmdecode.errors import ShapeError
from mmdecode.evaluation.stats.draws import p_of_draws, surprise
from mmdecode.image_ar.sampling import Sampling

LEAST = 5
"""Variance of the count of a pair below which its cell is left out."""
_AT_ONCE = 1 << 24  # entries of distributions held in double precision together


@dataclass(frozen=True, kw_only=True)
class TokenTest:
    """Whether tokens are samples of given distributions, see `draws.p_of_draws`.

    Attributes:
        tokens: How many were tested.
        surprise: Nats per token beyond the entropy of the distributions; 0 on average for samples.
        p: P-value of ranks and surprise together.
        pairs_p: P-value of pairs of a token with the one before and the one above: the smallest
            p-value of their cells, corrected for their number; ``None``: not asked for.
    """

    tokens: int
    surprise: float
    p: float
    pairs_p: float | None


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """Likelihood of images under a model.

    Attributes:
        per_image: Negative log-likelihood in nats under the guided distribution with its
            temperature, before top-k and top-p, ``(n,)``.
        tokens: Number of sampled tokens of an image.
        outside: Share of tokens that top-k or top-p forbid, ``(n,)``.
        all: All tokens against the distribution they are decoded by.
        first: Tokens that were committed first in a pass, where a trace says which; the image's
            first token is left out. ``None``: there is no such token.
    """

    per_image: np.ndarray
    tokens: int
    outside: np.ndarray
    all: TokenTest
    first: TokenTest | None


Laws = Callable[[slice], Tensor]
"""From rows of a sample to the guided logits of their tokens, ``(B, tokens, V)``."""


def likelihood(
    distributions: Laws,
    codes: Tensor,
    sampling: Sampling,
    *,
    commits: Tensor | None = None,
    groups: Tensor | None = None,
    batch: int = 16,
) -> Likelihood:
    """Scores images under their model, and tests their tokens against its distributions.

    Args:
        distributions: Teacher-forced logits, see `mmdecode.evaluation.images.runs.forced_logits`.
        codes: Codes in the order of the distributions, ``(n, rows, columns)`` in raster order.
        sampling: Sampling settings of the images.
        commits: The pass in which each token was committed, of the same shape.
        groups: Group of every code, ``(V,)``, where the logits are, see
            `mmdecode.evaluation.stats.image_tables.code_groups`: asks for pairs too.
        batch: Images at once.

    Raises:
        ShapeError: Codes and logits do not go together.
    """
    count, rows, columns = codes.shape
    flat = codes.flatten(1)
    uncut = Sampling(temperature=sampling.temperature)
    begun = torch.zeros_like(flat, dtype=torch.bool)
    if commits is not None:
        passes = commits.flatten(1)
        begun[:, 1:] = passes[:, 1:] != passes[:, :-1]
    found, outside = [], []
    every = _TokenTally(groups, columns)
    first = _TokenTally(groups, columns)
    for start in range(0, count, batch):
        part = slice(start, start + batch)
        logits = distributions(part).float()
        tokens = flat[part].to(logits.device)
        if logits.shape[:2] != tokens.shape:
            raise ShapeError(
                f"logits of {tuple(logits.shape[:2])} tokens for codes of {tuple(tokens.shape)}"
            )
        chosen = uncut.warp(logits).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        distribution = sampling.warp(logits)
        cut = distribution.gather(2, tokens[..., None])[..., 0].isneginf()
        found.append(-chosen.double().sum(1))
        outside.append(cut.double().mean(1))
        every.add(distribution, tokens, torch.ones_like(cut))
        first.add(distribution, tokens, begun[part].to(distribution.device))
    return Likelihood(
        per_image=torch.cat(found).cpu().numpy(),
        tokens=rows * columns,
        outside=torch.cat(outside).cpu().numpy(),
        all=every.result(),
        first=first.result() if bool(begun.any()) else None,
    )


class _TokenTally:
    """Adds up what `TokenTest` needs, batch by batch.

    Pairs are tested by the counts of (group before, group) and (group above, group) less what the
    distributions expect of them, which are sums of martingale differences and so about normal.
    """

    def __init__(self, groups: Tensor | None, columns: int) -> None:
        self.groups, self.columns = groups, columns
        self.ranks: list[Tensor] = []
        self.excess = self.variance = 0.0
        if groups is not None:
            self.kinds = int(groups.max()) + 1
            # by neighbour (left, above): counted, expected, variance
            self.pairs = torch.zeros((2, 3, self.kinds, self.kinds), dtype=torch.float64)

    def add(self, distribution: Tensor, tokens: Tensor, which: Tensor) -> None:
        """Distributions ``(B, T, V)``, tokens ``(B, T)``, mask of those that count ``(B, T)``."""
        if not bool(which.any()):
            return
        step = max(1, _AT_ONCE // distribution.shape[-1])
        for distributions, chosen in zip(
            distribution[which].split(step), tokens[which].split(step), strict=True
        ):
            ranks, excess, variance = surprise(distributions, chosen)
            self.ranks.append(ranks.cpu())
            self.excess += excess
            self.variance += variance
        if self.groups is None:
            return
        kinds = self.groups[tokens]
        position = torch.arange(tokens.shape[1], device=tokens.device)
        for direction, back in enumerate((1, self.columns)):
            near = which & (position >= back)
            if back == 1:
                near &= position % self.columns > 0
            if not bool(near.any()):
                continue
            one_hot = torch.eye(self.kinds, dtype=torch.float64, device=distribution.device)
            member = one_hot[self.groups]  # (V, kinds)
            share = distribution[near].double().softmax(-1) @ member
            before = one_hot[kinds.roll(back, 1)[near]]
            for number, row in enumerate((one_hot[kinds[near]], share, share * (1 - share))):
                self.pairs[direction, number] += (before.T @ row).cpu()

    def result(self) -> TokenTest:
        ranks = torch.cat(self.ranks)
        pairs = None
        if self.groups is not None:
            counted, expected, variance = self.pairs.transpose(0, 1)
            # a cell's count is near normal where both it and its complement are expected
            usable = variance >= LEAST
            z = ((counted - expected).abs() / variance.clamp_min(1e-9).sqrt())[usable]
            pairs = 1.0
            if len(z):
                pairs = min(1.0, math.erfc(float(z.max()) / math.sqrt(2)) * len(z))
        return TokenTest(
            tokens=len(ranks),
            surprise=self.excess / len(ranks),
            p=p_of_draws(ranks, self.excess, self.variance),
            pairs_p=pairs,
        )
