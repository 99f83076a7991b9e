"""Exact rules that choose the target's token and keep drafted tokens that equal it.

The output follows the target's (guided) distribution for any proposal, because a drafted token
never influences the target's choice. Rules that need q, the distribution that drafted tokens were
sampled from, are in `mmdecode.accept.rejection`.
"""

from __future__ import annotations

from dataclasses import replace

from mmdecode.accept.follow import best, follow, keyed
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import RuleCapabilities
from mmdecode.engine.contracts import AcceptanceRule, Outcome
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.engine.target_logits import TargetLogits

_ANY: tuple[Kind, ...] = ("deterministic", "coupled", "iid", "without_replacement")


class GreedyMatch(AcceptanceRule):
    """Keeps a drafted token if it is the argmax of the target; ties go to the lowest id.

    Guarantee: exact for greedy decoding, for any proposal.
    Source: Stern et al. 2018, arXiv:1811.03115, section 3.
    """

    summary = "keeps drafted tokens that equal the argmax"
    source = "Stern et al. 2018"
    guarantee = "exact"
    kinds = _ANY
    modes = frozenset({"greedy"})
    capabilities = RuleCapabilities(drafter_invariant=True, argmax_only=True)

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """Applies the rule to a proposal; see `mmdecode.engine.contracts.AcceptanceRule`."""
        return follow(proposal, target, call, best)


class Coupled(AcceptanceRule):
    """Keeps a drafted token if it is argmax(log pi + G), with Gumbel noise G keyed by position.

    Here pi is the target's distribution. The noise depends on the seed and the position, not on the
    round, so a seed gives the same sequence with any draft, without drafts and in any batch.

    Guarantee: exact, for any proposal. A coupled draft (argmax log q + the same G) is accepted with
    probability at least (1 - TV) / (1 + TV).
    Source: Daliri, Musco and Suresh 2024, arXiv:2408.07978 (drafter-invariant coupling).
    """

    summary = "keeps drafted tokens that equal the keyed Gumbel-max sample"
    source = "Gumbel-max coupling; the same seed gives the same tokens with any draft"
    guarantee = "exact"
    kinds: tuple[Kind, ...] = ("coupled", "deterministic", "iid", "without_replacement")
    modes = frozenset({"sample"})
    capabilities = RuleCapabilities(drafter_invariant=True)

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """Applies the rule to a proposal; see `mmdecode.engine.contracts.AcceptanceRule`."""
        choose = keyed(call, Role.TARGET, deepest=proposal.deepest)
        return follow(proposal, target, call, choose)


class SampleMatch(AcceptanceRule):
    """Samples each token from the target, and keeps a drafted token if it equals the sample.

    A sample that was not drafted becomes the last token of the round. This equals rejection
    sampling with a one-hot q for each drafted token, in the output distribution and in the
    probability of acceptance: the sum of the target's probabilities of the tokens drafted there.

    Guarantee: exact, for any proposal whose tokens do not depend on the rule's random numbers.
    Source: Leviathan et al. 2023, arXiv:2211.17192, with a one-hot q.
    """

    summary = "samples from the target and keeps drafted tokens while they equal the sample"
    source = "one-hot case of Leviathan et al. 2023"
    guarantee = "exact"
    kinds = _ANY
    modes = frozenset({"sample"})

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """Applies the rule to a proposal; see `mmdecode.engine.contracts.AcceptanceRule`."""
        choose = keyed(call, Role.ACCEPT, call.rows.rounds, proposal.deepest)
        outcome = follow(proposal, target, call, choose)
        return replace(outcome, choices=None)  # made by noise that decides this round alone
