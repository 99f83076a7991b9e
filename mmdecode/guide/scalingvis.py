"""ScalingVis: scales the attention scores from the last prompt token to image tokens.

In all layers and heads, the attention scores s of image keys (after division by the root of the
head width) are multiplied by ``weight``, before mask and softmax. Only the last token of the prompt
is affected. Among image tokens the attention becomes proportional to ``exp(weight * s)``: sharper
if the weight is above 1, smoother if it is below. The total attention to the image changes too: if
the scores are negative, a weight above 1 reduces it.

Source: Chen et al. 2025, arXiv:2503.01773. Its code scales all columns from the first image token
to the last; here text tokens between two images keep their scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmdecode.engine.attention import AttentionEdit, Site
from mmdecode.errors import OptionError
from mmdecode.guide.edited import Edited


class ScalingVis(Edited):
    """Scales attention to the image by the same weight in all requests.

    Args:
        weight: Factor of the scores, at least 0. With 1 the guide has no effect. The paper tries 0,
            0.5, 0.8, 1.2, 1.5 and 2.
    """

    summary = "attention of the last prompt token to the image, sharpened or smoothed"
    source = "Chen et al. 2025"
    requires_inputs = ("image",)

    def __init__(self, weight: float = 1.5) -> None:
        self.weight = checked_weight(weight)
        self.neutral = self.weight == 1
        self.edits = [AttentionEdit(branch="main", rows="last_prompt", scores=self._scaled)]

    def _scaled(self, scores: Tensor, site: Site) -> Tensor:
        return torch.where(site.images, scores * self.weight, scores)


def checked_weight(weight: float) -> float:
    """Checks that a weight is at least 0, and returns it.

    Raises:
        OptionError: The weight is negative.
    """
    if not weight >= 0:
        raise OptionError(f"the weight must be at least 0, got {weight}; 1 has no effect")
    return float(weight)
