"""A linear combination of branches, cut to what the main branch finds plausible.

Raw logits: ``sum_i w_i z_i`` over the main branch and others; then tokens whose main probability is
below ``beta`` times the best are excluded, judged on the *raw main* logits. With weights
``(1 + alpha, -alpha)`` this is contrastive decoding in the form of VCD.

Source: Li et al. 2023, arXiv:2210.15097, equations 2 and 3; Leng et al. 2024, arXiv:2311.16922,
equations 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mmdecode.engine.contracts import BranchSpec, Context, Needs, Scores
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError


class Linear:
    """``weights[0] * main + weights[i] * branches[i - 1]``, then the plausibility cut.

    Args:
        branches: The other conditionings.
        weights: One for the main branch, then one per branch.
        beta: Plausibility cut, 0..1: keep tokens with p at least ``beta * max p`` in the main
            branch. ``0`` keeps the vocabulary.

    Neutral: weight 1 for the main branch and 0 for all others; then nothing is run and nothing cut.
    """

    needs = Needs()

    def __init__(
        self, branches: Sequence[BranchSpec], weights: Sequence[float], beta: float = 0.0
    ) -> None:
        if len(weights) != len(branches) + 1:
            raise OptionError(
                f"{len(weights)} weights for the main branch and {len(branches)} others; give "
                f"{len(branches) + 1}"
            )
        if not 0 <= beta <= 1:
            raise OptionError(f"beta must be in 0..1, got {beta}; 0 switches the cut off")
        self.branches, self.weights, self.beta = list(branches), list(weights), beta
        self.neutral = self.weights[0] == 1 and not any(self.weights[1:])

    @classmethod
    def contrast(cls, branch: BranchSpec, alpha: float = 1.0, beta: float = 0.1) -> Linear:
        """``(1 + alpha) * main - alpha * branch``; ``alpha = 0`` is neutral."""
        if alpha < 0:
            raise OptionError(f"alpha must be >= 0, got {alpha}; use 0 to switch contrast off")
        return cls([branch], [1 + alpha, -alpha], beta)

    @classmethod
    def from_options(
        cls,
        alpha: float = 1.0,
        beta: float = 0.1,
        prompt: str = "same",
        view: str | None = None,
    ) -> Linear:
        """From a string: the contrast form, against another prompt or view."""
        if prompt not in ("same", "last_token"):
            raise OptionError(f"prompt must be 'same' or 'last_token', got {prompt!r}")
        if prompt == "same" and view is None:
            raise OptionError(
                "contrast needs something to pull away from; give prompt=last_token or a view"
            )
        spec = BranchSpec(name="contrast", prompt=prompt, view=view)  # type: ignore[arg-type]
        return cls.contrast(spec, alpha, beta)

    def begin(self, ctx: Context, prefill: Mapping[str, Scores]) -> None:
        """No constants."""

    def apply(
        self, constants: None, ctx: Context, proposal: Proposal, scores: Mapping[str, Scores]
    ) -> Tensor:
        """See `mmdecode.engine.contracts.Guide`."""
        main = scores["main"].logits
        combined = self.weights[0] * main
        for spec, weight in zip(self.branches, self.weights[1:], strict=True):
            if weight:
                combined = combined + weight * scores[spec.name].logits
        return plausible(combined, main, self.beta)


def plausible(combined: Tensor, main: Tensor, beta: float) -> Tensor:
    """``combined`` with ``-inf`` where the main probability is below ``beta * max``."""
    if beta == 0:
        return combined
    floor = main.amax(-1, keepdim=True) + math.log(beta)
    return combined.masked_fill(main < floor, -torch.inf)
