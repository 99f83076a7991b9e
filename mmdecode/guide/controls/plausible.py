"""Controls without a second branch: the plausibility cut, alone or with a temperature.

Much of the gain of contrastive decoding over sampling comes from its plausibility cut, which
excludes unlikely tokens. Much of the gain of methods that add logits comes from a lower
temperature: if their weights add up to S, they sample at temperature 1 / S where the branches
agree. These controls have neither contrast nor a second image. They have no effect in greedy
decoding, since the argmax stays the same.

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
        total: Sum S of the weights of the method that is compared: 4 for RITUAL, 3 for AGLA, 1 for
            contrastive methods.
        beta: Plausibility cut of that method: excludes tokens with a probability below ``beta * max
            p``.

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
        """Warns in greedy decoding, where the guide has no effect; computes nothing in advance."""
        warn_inert(type(self).__name__, call)


class Plausible(TemperatureMatched):
    """The main distribution, with the plausibility cut.

    Args:
        beta: Plausibility cut: excludes tokens with a probability below ``beta * max p``. With 0
            the guide has no effect.
    """

    summary = "control: the plausibility cut alone; for sampling"
    source = "Yin et al. 2025"

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__(1.0, beta)
