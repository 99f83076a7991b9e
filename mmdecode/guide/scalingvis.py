"""ScalingVis: a temperature on the attention that the last prompt token pays to image tokens.

Scaled attention scores of image keys are multiplied by ``weight``, in all layers and heads, for the
last token of the prompt alone, before the mask and the softmax. Among image tokens attention
becomes ``softmax(weight * s)``: sharper above 1, smoother below. The scores themselves are scaled,
so a constant added to them is not without effect: where they are negative, a weight above 1 takes
attention away from the image.

Source: Chen et al. 2025, arXiv:2503.01773. Its code scales all columns from the first image token
to the last; here words between two images keep their scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmdecode.engine.attention import AttentionEdit, Site
from mmdecode.errors import OptionError
from mmdecode.guide.edited import Edited


class ScalingVis(Edited):
    """One weight for all requests.

    Args:
        weight: w, at least 0; the paper tries 0, 0.5, 0.8, 1.2, 1.5 and 2. With 1 the guide has no effect.
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
    """Checks a weight of image keys.

    Raises:
        OptionError: The weight is negative.
    """
    if not weight >= 0:
        raise OptionError(f"the weight must be at least 0, got {weight}; 1 leaves scores alone")
    return float(weight)
