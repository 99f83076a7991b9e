"""PAI: increases attention to the image, and contrasts the model with itself without the image.

In the attention part, attention scores s of image keys become ``s + alpha * |s|`` for queries from
the last prompt token on, in all of 32 layers except the first two. In the logits part, the guided
logits are ``log p_u + gamma * (log p_c - log p_u)``, where p_c is the distribution with the
attention part, and p_u the distribution without image and without attention part. Then tokens that
are implausible under p_c are excluded, see `mmdecode.guide.linear`. Each part can be switched off.

Source: Liu et al. 2024, arXiv:2407.21771, equations 3 and 5. ``alpha`` is from its README, the
plausibility cut from its code.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.attention import AttentionEdit, Site
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput
from mmdecode.guide.edited import checked_layers, warn_without_images
from mmdecode.guide.linear import Linear, not_negative

LAYERS = (2 / 31, 1.0)
"""Layers 2 to 31 of 32, counted from 0, as published."""


class PAI(Linear):
    """Boosts attention to the image, and guides away from the distribution without the image.

    Args:
        alpha: Strength of the attention boost; 0 switches the attention part off.
        gamma: Guidance scale of the logits part; 1 switches guidance off, but not the cut.
        beta: Plausibility cut: excludes tokens with p_c below ``beta * max p_c``; 0: no cut.
        layers: First and last layer of the attention part, as fractions of the depth.

    The guide has no effect with ``alpha`` 0, ``gamma`` 1 and ``beta`` 0.
    """

    summary = "more attention to the image, and away from the answer without it"
    source = "Liu et al. 2024"
    requires_inputs = ("image",)

    def __init__(
        self,
        alpha: float = 0.2,
        gamma: float = 1.1,
        beta: float = 0.1,
        layers: tuple[float, float] = LAYERS,
    ) -> None:
        self.alpha = not_negative("alpha", alpha)
        not_negative("gamma", gamma)
        branch = BranchSpec(name="no_image", transform="no_image")
        super().__init__([branch], [gamma, 1 - gamma], beta, log_space=True)
        self.neutral &= self.alpha == 0
        layers = checked_layers(layers)
        boost = AttentionEdit(branch="main", layers=layers, scores=self._boosted)
        self.edits = [boost] if self.alpha else []

    @classmethod
    def from_options(
        cls,
        alpha: float = 0.2,
        gamma: float = 1.1,
        beta: float = 0.1,
        first: float = LAYERS[0],
        last: float = LAYERS[1],
    ) -> PAI:
        """Builds the guide from the options of a string; ``first`` and ``last`` give ``layers``."""
        return cls(alpha, gamma, beta, (first, last))

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Warns if no prompt has an image, or if images change no logits; computes nothing."""
        if bool(call.plan.adapter.spans("image", call.request.prompt_ids).any()):
            super().begin(call, prefill)
        else:
            warn_without_images(type(self).__name__, call)

    def _boosted(self, scores: Tensor, site: Site) -> Tensor:
        return torch.where(site.images, scores + self.alpha * scores.abs(), scores)
