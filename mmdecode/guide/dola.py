"""DoLa: contrasts the last layer's distribution with that of the early layer that differs most.

``log p_N - alpha * log p_M`` on tokens with ``p_N >= relative_top * max p_N``, where M is the early
layer, among a few candidates, whose distribution has the largest Jensen-Shannon divergence from
that of the last layer. M is chosen separately for each row and node, by the paper's formula; the
published code exchanges the arguments of its KL terms and averages over the batch. A layer's
distribution is that of its states after the final norm and the head. No image is needed.

Source: Chuang et al. 2024, arXiv:2309.03883, equations 1 to 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide, Requirements
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError
from mmdecode.guide.edited import checked_layers, exit_layers
from mmdecode.guide.linear import checked_cut, not_negative, plausible
from mmdecode.quantization.models import is_tied

BUCKETS = {"low": (0.0, 0.5), "high": (0.5, 1.0), "all": (0.0, 1.0)}
"""Ranges of candidate layers by name, as fractions of the depth."""


class DoLa(Guide):
    """Contrast with an early layer of the same pass.

    Args:
        layers: Range of the candidates, as two fractions of the depth; every second layer in it is
            a candidate. The embeddings (depth 0) are no candidate if they are tied to the output
            matrix, since their most likely token would be the input token itself.
        relative_top: Plausibility cut, 0 to 1: excludes tokens with a last-layer probability below
            ``relative_top * max p``; 0: no cut.
        alpha: Weight of the early layer, 1 as published; 0: no contrast, only the cut.

    The guide has no effect with ``alpha`` 0 and ``relative_top`` 0.
    """

    summary = "the last layer against the early one that differs most"
    source = "Chuang et al. 2024"

    def __init__(
        self,
        layers: tuple[float, float] = BUCKETS["high"],
        relative_top: float = 0.1,
        alpha: float = 1.0,
    ) -> None:
        self.layers = checked_layers(layers)
        self.relative_top = checked_cut("relative_top", relative_top)
        self.alpha = not_negative("alpha", alpha)
        self.neutral = not self.alpha and not relative_top

    @classmethod
    def from_options(
        cls, bucket: str = "high", relative_top: float = 0.1, alpha: float = 1.0
    ) -> DoLa:
        """Builds the guide from the options of a string.

        ``bucket`` is a name in `BUCKETS`: ``high`` is for short answers, ``low`` for long ones.
        """
        if bucket not in BUCKETS:
            raise OptionError(f"bucket must be one of {', '.join(BUCKETS)}, got {bucket!r}")
        return cls(BUCKETS[bucket], relative_top, alpha)

    def candidates(self, adapter: Any) -> range:
        """Returns the indices of the candidate layers."""
        return exit_layers(self.layers, adapter.num_layers, 2 * is_tied(adapter.model), step=2)

    def needs(self, adapter: Any) -> Requirements:
        """Returns what the guide needs: logits of the candidate layers, if ``alpha`` is not 0."""
        if not self.alpha:
            return Requirements()
        return Requirements(early_exit_logits=frozenset(self.candidates(adapter)))

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Returns ``None``: this guide computes nothing in advance."""

    @property
    def total(self) -> float:
        """Returns the sum of the weights of the two layers."""
        return 1 - self.alpha

    def combine(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes contrasted log-probabilities before the plausibility cut, ``(B, N + 1, V)``."""
        main = outputs["main"]
        if not self.alpha:
            return main.logits
        last = main.logits.log_softmax(-1)
        farthest, early = None, last
        for layer in self.candidates(call.plan.adapter):
            logprobs = main.early_exit_logits[layer].log_softmax(-1)
            distance = jensen_shannon(last, logprobs)
            if farthest is None:
                farthest, early = distance, logprobs
                continue
            early = torch.where((distance > farthest)[..., None], logprobs, early)
            farthest = torch.maximum(farthest, distance)
        return last - self.alpha * early

    def apply(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the guided logits; see `mmdecode.engine.contracts.Guide.apply`."""
        combined = self.combine(constants, call, proposal, outputs)
        return plausible(combined, outputs["main"].logits, self.relative_top)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Computes the Jensen-Shannon divergence of log-probabilities ``(..., V)``, in nats."""
    middle = torch.logaddexp(p, q) - math.log(2)
    return (_divergence(p, middle) + _divergence(q, middle)) / 2


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """Computes the KL divergence of log-probabilities; tokens with ``p`` = 0 add nothing."""
    return torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1)
