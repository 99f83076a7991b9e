"""Relative threshold: keep tokens that are nearly as likely as the model's most likely one.

Lossy. A drafted token that is not the target's own choice is kept where its probability exceeds
a share of the largest one; the target's own choice (argmax, or the keyed sample) is always kept.

Source: in the spirit of Bachmann et al. 2025 (Judge Decoding), arXiv:2501.19309, who accept what a
trained judge or the standard test accepts; here a threshold decides, which needs no training.
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
        share: 0..1; lower keeps more. ``1`` is neutral: the greedy and the coupled rule.

    Guarantee: lossy; no closed form. Do not call its output lossless.
    """

    summary = "keeps drafted tokens nearly as likely as the most likely one"
    source = "in the spirit of Bachmann et al. 2025"
    guarantee = "lossy"
    kinds: tuple[Kind, ...] = ("deterministic", "coupled", "iid", "without_replacement")
    modes = frozenset({"greedy", "sample"})

    def __init__(self, share: float = 0.3) -> None:
        if not 0 <= share <= 1:
            raise OptionError(f"share must be in 0..1, got {share}; 1 is neutral")
        self.share = share

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """See `mmdecode.engine.contracts.AcceptanceRule`."""
        choose = keyed(proposal, call, Role.TARGET) if call.request.do_sample else best

        floor = math.log(self.share) if self.share else -math.inf

        def test(scores: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
            likely = scores.gather(2, tokens[..., None])[..., 0] > scores.amax(-1) + floor
            return likely | (tokens == choose(scores, depths))

        return keep_likely(proposal, target, call, choose, test)
