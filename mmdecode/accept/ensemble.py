"""Ensemble rule: where something was drafted, the distribution is a mixture of target and draft.

At a drafted position it is v = w p + (1 - w) q, everywhere else (the prompt's first token, the
token after a wholly accepted draft, rows that drafted nothing) it is p. Exact for v; since v
depends on the drafter and on where it drafted, the output is not that of the model. It is accepted
more often than under plain rejection, with probability 1 - w TV(p, q) for one draft.

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
        weight: Share of the target, above 0 and up to 1. ``1`` is neutral: the rejection rule.

    Guarantee: exact for the mixture v, see above; not lossless.
    """

    summary = "rejection sampling against a mixture of target and draft"
    source = "Narasimhan et al. 2024"
    guarantee = "exact for the mixture"

    def __init__(self, weight: float = 0.8) -> None:
        if not 0 < weight <= 1:
            raise OptionError(f"weight must be above 0 and at most 1, got {weight}; 1 is neutral")
        self.weight = weight

    def followed(self, p: Tensor, q: Tensor) -> Tensor:
        """The mixture, ``(B, V)``."""
        return p if self.weight == 1 else self.weight * p + (1 - self.weight) * q
