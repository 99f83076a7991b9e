"""PAI: more attention to the image, and contrast with the model without it.

Attention part: scores of image keys become ``s + alpha * |s|`` for the last prompt token and every
later one, from the third of 32 layers on. Logits part: ``log p_u + gamma * (log p_c - log p_u)``,
where u reads the prompt without its image and without the attention part; then the plausibility cut
on c. Each part can be switched off.

Source: Liu et al. 2024, arXiv:2407.21771, equations 3 and 5; ``alpha`` of its README, the cut of
its code.
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
"""Layers 2 to 31 of 32, as published."""


class PAI(Linear):
    """Boosted image attention, and guidance against no image.

    Args:
        alpha: Boost of image keys; 0 switches the attention part off.
        gamma: Scale of the guidance; 1 switches it off and leaves the cut alone.
        beta: Plausibility cut; 0 keeps the vocabulary.
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
        """Warns where there are no images, for either part; computes nothing in advance."""
        if bool(call.plan.adapter.spans("image", call.request.prompt_ids).any()):
            super().begin(call, prefill)
        else:
            warn_without_images(type(self).__name__, call)

    def _boosted(self, scores: Tensor, site: Site) -> Tensor:
        return torch.where(site.images, scores + self.alpha * scores.abs(), scores)
