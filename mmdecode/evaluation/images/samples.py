"""Tests whether sampled images follow the model's distribution; valid for tiny models too.

A faster way to sample must not change the distribution of images. It gives other images than plain
decoding, so distributions are compared, not single images. There are four kinds of evidence, and no
kind is enough alone:

* The likelihood of the samples under the guided target model (`likelihood`) shows a sampler whose
  tokens are too probable or too improbable. It misses changes that leave the likelihood as it is.
* Histograms of tokens and of pairs of neighbours are compared with those of plain samples
  (`mmdecode.evaluation.stats.image_tests`, as are mean likelihoods).
* Each token is tested against the distribution that it should have been sampled from (`TokenTest`):
  all tokens, and separately the first committed token of each forward pass. The position of that
  token depends only on earlier tokens, so this selection does not bias the test.
* A classifier that was trained separately is applied to the images
  (`mmdecode.evaluation.images.features`).

A small p-value can reject a distribution, but no p-value can prove it; only an equivalence test
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
"""A pair of groups whose count has a smaller variance is left out of the test of pairs."""
_AT_ONCE = 1 << 24  # entries of distributions held in double precision together


@dataclass(frozen=True, kw_only=True)
class TokenTest:
    """Test of whether tokens were sampled from given distributions, see `draws.p_of_draws`.

    Attributes:
        tokens: Number of tested tokens.
        surprise: Mean of ``-log p`` of a token minus the entropy of its distribution, in nats; 0 on
            average if the tokens were sampled from the distributions.
        p: P-value of `draws.p_of_draws`.
        pairs_p: P-value for pairs of a token with its left neighbour or with the token above it:
            the smallest p-value of all pairs of groups, corrected for their number (Bonferroni);
            ``None``: not computed.
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
        outside: Share of the tokens of each image that top-k or top-p forbid, ``(n,)``.
        all: Test of all tokens against the distributions after temperature, top-k and top-p.
        first: The same test for the first committed token of each forward pass, without the first
            token of an image; ``None``: the passes are not known, or there is no such token.
    """

    per_image: np.ndarray
    tokens: int
    outside: np.ndarray
    all: TokenTest
    first: TokenTest | None


def likelihood(
    distributions: Callable[[slice], Tensor],
    codes: Tensor,
    sampling: Sampling,
    *,
    commits: Tensor | None = None,
    groups: Tensor | None = None,
    batch: int = 16,
) -> Likelihood:
    """Scores images under their model, and tests their tokens against its distributions.

    Args:
        distributions: Function from a slice of the images to the guided, teacher-forced logits of
            their tokens, ``(B, tokens, V)``; see `mmdecode.evaluation.images.runs.forced_logits`.
        codes: Codes of the images in raster order, ``(n, rows, columns)``.
        sampling: Sampling settings of the images.
        commits: Index of the forward pass that committed each token, ``(n, rows, columns)``;
            ``None``: not known, and the first tokens of passes are not tested separately.
        groups: Group of every code, ``(V,)``, on the device of the logits, see
            `mmdecode.evaluation.stats.image_tests.code_groups`; ``None``: pairs are not tested.
        batch: Batch size, in images.

    Raises:
        ShapeError: The logits are not for as many images and tokens as there are codes.
    """
    count, rows, columns = codes.shape
    flat = codes.flatten(1)
    uncut = Sampling(temperature=sampling.temperature)
    begun = torch.zeros_like(flat, dtype=torch.bool)
    if commits is not None:
        begun[:, 1:] = commits.flatten(1).diff() != 0
    found, outside = [], []
    every = _TokenTally(groups, columns)
    first = _TokenTally(groups, columns)
    for start in range(0, count, batch):
        part = slice(start, start + batch)
        logits = distributions(part).float()
        tokens = flat[part].to(logits.device)
        if logits.shape[:2] != tokens.shape:
            raise ShapeError(
                f"the logits are for {tuple(logits.shape[:2])} images and tokens, the codes for "
                f"{tuple(tokens.shape)}; expected the same numbers"
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
    """Accumulates the statistics of a `TokenTest` batch by batch.

    Pairs are tested by the number of times that each group follows each group, to the right and
    below, minus the number that the distributions expect. This difference is a sum of martingale
    differences and therefore approximately normal.
    """

    def __init__(self, groups: Tensor | None, columns: int) -> None:
        self.groups, self.columns = groups, columns
        self.parts: list[tuple[Tensor, float, float]] = []
        if groups is not None:
            self.kinds = int(groups.max()) + 1
            # by neighbour (left, above): counted, expected, variance
            self.pairs = torch.zeros((2, 3, self.kinds, self.kinds), dtype=torch.float64)

    def add(self, distribution: Tensor, tokens: Tensor, which: Tensor) -> None:
        """Adds a batch.

        Args:
            distribution: Logits of the distributions, ``(B, T, V)``.
            tokens: Sampled tokens, ``(B, T)``.
            which: Mask of the tokens that are tested, ``(B, T)``.
        """
        if not bool(which.any()):
            return
        step = max(1, _AT_ONCE // distribution.shape[-1])
        self.parts += map(surprise, distribution[which].split(step), tokens[which].split(step))
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
        pairs = None
        if self.groups is not None:
            counted, expected, variance = self.pairs.transpose(0, 1)
            # a cell's count is near normal where both it and its complement are expected
            usable = variance >= LEAST
            z = ((counted - expected).abs() / variance.clamp_min(1e-9).sqrt())[usable]
            pairs = 1.0
            if len(z):
                pairs = min(1.0, math.erfc(float(z.max()) / math.sqrt(2)) * len(z))
        tokens = sum(len(ranks) for ranks, _, _ in self.parts)
        return TokenTest(
            tokens=tokens,
            surprise=sum(excess for _, excess, _ in self.parts) / tokens,
            p=p_of_draws(self.parts),
            pairs_p=pairs,
        )
