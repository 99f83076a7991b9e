"""Grouped speculative decoding, a lossy rule that compares groups of similar tokens.

The group C of a drafted token x holds x and the tokens that are close to x in three ways: in the
order of the target's probabilities p, in p itself, and in the embedding of their image code. The
token x is kept with probability min(1, p(x) / q(x)) or min(1, p(C) / q(C)), whichever is larger;
after a rejection the next token is sampled from max(p - q, 0), normalised.

Source: So et al. 2025 (GSD), arXiv:2508.07747. Differs from the published code, which uses only
p(C) / q(C): groups overlap, so this ratio may be smaller than p(x) / q(x). Tokens with probability
0 are in no group, so none is kept. Errors are raised; the published code falls back to the test of
the single token without a message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmdecode.accept.lantern import codebook_of, codes_at
from mmdecode.accept.rejection import Candidate, Relaxed
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import Outcome
from mmdecode.engine.proposal import Proposal
from mmdecode.engine.target_logits import TargetLogits
from mmdecode.errors import OptionError


class GSD(Relaxed):
    """Rejection sampling with the odds of the drafted token's group where they are larger.

    Args:
        size: Largest number G of tokens in a group: up to G // 2 that precede the drafted token x
            in the order of p, and as many that follow. ``1`` is exact rejection sampling. The
            published code has 15, the paper 3 to 50.
        gap: Tokens of a group have probabilities that differ from p(x) by less than this.
        distance: Largest distance between the embedding of a code in the group and that of x, as
            the image decoder receives them; ``None``: no limit, and no codebook is needed.

    Guarantee: lossy. Tokens that are no image codes, and positions where the image layout forces a
    token (such as the end of a row), are tested exactly.

    Raises:
        OptionError: A number is out of range.
    """

    summary = "accepts by the odds of a group of similar image codes where these are better"
    source = "GSD, So et al. 2025"
    guarantee = "lossy"

    def __init__(self, size: int = 15, gap: float = 0.15, distance: float | None = 0.5) -> None:
        if size < 1 or not gap > 0 or not (distance is None or distance > 0):
            raise OptionError(
                f"size={size}, gap={gap}, distance={distance}; expected a size of 1 (neutral) or "
                "more, a gap above 0 and a distance above 0 or none"
            )
        self.size, self.gap, self.distance = size, gap, distance
        self.neutral = size == 1

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """Applies the rule to a proposal; see `mmdecode.engine.contracts.AcceptanceRule`.

        Raises:
            IncompatibleError: The model has no codebook, and ``distance`` is given.
        """
        if not self.neutral and self.distance is not None:
            codebook_of(
                self, call.plan.adapter
            )  # refuse in the first round, before anything is drafted
        return super().__call__(proposal, target, call)

    def odds(self, candidate: Candidate) -> tuple[Tensor, Tensor]:
        """Returns p and q, the two sides of the acceptance test, of the token or of its group."""
        p_x, q_x = super().odds(candidate)
        if self.neutral:
            return p_x, q_x
        members, alike = self._group(candidate, p_x)
        p_group, q_group = (
            (probs.gather(-1, members) * alike).sum(-1) for probs in (candidate.p, candidate.q)
        )
        better = p_group * q_x > p_x * q_group
        return torch.where(better, p_group, p_x), torch.where(better, q_group, q_x)

    def _group(self, candidate: Candidate, p_x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns x and its neighbours in the order of p, ``(..., M)``, and which are in C."""
        p, x = candidate.p, candidate.token[..., None]
        side = min(self.size // 2, p.shape[-1])
        _, code_of, relaxed = codes_at(candidate)
        ids = torch.arange(p.shape[-1], device=p.device)
        likelier = (p > p_x[..., None]) | ((p == p_x[..., None]) & (ids < x))
        # the least likely of those before x, and the most likely of those after it
        above = p.masked_fill(~likelier, torch.inf).topk(side, largest=False)
        below = p.masked_fill(likelier | (ids == x), 0).topk(side)
        members = torch.cat([above.indices, x, below.indices], -1)
        p_y = torch.cat([above.values, p_x[..., None], below.values], -1)
        alike = (p_y > 0) & ((p_y - p_x[..., None]).abs() < self.gap)
        alike &= (relaxed & (p_x > 0))[..., None]
        if self.distance is not None:
            codes = codebook_of(self, candidate.adapter)
            own, other = code_of[candidate.token, None].clamp_min(0), code_of[members]
            apart = (codes[other.clamp_min(0)] - codes[own]).norm(dim=-1)
            alike &= (other >= 0) & (apart < self.distance)
        return members, alike
