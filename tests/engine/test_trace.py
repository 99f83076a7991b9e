"""The effect of a guide in a trace: the same for every token, however it was drafted."""

import math

import pytest
import torch

import mmdecode
from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.attention import AttentionEdit
from mmdecode.engine.contracts import StateEdit
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.guide.linear import Linear, generated
from mmdecode.testing import drafts
from tests.conformance.test_edits import Edited, doubled
from tests.support.tiny_vlm import NEW, vision_inputs, vision_model
from tests.support.traced import Traced

BETA = 0.05
OTHER = BranchSpec(name="other", transform="no_image")


def noisy(values, draw):
    return values + torch.randn(values.shape, generator=draw)


def contrast():
    spec = BranchSpec(name="noisy", transform="pixels", transform_options={"change": noisy})
    return Linear.contrast(spec, 1.0, BETA)


def recorded(guide, draft=None):
    decoder = Traced(draft, guide, seed=1)
    output = mmdecode.generate(
        vision_model("llava"),
        decoder=decoder,
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **vision_inputs("llava"),
    )
    return output, decoder.trace


def test_every_token_has_its_step():
    output, trace = recorded(contrast())
    main = torch.stack(output.logits, 1)
    for row, rounds in enumerate(trace):
        steps = [step for r in rounds for step in r.steps]
        assert len(steps) == NEW
        own = main[row].softmax(-1)
        expected = (own >= BETA * own.amax(-1, keepdim=True)).sum(-1).tolist()
        assert [step.survivors for step in steps] == expected
        tokens = output.sequences[row, -NEW:]
        differ = (main[row].argmax(-1) != tokens).tolist()
        assert [step.changed for step in steps] == differ
        if row == 1:  # without an image
            assert all(step.distances["noisy"] == pytest.approx(0, abs=1e-5) for step in steps)
        else:  # the contrast lives on after the first token
            assert all(step.distances["noisy"] > 0.1 for step in steps)
    assert any(step.changed for rounds in trace for r in rounds for step in r.steps)


def test_a_draft_changes_no_step():
    output, plain = recorded(contrast())
    known = drafts.Known(output.sequences[:, -NEW:].tolist(), length=4, wrong_at=[2, 9])
    _, drafted = recorded(contrast(), known)
    for one, two in zip(plain, drafted, strict=True):
        assert len(two) < len(one)
        a, b = ([s for r in rounds for s in r.steps] for rounds in (one, two))
        assert [(s.survivors, s.changed) for s in a] == [(s.survivors, s.changed) for s in b]
        for s, t in zip(a, b, strict=True):
            assert s.distances["noisy"] == pytest.approx(t.distances["noisy"], abs=1e-4)


def test_the_opening_holds_every_branch_before_the_cut():
    output, trace = recorded(contrast())
    for row, rounds in enumerate(trace):
        opening = rounds[0].opening
        assert set(opening) == {"main", "noisy", "guided"}
        assert torch.allclose(opening["main"], output.logits[0][row], atol=1e-5)
        assert torch.allclose(opening["guided"], 2 * opening["main"] - opening["noisy"], atol=1e-4)
        assert not math.isinf(float(opening["guided"].min()))
        assert all(r.opening is None for r in rounds[1:])


def test_without_a_guide_there_is_the_main_branch_alone():
    _, trace = recorded(None)
    assert set(trace[0][0].opening) == {"main", "guided"}
    assert all(r.steps == () for r in trace[0])


class Rising(Linear):
    """S differs by position: 1 for the first token, then 2, 3, ..."""

    def totals(self, constants, call, proposal, outputs):
        return generated(call, proposal) + 1.0


class Second(drafts.Known):
    """Proposes a wrong token, and next to it two that follow each other and are right."""

    def draft(self, call, budget):
        right = super().draft(call, budget).tokens
        wrong = ((right[:, :1] + 1) % self.vocab).masked_fill(right[:, :1] < 0, -1)
        tokens = torch.cat([wrong, right], 1)
        return Proposal(tokens=tokens, kind="deterministic", tree=Tree((-1, -1, 1)))


def test_every_step_has_the_sum_of_the_weights():
    def totals(guide, draft=None):
        output, trace = recorded(guide, draft)
        found = [[step.total for r in rounds for step in r.steps] for rounds in trace]
        return output, found

    assert totals(Linear([], [4.0], BETA))[1] == [[4.0] * NEW] * 3
    output, rising = totals(Rising([], [2.0]))
    assert rising == [[1.0 + index for index in range(NEW)]] * 3
    known = drafts.Known(output.sequences[:, -NEW:].tolist(), length=4, wrong_at=[2, 9])
    assert totals(Rising([], [2.0]), known)[1] == rising
    assert totals(Rising([], [2.0]), Second(known.rows.tolist(), 2))[1] == rising
    assert totals(Edited(AttentionEdit(branch="main", scores=doubled)))[1] == [[None] * NEW] * 3


@pytest.mark.parametrize(
    ("guide", "known"),
    [
        (Edited(AttentionEdit(branch="main", scores=doubled)), False),
        (Edited(StateEdit(branch="main", change=lambda layer, states, earlier: states)), False),
        (
            Edited(branches=[BranchSpec(name="edited", stage=2, replaces_after_prefill="main")]),
            False,
        ),
        (Edited(AttentionEdit(branch="other", scores=doubled), branches=[OTHER]), True),
    ],
    ids=["attention", "states", "replaced", "another branch's"],
)
def test_what_the_model_itself_would_say_is_unknown_where_its_branch_is_edited(guide, known):
    _, trace = recorded(guide)
    steps = [step for rounds in trace for r in rounds for step in r.steps]
    assert steps and all((step.changed is not None) == known for step in steps)
