"""DCLA: corrects hidden states of late layers that differ too much from earlier layers.

At each layer l of a late range, the reference ``r = sum_k w_k h_k`` is a weighted mean of the
outputs of all earlier layers k. If the layer's output h has ``cos(h, r) < tau``, it is replaced by
``alpha * h + (1 - alpha) * r``. Positions are corrected independently of each other, in the prompt
and after it, so a pass with a cache gives the same result as a full one. The final norm and the
head are unchanged. The guide also works on text models.

This follows the paper's abstract and reviews, which do not specify three things. Chosen here: the
layers are the second half; ``w_k`` is proportional to ``decay ** (l - k)``; and alpha is the weight
of the layer's own state.

Source: Tang et al. 2025, arXiv:2505.12343 (withdrawn from ICLR 2026); ``tau`` and ``alpha`` as its
reviewers quote them for one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from torch.utils.weak import WeakTensorKeyDictionary

from mmdecode.engine.contracts import StateEdit
from mmdecode.errors import OptionError
from mmdecode.guide.edited import Edited, checked_layers


@dataclass(frozen=True)
class _Sum:
    """Weighted sum of the outputs of the first ``count`` layers of a pass."""

    count: int
    total: Tensor
    weight: float


class DCLA(Edited):
    """Corrects states of late layers towards a weighted mean of earlier layers' states.

    Args:
        tau: Cosine below which a state is corrected. With -1 the guide has no effect; values above
            1 correct every state.
        alpha: Weight of the layer's own state, 0 to 1. With 1 the guide has no effect.
        layers: First and last layer that is corrected, as fractions of the depth.
        decay: Factor between the weights of a layer and the layer after it, above 0 and at most 1;
            1 is the unweighted mean.
    """

    summary = "hidden states that drift from earlier layers are pulled back"
    source = "DCLA 2025; range and weights are ours"

    def __init__(
        self,
        tau: float = 0.74,
        alpha: float = 0.82,
        layers: tuple[float, float] = (0.5, 1.0),
        decay: float = 0.5,
    ) -> None:
        if not 0 <= alpha <= 1:
            raise OptionError(f"alpha must be in 0..1, got {alpha}; 1 leaves states as they are")
        if not 0 < decay <= 1:
            raise OptionError(f"decay must be above 0 and at most 1, got {decay}; 1 is the mean")
        self.tau, self.alpha, self.decay = float(tau), float(alpha), float(decay)
        self.neutral = self.tau <= -1 or self.alpha == 1
        layers = checked_layers(layers)
        self.edits = [StateEdit(branch="main", change=self._corrected, layers=layers)]
        # keyed weakly by the latest output summed; passes of other threads have other outputs
        self._sums = WeakTensorKeyDictionary()

    @classmethod
    def from_options(
        cls,
        tau: float = 0.74,
        alpha: float = 0.82,
        first: float = 0.5,
        last: float = 1.0,
        decay: float = 0.5,
    ) -> DCLA:
        """Builds the guide from the options of a string; ``first`` and ``last`` give ``layers``."""
        return cls(tau, alpha, (first, last), decay)

    def _corrected(self, layer: int, states: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        if not earlier:
            return states
        reference, own = self._mean(earlier), states.float()
        drifted = cosine_similarity(own, reference, dim=-1)[..., None] < self.tau
        mixed = self.alpha * own + (1 - self.alpha) * reference
        return torch.where(drifted, mixed.to(states.dtype), states)

    def _mean(self, earlier: Sequence[Tensor]) -> Tensor:
        """Returns the weighted mean of earlier outputs; extends the sum of the layer before."""
        before = self._sums.pop(earlier[-2], None) if len(earlier) > 1 else None
        if before and before.count == len(earlier) - 1:
            count, total, weight = before.count, before.total, before.weight
        else:
            count, total, weight = 0, torch.zeros_like(earlier[0], dtype=torch.float32), 0.0
        for states in earlier[count:]:
            total, weight = self.decay * total + states.float(), self.decay * weight + 1
        self._sums[earlier[-1]] = _Sum(len(earlier), total, weight)
        return total / weight
