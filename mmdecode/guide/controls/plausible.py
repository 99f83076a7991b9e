"""Controls without a second branch: the plausibility cut alone, and temperature with it.

Much of what contrastive decoding gains over sampling comes from its cut, and much of the gain of
additive methods comes from hidden sharpening: weights that add up to S sample at temperature 1 / S
where the branches agree. Both are inert in greedy generation: the argmax survives.

Source: Yin et al. 2025, arXiv:2504.10020; the cut is that of Li et al. 2023,
arXiv:2210.15097, equation 2.
"""

from __future__ import annotations

from collections.abc import Mapping

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput
from mmdecode.errors import OptionError
from mmdecode.guide.linear import Linear, warn_inert


class TemperatureMatched(Linear):
    """The main distribution at temperature ``1 / total``, with the plausibility cut.

    Args:
        total: S, the sum of the weights of the method that this is the control of: 4 for RITUAL, 3
            for AGLA, 1 for contrast.
        beta: Plausibility cut of that method.

    The guide has no effect with ``total`` 1 and ``beta`` 0.
    """

    summary = "control: the cut at the temperature that a method hides; for sampling"
    source = "Yin et al. 2025"

    def __init__(self, total: float = 4.0, beta: float = 0.1) -> None:
        if isinstance(total, str) or not 0 < total < float("inf"):
            raise OptionError(
                f"total must be more than 0, got {total}; 1 is the model's own distribution"
            )
        super().__init__([], [total], beta)

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Warns in greedy generation; computes nothing in advance."""
        warn_inert(type(self).__name__, call)


class Plausible(TemperatureMatched):
    """The main distribution, with the plausibility cut.

    Args:
        beta: Plausibility cut; with 0 the guide has no effect.
    """

    summary = "control: the plausibility cut alone; for sampling"
    source = "Yin et al. 2025"

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__(1.0, beta)
