"""Typical acceptance: keep what is likely enough for the entropy of the distribution. Lossy.

Source: Cai et al. 2024 (Medusa), arXiv:2401.10774, section 3.3: keep x while
``p(x) > min(epsilon, delta * exp(-H(p)))``. The longest path wins, then the more likely one.
The token after the path is the target's own choice (argmax, or the keyed sample). The reference
swaps the defaults of epsilon and delta between two functions; these are the ones its generation
uses.
"""

from __future__ import annotations

from torch import Tensor

from mmdecode.accept.follow import best, keep_likely, keyed
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import AcceptanceRule, Outcome
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.engine.target_logits import TargetLogits
from mmdecode.errors import OptionError


class Typical(AcceptanceRule):
    """Keeps a drafted token if its probability exceeds ``min(epsilon, delta * exp(-entropy))``.

    Args:
        epsilon: Hard threshold, 0..1. ``1`` with a large ``delta`` is neutral: nothing is kept.
        delta: Scale of the entropy-dependent threshold, >= 0.

    Guarantee: lossy; no closed form. Do not call its output lossless.
    """

    summary = "keeps drafted tokens that are likely enough for the distribution's entropy"
    source = "Cai et al. 2024"
    guarantee = "lossy"
    kinds: tuple[Kind, ...] = ("deterministic", "coupled", "iid", "without_replacement")
    modes = frozenset({"greedy", "sample"})

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not 0 <= epsilon <= 1 or delta < 0:
            raise OptionError(
                f"epsilon={epsilon}, delta={delta}; expected epsilon in 0..1 and delta >= 0"
            )
        self.epsilon, self.delta = epsilon, delta

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """See `mmdecode.engine.contracts.AcceptanceRule`."""

        def test(scores: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
            log_p = scores.log_softmax(-1)
            p = log_p.gather(2, tokens[..., None])[..., 0].exp()
            return p > threshold(log_p, self.epsilon, self.delta)

        choose = keyed(proposal, call, Role.TARGET) if call.request.do_sample else best
        return keep_likely(proposal, target, call, choose, test)


def threshold(log_p: Tensor, epsilon: float, delta: float) -> Tensor:
    """``min(epsilon, delta * exp(-H))`` over the last axis of normalised log-probabilities."""
    entropy = -(log_p.exp() * log_p.clamp_min(-1e4)).sum(-1)
    return (delta * (-entropy).exp()).clamp_max(epsilon)
