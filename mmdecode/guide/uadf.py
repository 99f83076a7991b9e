"""Uncertainty-aware dynamic fusion: the more confident the main model, the less the second counts.

``U = -sum p_L log p_L`` of ``p_L = softmax(z_L / main_temperature)``, in nats, ``w = sigmoid(scale
* U) - beta`` where that is above 0, and the distribution is ``(p_L + w p_A) / (1 + w)``. So the
second model can change the most likely token only where the two best main probabilities are less
than w apart, and w is below ``1 - beta``. Over a large vocabulary the sigmoid saturates: 3 nats
already give 0.45 of at most 0.5, so that ``scale`` decides how far between on and off the fusion
is.

``scale`` is ours, and so is the bound at 0; the rest is the source's. Its released code gives NaN
where a probability underflows, and scores that sum to ``1 + w``.

Source: Chen et al. 2024, arXiv:2402.05457, and its release
(Hypotheses-Paradise/UADF): ``generate_uadf.py``.
"""

from __future__ import annotations

from torch import Tensor
from torch.special import entr

from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import OptionError
from mmdecode.guide.fusion import Late
from mmdecode.guide.linear import not_negative


class UADF(Late):
    """Uncertainty-aware dynamic fusion.

    Args:
        acoustic: See `mmdecode.guide.fusion.Fusion`.
        beta: Subtracted from the weight; 1 or more is neutral.
        scale: Factor of the entropy; 0 is a fixed weight of ``0.5 - beta``.
        main_temperature: See `mmdecode.guide.fusion.Fusion`.
        acoustic_temperature: See `mmdecode.guide.fusion.Fusion`.
    """

    def __init__(
        self,
        acoustic: BranchSpec,
        beta: float = 0.5,
        scale: float = 1.0,
        main_temperature: float = 1.0,
        acoustic_temperature: float = 1.0,
    ) -> None:
        super().__init__(acoustic, main_temperature, acoustic_temperature)
        self.beta, self.scale = float(beta), float(not_negative("scale", scale))
        if not beta >= 0:
            raise OptionError(f"beta must be >= 0, got {beta}; 1 switches the second model off")
        # no entropy gives a weight above 0
        self.neutral = self.beta >= (1.0 if self.scale else 0.5)

    def weight(self, main: Tensor) -> Tensor:
        """Weight at every position, ``(B, N + 1, 1)``, by log-probabilities ``(B, N + 1, V)``."""
        entropy = entr(main.exp()).sum(-1, keepdim=True)
        return ((self.scale * entropy).sigmoid() - self.beta).clamp_min(0)
