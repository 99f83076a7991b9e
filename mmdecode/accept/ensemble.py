"""Ensemble rule: drafted positions follow a mixture of the target and draft distributions.

A drafted position follows v = w p + (1 - w) q, with the target's distribution p and the drafter's
q. All other positions follow p: the first generated token, the token after a fully accepted draft,
and rows without a draft. The rule is exact for these distributions, but v depends on the drafter
and on which positions were drafted, so the output is not distributed like the target model's. One
drafted token is accepted with probability 1 - w TV(p, q), in exact rejection sampling 1 - TV(p, q).

Source: the mixture target of cascades and assisted ensembles, Narasimhan et al. 2024,
arXiv:2405.19261, section 3; the same distribution as ``assistant_ensemble_weight`` of transformers.
"""

from __future__ import annotations

from torch import Tensor

from mmdecode.accept.rejection import Rejection
from mmdecode.errors import OptionError


class Ensemble(Rejection):
    """Rejection sampling against ``weight * p + (1 - weight) * q``.

    Args:
        weight: Weight w of the target's distribution p, above 0 and at most 1. ``1`` is exact
            rejection sampling.

    Guarantee: exact for the mixture, not for the target's distribution.
    """

    summary = "rejection sampling against a mixture of target and draft"
    source = "Narasimhan et al. 2024"
    guarantee = "exact for the mixture"

    def __init__(self, weight: float = 0.8) -> None:
        if not 0 < weight <= 1:
            raise OptionError(f"weight must be above 0 and at most 1, got {weight}; 1 is exact")
        self.weight = weight

    def followed(self, p: Tensor, q: Tensor) -> Tensor:
        """Returns the mixture of p and q, ``(B, V)``."""
        return p if self.weight == 1 else self.weight * p + (1 - self.weight) * q
