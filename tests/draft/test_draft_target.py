"""The target of drafters that run the same model or another: the guide and warp of the plan."""

from dataclasses import replace

import pytest
import torch

from mmdecode.draft.amateur import Amateur
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.mirror import CacheCopyDrafter
from mmdecode.draft.sparse import Sparse
from mmdecode.engine.adapter import MAIN, BranchSpec
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.call import DraftTarget
from mmdecode.engine.contracts import Guide, Requirements, StateEdit
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import IncompatibleError
from mmdecode.guide.guidance import Guidance
from mmdecode.guide.linear import Linear
from mmdecode.testing.table import Table, TableAdapter, call_of
from tests.draft.test_kangaroo import table_draft

MODEL = Table(5, seed=3)
OTHER = Table(5, seed=8)
ONE_BRANCH = {
    "amateur": lambda: Amateur(3, transform=None, prompt="last_token"),
    "copy": lambda: CacheCopyDrafter(3),
    "sparse": lambda: Sparse(length=3),
    "layer_skip": lambda: LayerSkip(exit_layer=1, length=3),
    "kangaroo": lambda: table_draft(5),
}


def sharp(logits):
    return logits * 5


GUIDE = Guidance(2.5)
BOTH = {"guide": GUIDE, "warp": sharp}


class Edited(Guide):
    edits = (StateEdit(branch="main", change=lambda layer, states, earlier: states),)


class Early(Guide):
    def needs(self, adapter):
        return Requirements(early_exit_logits=frozenset({0}))


def drafted(draft, guide=None, warp=None):
    """A session after the first token, and the log-probabilities of its first proposal."""
    call = call_of([[1, 2, 3], [0, 4]], TableAdapter(MODEL))
    main = ModelRunner(call.plan.adapter, [MAIN], Requirements(text_attention=True))
    prefill = main.prefill(call, {})["main"]
    target = DraftTarget(guide=guide, warp=warp)
    call = replace(call, plan=replace(call.plan, kind="iid", main=main, draft_target=target))
    call.rows.ids[:, 3] = 1
    call.rows.length += 1
    session = draft.begin(call, prefill)
    session.observe(Proposal.empty(2, call.device), prefill, None)
    return session, session.propose(3).log_q


@pytest.mark.parametrize("options", [{"guide": GUIDE}, {"warp": sharp}, BOTH], ids=sorted)
def test_an_assistant_follows_the_plan_as_it_follows_its_own_options(options):
    session, found = drafted(Assistant(OTHER, 3), **options)
    _, expected = drafted(Assistant(OTHER, 3, **options))
    assert torch.equal(found, expected)
    assert not torch.equal(found, drafted(Assistant(OTHER, 3))[1])
    assert session.unguided is None


def test_an_assistants_own_options_win():
    own = Assistant(OTHER, 3, Guidance(0.5), lambda logits: logits / 2)
    assert torch.equal(drafted(own, **BOTH)[1], drafted(own)[1])


@pytest.mark.parametrize("name", ONE_BRANCH)
def test_a_drafter_with_one_branch_is_warped_and_not_guided(name):
    make = ONE_BRANCH[name]
    plain, warped = drafted(make())[1], drafted(make(), warp=sharp)[1]
    # tokens may differ after the first, since they are sampled
    assert torch.equal(warped[:, 0], sharp(plain[:, 0]))
    assert torch.equal(drafted(make(), **BOTH)[1], warped)


UNGUIDED = {
    "a transform that is not offered": (
        Linear([BranchSpec(name="n", transform="noise")], [2, -1]),
        "noise",
    ),
    "another model": (Linear([BranchSpec(name="n", model=OTHER)], [2, -1]), "branches of its own"),
    "an edit": (Edited(), "inside the model"),
    "exits": (Early(), "more than logits"),
}


@pytest.mark.parametrize("reason", UNGUIDED)
def test_a_guide_that_an_assistant_cannot_follow_is_left_out_and_the_warp_is_not(reason):
    guide, says = UNGUIDED[reason]
    session, found = drafted(Assistant(OTHER, 3), guide, sharp)
    assert says in session.unguided
    assert torch.equal(found, drafted(Assistant(OTHER, 3), None, sharp)[1])


def test_a_guide_of_its_own_that_an_assistant_cannot_follow_is_refused():
    guide, _ = UNGUIDED["a transform that is not offered"]
    with pytest.raises(IncompatibleError, match="noise"):
        drafted(Assistant(OTHER, 3, guide))
