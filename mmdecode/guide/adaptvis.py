"""AdaptVis: ScalingVis with a weight that the model's confidence chooses for each request.

A first pass reads the prompt unchanged. The confidence is the largest probability of the first
token, rounded to two decimals. A second pass reads the prompt with the attention to image tokens
scaled: by one weight if the confidence is below a threshold (which smooths the attention), by
another otherwise (which sharpens it). The answer is generated from the second pass alone. One of
the released scripts compares the raw logit, not the probability, with the threshold.

Source: Chen et al. 2025, arXiv:2503.01773. Weights and threshold are those of its ``run.sh``; the
README has 0.3 as threshold.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.attention import AttentionEdit, Site
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput
from mmdecode.errors import OptionError
from mmdecode.guide.edited import Edited
from mmdecode.guide.scalingvis import checked_weight

_UNCONFIDENT, _CONFIDENT = 1.0, 2.0


class AdaptVis(Edited):
    """ScalingVis with one of two weights per request, chosen by confidence.

    Args:
        unsure: Weight ``w1`` for confidences below the threshold; see
            `mmdecode.guide.scalingvis.ScalingVis`.
        sure: Weight ``w2`` for other confidences. With both weights 1 the guide has no effect.
        threshold: Confidence, 0 to 1, from which ``sure`` is used.
    """

    summary = "as scalingvis, sharpened or smoothed by the model's confidence"
    source = "Chen et al. 2025"
    requires_inputs = ("image",)
    branches = (BranchSpec(name="edited", stage=2, replaces_after_prefill="main"),)

    def __init__(self, unsure: float = 0.5, sure: float = 1.5, threshold: float = 0.4) -> None:
        if not 0 <= threshold <= 1:
            raise OptionError(f"threshold must be a probability in 0..1, got {threshold}")
        self.weight_below, self.weight_above = checked_weight(unsure), checked_weight(sure)
        self.threshold = threshold
        self.neutral = self.weight_below == self.weight_above == 1
        edit = AttentionEdit(
            branch="edited", rows="last_prompt", scores=self._scaled, strength=self._choice
        )
        self.edits = [edit]

    def confident(self, logits: Tensor) -> Tensor:
        """Whether first-token logits ``(..., V)`` reach the threshold, bool ``(...)``."""
        confidence = logits.double().softmax(-1).amax(-1)
        return confidence.round(decimals=2) >= self.threshold

    def _choice(self, call: Call, earlier: Mapping[str, BranchOutput]) -> Tensor:
        return torch.where(self.confident(earlier["main"].logits), _CONFIDENT, _UNCONFIDENT)

    def _scaled(self, scores: Tensor, site: Site) -> Tensor:
        weight = torch.where(site.strength == _CONFIDENT, self.weight_above, self.weight_below)
        return torch.where(site.images, scores * weight, scores)
