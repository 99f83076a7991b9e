"""Uncertainty-aware dynamic fusion: the second model's weight falls with the main one's confidence.

The main model has the distribution ``p_L = softmax(z_L / main_temperature)``, whose entropy in nats
is U; the second model has p_A. The weight is ``w = max(0, sigmoid(scale * U) - beta)``, which is
below ``1 - beta``, and the fused distribution is ``(p_L + w p_A) / (1 + w)``. So the second model
can change the most likely token only if the two largest main probabilities differ by less than w.
With a large vocabulary the sigmoid saturates: with ``beta`` 0.5, an entropy of 3 nats already gives
w = 0.45, and the limit is 0.5. A smaller ``scale`` makes w change more gradually.

The source has no ``scale`` and no lower limit of 0 for w. Its released code gives NaN where a
probability underflows, and its scores add up to ``1 + w``.

Source: Chen et al. 2024, arXiv:2402.05457, and its release (Hypotheses-Paradise/UADF):
``generate_uadf.py``.
"""

from __future__ import annotations

from torch import Tensor
from torch.special import entr

from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import OptionError
from mmdecode.guide.fusion import Late
from mmdecode.guide.linear import not_negative


class UADF(Late):
    """Late fusion whose weight grows with the entropy of the main model.

    Args:
        acoustic: Branch of the second model, see `mmdecode.guide.fusion.Fusion`.
        beta: Value subtracted from the sigmoid. With 1 or more the guide has no effect.
        scale: Factor of the entropy; 0 gives a fixed weight of ``0.5 - beta``.
        main_temperature: Divisor of the main model's logits.
        acoustic_temperature: Divisor of the second model's scores.
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
        """Returns w at every position, ``(B, N + 1, 1)``, given main log-probabilities."""
        entropy = entr(main.exp()).sum(-1, keepdim=True)
        return ((self.scale * entropy).sigmoid() - self.beta).clamp_min(0)
