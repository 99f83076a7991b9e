"""A control: answers yes where yes and no are nearly equally likely.

If yes and no as the first token together have a probability above ``mass``, and their probabilities
differ by less than ``gap``, the answer is yes, whatever the image.

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
    """Answers yes where yes and no are nearly equally likely as the first token.

    Args:
        gap: Difference of the two probabilities below which the answer is yes.
        mass: Probability that yes and no together must exceed.
        yes: Token ids of yes, see `mmdecode.guide.answers.FirstWord`.
        no: Token ids of no.
        tokenizer: Tokenizer that finds these ids if they are not given.

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
        """Excludes all tokens but yes where yes and no are nearly equally likely."""
        p = main.softmax(-1)
        p_yes, p_no = (p * yes).sum(-1), (p * no).sum(-1)
        tied = (p_yes + p_no > self.mass) & ((p_yes - p_no).abs() < self.gap)
        return main.masked_fill(tied[..., None] & ~yes, -torch.inf)
