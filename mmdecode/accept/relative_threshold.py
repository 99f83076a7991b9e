"""Relative threshold, a lossy rule that keeps tokens nearly as likely as the most likely one.

A drafted token is kept if its target probability exceeds a given share of the largest probability.
The token that the target itself chooses (the argmax, or a sample) is always kept.

Source: in the spirit of Bachmann et al. 2025 (Judge Decoding), arXiv:2501.19309, who accept what a
trained judge or the standard test accepts; here a threshold replaces the trained judge.
"""

from __future__ import annotations

import math

from torch import Tensor

from mmdecode.accept.follow import best, keep_likely, keyed
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import AcceptanceRule, Outcome
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.engine.target_logits import TargetLogits
from mmdecode.errors import OptionError


class RelativeThreshold(AcceptanceRule):
    """Keeps a drafted token if ``p(x) > share * max p``, or if it is the target's own choice.

    Args:
        share: Threshold as a share of the largest probability, 0 to 1; lower values keep more.
            ``1`` is exact: the rule is then `GreedyMatch` or, for sampling, `Coupled`.

    Guarantee: lossy; the output distribution has no closed form.
    """

    summary = "keeps drafted tokens nearly as likely as the most likely one"
    source = "in the spirit of Bachmann et al. 2025"
    guarantee = "lossy"
    kinds: tuple[Kind, ...] = ("deterministic", "coupled", "iid", "without_replacement")
    modes = frozenset({"greedy", "sample"})

    def __init__(self, share: float = 0.3) -> None:
        if not 0 <= share <= 1:
            raise OptionError(f"share must be in 0..1, got {share}; 1 is exact")
        self.share = share

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """Applies the rule to a proposal; see `mmdecode.engine.contracts.AcceptanceRule`."""
        choose = keyed(call, Role.TARGET) if call.request.do_sample else best

        floor = math.log(self.share) if self.share else -math.inf

        def test(scores: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
            likely = scores.gather(2, tokens[..., None])[..., 0] > scores.amax(-1) + floor
            return likely | (tokens == choose(scores, depths))

        return keep_likely(proposal, target, call, choose, test)
