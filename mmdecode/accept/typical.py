"""Typical acceptance, a lossy rule whose threshold depends on the entropy of the distribution.

A drafted token x is kept if ``p(x) > min(epsilon, delta * exp(-H(p)))``. The longest path of such
tokens is accepted, the most likely of equally long paths. The token after it is the target's own
choice (the argmax, or a sample).

Source: Cai et al. 2024 (Medusa), arXiv:2401.10774, section 3.3. The reference swaps the defaults of
epsilon and delta between two functions; here are the defaults that its generation uses.
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
        epsilon: Upper limit of the threshold, 0 to 1. With ``1`` and a large ``delta`` no drafted
            token is kept.
        delta: Scale of the entropy-dependent threshold; at least 0.

    Guarantee: lossy; the output distribution has no closed form.
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
        """Applies the rule to a proposal; see `mmdecode.engine.contracts.AcceptanceRule`."""

        def test(scores: Tensor, tokens: Tensor, depths: Tensor) -> Tensor:
            log_p = scores.log_softmax(-1)
            p = log_p.gather(2, tokens[..., None])[..., 0].exp()
            return p > threshold(log_p, self.epsilon, self.delta)

        choose = keyed(call, Role.TARGET) if call.request.do_sample else best
        return keep_likely(proposal, target, call, choose, test)


def threshold(log_p: Tensor, epsilon: float, delta: float) -> Tensor:
    """Returns ``min(epsilon, delta * exp(-H))`` for log-probabilities ``(..., V)`` of entropy H."""
    entropy = -(log_p.exp() * log_p.clamp_min(-1e4)).sum(-1)
    return (delta * (-entropy).exp()).clamp_max(epsilon)
