"""What a guide may look at, and that each way of looking elsewhere is refused or found."""

import functools

import pytest
import torch

from mmdecode.accept.ensemble import Ensemble
from mmdecode.accept.relative_threshold import RelativeThreshold
from mmdecode.accept.typical import Typical
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.errors import IncompatibleError
from mmdecode.guide.bias import Bias
from mmdecode.testing import check_guide, drafts
from mmdecode.testing.checks import (
    PROMPTS,
    SEED,
    assert_distribution,
    assert_lossless,
    bigram,
    run_rows,
)
from mmdecode.testing.table import Table
from tests.exactness import guides
from tests.exactness.test_distribution import ensemble_joint

MODEL = Table(5, seed=3, bias={0: 1.0, 4: -0.5})
SMALL = Table(4, seed=11, sharpness=1.5)
EXACT_GUIDES = pytest.mark.parametrize("name", guides.EXACT_GUIDES)
modes = pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])


@modes
@EXACT_GUIDES
def test_a_guide_gives_the_distribution_of_its_formula(name, do_sample):
    guide = guides.EXACT_GUIDES[name]
    for draft in (None, drafts.FullTree(2), drafts.RandomTrees()):
        decoder = Decoder(draft, guide(), seed=SEED)
        rows = assert_lossless(
            decoder, MODEL, guide.target_logits(MODEL), do_sample=do_sample, eos=[4]
        )
    plain = run_rows(Decoder(seed=SEED), MODEL, PROMPTS, do_sample=do_sample, eos=[4])
    assert rows != plain, "the guide does nothing"


@pytest.mark.one_in(3)
@EXACT_GUIDES
def test_a_guide_that_keeps_to_its_node_passes_the_public_check(name):
    check_guide(guides.EXACT_GUIDES[name])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pay", ["spread", "end"])
def test_words_are_favoured_whatever_is_drafted(pay):
    check_guide(
        functools.partial(guides.bias, pay),
        lambda: Bias(["ab"], 0.0, tokenizer=guides.Characters("a")),
    )
    check_guide(functools.partial(guides.bias, pay, guides.Against()))


@pytest.mark.parametrize("rule", [Typical, RelativeThreshold])
@EXACT_GUIDES
def test_a_rule_under_a_guide_stays_as_lossy_as_it_is(name, rule):
    for do_sample in (False, True):
        decoder = Decoder(drafts.RandomTrees(), guides.EXACT_GUIDES[name](), rule(), seed=SEED)
        rows = run_rows(decoder, MODEL, PROMPTS, do_sample=do_sample)
        assert all(len(row) == 12 and max(row) < 5 for row in rows)
        assert decoder.accept.guarantee == "lossy" and decoder.stats.accepted


@pytest.mark.one_in(4)
@EXACT_GUIDES
def test_an_ensemble_mixes_the_guided_distribution(name):
    guide = guides.EXACT_GUIDES[name]
    distribution = guide.target_logits(SMALL)
    joint = ensemble_joint([1, 0, 2], 4, 0.5, drafted=1, distribution=distribution)
    draft = drafts.Bigram(bigram(4), 1, ("iid",))
    make = lambda: Decoder(draft, guide(), Ensemble(0.5))  # noqa: E731
    assert make().accept.guarantee == "exact for the mixture"
    assert_distribution(make, SMALL, distribution, joint=joint, samples=10_000)


# What a round does not show


@pytest.mark.parametrize("draft", [None, "lookup", Assistant(MODEL)], ids=["none", "name", "part"])
@pytest.mark.parametrize("name", guides.REFUSED)
def test_a_guide_that_looks_elsewhere_is_refused(name, draft):
    guide = guides.REFUSED[name]
    with pytest.raises(IncompatibleError, match=rf"{guide.__name__} .* Decoder: .*looks {name},"):
        Decoder(draft, guide())


def test_a_refusal_names_both_directions():
    both = type("Both", (guides.LookBack,), {"lookback": True, "lookahead": True})
    with pytest.raises(IncompatibleError, match="looks back and ahead"):
        Decoder(guide=both())


class Hidden:
    """Says nothing of where it looks."""

    lookback = lookahead = False


class Back(Hidden, guides.LookBack):
    pass


class Ahead(Hidden, guides.LookAhead):
    pass


class Remembers(guides.Probe):
    """Keeps what the first call has shown."""

    first = None

    def apply(self, constants, call, proposal, outputs):
        main = outputs["main"].logits
        if self.first is None:
            self.first = main[:, :1]
        return main - 0.001 * self.first


class Counts(guides.Probe):
    """Cools down from round to round, which depends on how much a draft gets right."""

    def apply(self, constants, call, proposal, outputs):
        return outputs["main"].logits * (1 + 0.001 * call.rows.rounds[:, None, None])


class Together(guides.Probe):
    """Looks at the other rows."""

    def apply(self, constants, call, proposal, outputs):
        main = outputs["main"].logits
        return main - 0.001 * main[:, :1].mean(0)


class RootPath(guides.Penalty):
    """Counts what is committed and forgets what is drafted."""

    def above(self, proposal):
        return torch.zeros_like(super().above(proposal))


class RootStates(guides.Layers):
    """Reads the hidden state of the root for every node."""

    def apply(self, constants, call, proposal, outputs):
        main = outputs["main"]
        return main.logits - 0.5 * call.plan.adapter.head(main.hidden[1][:, :1])


class LateEdits(guides.Edited):
    """Leaves the prompt unedited: its keys and values are those of another model."""

    def prefill(self, call, earlier):
        return self.branches.prefill(call, earlier)


class FadingEdits(guides.Edited):
    """Edits while something is drafted."""

    def score(self, call, proposal, earlier):
        if proposal.size:
            return super().score(call, proposal, earlier)
        return self.branches.score(call, proposal, earlier)


def editing(scorer):
    branch = guides.BranchSpec(name="edited", build=scorer)
    return type("Editing", (guides.Edit,), {"branches": (branch,)})


@pytest.mark.parametrize(
    "guide",
    [Back, Ahead, Remembers, Counts, Together, RootPath, RootStates, editing(FadingEdits)],
    ids=lambda guide: guide.__name__,
)
def test_a_guide_that_looks_elsewhere_and_does_not_say_so_is_found(guide):
    with pytest.raises(AssertionError, match=r"the guide gives|the distribution at token"):
        check_guide(guide)


def test_an_edit_that_spares_the_prompt_is_found():
    guide = editing(LateEdits)
    with pytest.raises(AssertionError, match="plain loop"):
        assert_lossless(Decoder(None, guide()), MODEL, guide.target_logits(MODEL), do_sample=False)
