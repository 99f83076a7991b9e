"""A control: near ties go to yes.

Where yes and no together have more than ``mass`` of the first token's probability and lie less than
``gap`` apart, the answer is yes, whatever the image.

Source: OLM of Yin et al. 2025, arXiv:2504.10020.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mmdecode.guide.answers import FirstWord
from mmdecode.guide.linear import not_negative


class NearTies(FirstWord):
    """Flip of near ties.

    Args:
        gap: Largest difference of the two probabilities that counts as a tie.
        mass: Probability that yes and no must have together.
        yes: See `mmdecode.guide.answers.FirstWord`.
        no: See ``yes``.
        tokenizer: See ``yes``.

    The guide has no effect with ``gap`` 0.
    """

    summary = "control: near ties of yes and no go to yes (OLM)"
    source = "Yin et al. 2025"

    def __init__(
        self,
        gap: float = 0.5,
        mass: float = 0.2,
        yes: int | Iterable[int] | None = None,
        no: int | Iterable[int] | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.gap, self.mass = not_negative("gap", gap), not_negative("mass", mass)
        self.neutral = not gap
        super().__init__(yes, no, tokenizer)

    def opening(self, main: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        """Only yes where the two are tied; unchanged elsewhere."""
        p = main.softmax(-1)
        p_yes, p_no = (p * yes).sum(-1), (p * no).sum(-1)
        tied = (p_yes + p_no > self.mass) & ((p_yes - p_no).abs() < self.gap)
        return main.masked_fill(tied[..., None] & ~yes, -torch.inf)
