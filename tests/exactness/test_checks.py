"""The checks for parts of others find what violates a property, and name it."""

import pytest
import torch

import mmdecode as mm
from mmdecode.accept.exact import GreedyMatch
from mmdecode.draft.lookup import PromptLookup
from mmdecode.engine.contracts import Outcome
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError
from mmdecode.testing import check_accept, check_adapter, check_draft, check_guide, drafts
from mmdecode.testing.table import Table, left_pad


class OneState(mm.Drafter):
    """The mistake: what belongs to a call is kept in the drafter."""

    def begin(self, call, prefill):
        self.call = call
        return OneStateSession(call, self)


class OneStateSession(mm.DraftSession):
    def __init__(self, call, drafter):
        super().__init__(call)
        self.drafter = drafter

    def propose(self, budget):
        return Proposal(tokens=self.drafter.call.last(1), kind="deterministic")


def test_a_state_of_a_call_that_is_kept_in_the_drafter_is_found():
    with pytest.raises(Exception) as raised:
        check_draft(OneState)
    lines = [str(raised.value), *getattr(raised.value, "__notes__", ())]
    assert "two threads can use one object at once" in lines[-1]


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (None, "a drafter changes no token: propose returned None; expected a Proposal"),
        ([[7]], r"propose returned the tokens \[\[7\].*; expected ids below 5, or -1"),
    ],
)
def test_what_no_model_can_read_is_found_in_proposals(proposal, message):
    class Odd(drafts.TestDrafter):
        def draft(self, call, budget):
            if proposal is None:
                return None
            tokens = torch.tensor(proposal).expand(call.batch, -1)
            return Proposal(tokens=tokens, kind="deterministic")

    with pytest.raises(AssertionError, match=message):
        check_draft(Odd)


def write(call, name):
    """Writes one value into a tensor of a call."""
    room, _, field = name.partition(".")
    value = getattr(getattr(call, room), field)
    value[..., :1] = value[..., :1].logical_not() if value.dtype == torch.bool else 3


WRITTEN = ("rows.ids", "rows.length", "rows.active", "request.prompt_mask")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("method", ["begin", "propose", "observe"])
def test_a_drafter_that_writes_to_its_call_is_found(name, method):
    class Session(mm.DraftSession):
        def propose(self, budget):
            if method == "propose":
                write(self.call, name)
            return super().propose(budget)

        def observe(self, proposal, output, block):
            if method == "observe":
                write(self.call, name)

    class Writing(mm.Drafter):
        def begin(self, call, prefill):
            if method == "begin":
                write(call, name)
            return Session(call)

    says = f"^property violated, a drafter never changes its Call: {name} was written in {method};"
    with pytest.raises(AssertionError, match=says):
        check_draft(Writing)


@pytest.mark.parametrize("method", ["begin", "apply"])
def test_a_guide_that_writes_to_its_call_is_found(method):
    class Writing(mm.Guide):
        neutral = False

        def begin(self, call, prefill):
            if method == "begin":
                write(call, "request.prompt_mask")

        def apply(self, constants, call, proposal, outputs):
            if method == "apply" and proposal.size:
                write(call, "request.prompt_mask")
            return outputs["main"].logits

    says = f"a guide never changes its Call: request.prompt_mask was written in {method};"
    with pytest.raises(AssertionError, match=says):
        check_guide(Writing)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_rule_that_writes_to_its_call_is_found(name):
    class Writing(GreedyMatch):
        def __call__(self, proposal, target, call):
            outcome = super().__call__(proposal, target, call)
            write(call, name)
            return outcome

    says = f"^property violated, a rule never changes its Call: {name} was written in __call__;"
    with pytest.raises(AssertionError, match=says):
        check_accept(Writing)


def test_a_guide_of_one_row_of_scores_is_found():
    class Last(Remembers):
        def apply(self, constants, call, proposal, outputs):
            return outputs["main"].logits[:, -1]

    with pytest.raises(AssertionError, match=r"apply returned \(4, 5\); expected .* \(4, 1, 5\)"):
        check_guide(Last)


class Learning(drafts.Constant):
    """Proposes one token more in every call."""

    def begin(self, call, prefill):
        self.length += 1
        return super().begin(call, prefill)


def test_a_drafter_that_learns_from_calls_has_to_be_checked_as_one():
    with pytest.raises(
        AssertionError, match=r"one object can be used for several calls.*learns=True"
    ):
        check_draft(lambda: Learning(1, 1))
    check_draft(lambda: Learning(1, 1), learns=True)


class Remembers(mm.Guide):
    """The mistake: a guide that keeps what an earlier call began with."""

    neutral = False

    def __init__(self):
        self.seen = 0

    def begin(self, call, prefill):
        self.seen += call.request.max_new_tokens == 1

    def apply(self, constants, call, proposal, scores):
        return scores["main"].logits * (1 + self.seen)


def test_a_guide_that_remembers_a_call_is_found():
    with pytest.raises(AssertionError, match=r"one object can be used for several calls"):
        check_guide(Remembers)


class Wrong(mm.AcceptanceRule):
    """The mistake: it keeps whatever was drafted."""

    guarantee = "exact"
    kinds = ("deterministic",)
    modes = frozenset({"greedy"})

    def __call__(self, proposal, distribution, call):
        kept = min(proposal.size, 1)
        return Outcome(
            path=proposal.tokens.new_zeros(call.batch, kept),
            num_accepted=proposal.tokens.new_full((call.batch,), kept),
            next_token=distribution.all()[:, 0].argmax(-1),
        )


def test_a_rule_that_keeps_everything_is_found_and_the_drafter_named():
    with pytest.raises(AssertionError, match=r"property violated, in mode greedy with Random"):
        check_accept(Wrong)


@pytest.mark.parametrize(
    ("check", "given", "message"),
    [
        (check_draft, PromptLookup(), r"is no function; pass a function: lambda: PromptLookup"),
        (check_accept, GreedyMatch(), r"is no function; .*lambda: GreedyMatch"),
        (check_draft, GreedyMatch, r"is no draft \(no begin\)"),
        (check_guide, PromptLookup, r"is no guide \(no neutral, apply\)"),
        (check_accept, "greedy", r"'greedy' is no function"),
    ],
)
def test_what_makes_no_part_of_the_kind_is_refused(check, given, message):
    with pytest.raises(OptionError, match=message):
        check(given)


def test_what_makes_no_adapter_is_refused():
    model, (ids, mask) = Table(5), left_pad([[1, 2], [3]])
    with pytest.raises(OptionError, match=r"is no adapter \(no model, vocab"):
        check_adapter(lambda model: object(), model, ids, mask)
