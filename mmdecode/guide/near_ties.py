"""A control: near ties go to yes.

Where yes and no together have more than ``mass`` of the first token's probability and lie less than
``gap`` apart, the answer is yes, whatever was shown.

Source: OLM of Yin et al. 2025, arXiv:2504.10020.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmdecode.engine.contracts import Context, Scores
from mmdecode.engine.proposal import Proposal
from mmdecode.guide.answers import FirstWord
from mmdecode.guide.linear import generated, not_negative


class NearTies(FirstWord):
    """Flip of near ties.

    Args:
        gap: See above.
        mass: See above.
        yes: See `mmdecode.guide.answers.FirstWord`.
        no: As ``yes``.
        tokenizer: As ``yes``.

    Neutral: ``gap`` 0.
    """

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

    def apply(
        self,
        constants: tuple[Tensor, Tensor],
        ctx: Context,
        proposal: Proposal,
        scores: Mapping[str, Scores],
    ) -> Tensor:
        """See `mmdecode.engine.contracts.Guide`."""
        main = scores["main"].logits
        if ctx.longest:
            return main  # every row is past its first token
        p = main.softmax(-1)
        yes, no = ((p * ids).sum(-1) for ids in constants)
        tied = (yes + no > self.mass) & ((yes - no).abs() < self.gap)
        forced = tied & (generated(ctx, proposal) == 0)
        return main.masked_fill(forced[..., None] & ~constants[0], -torch.inf)
