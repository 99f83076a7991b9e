"""Tier B: sampled sequences, counted whole, have the distribution that enumeration gives."""

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as lp

from mmdecode.accept.ensemble import Ensemble
from mmdecode.accept.rejection import Rejection, residual
from mmdecode.accept.relative_threshold import RelativeThreshold
from mmdecode.accept.typical import Typical, threshold
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.engine.proposal import Tree
from mmdecode.guide.cfg import CFG
from mmdecode.testing import drafts
from mmdecode.testing.checks import (
    PROMPTS,
    assert_distribution,
    bigram,
    distribution_of,
    exact_joint,
    p_value,
    run_rows,
)
from mmdecode.testing.table import Table, decode
from tests.exactness.windows import window

MODEL = Table(4, seed=11, sharpness=1.5)
TREE = Tree((-1, -1, 0, 0, 2))
warm = pytest.fixture(lambda: lambda: [lp.TemperatureLogitsWarper(0.6), lp.TopKLogitsWarper(3)])


def cfg_distribution(prompt, new):
    conditional = MODEL.target_logits([*prompt, *new]).log_softmax(-1)
    unconditional = MODEL.target_logits([prompt[-1], *new]).log_softmax(-1)
    return 2.0 * (conditional - unconditional) + unconditional


GUIDES = {
    "none": (lambda: None, distribution_of(MODEL)),
    "cfg": (lambda: CFG(2.0), cfg_distribution),
}
Q = bigram(4)


def chain(kind, ragged=False):
    return drafts.Bigram(Q, kinds=(kind,), ragged=ragged)


def siblings(kind, widths=(3, 2), ragged=False):
    return drafts.Siblings(Q, widths, (kind,), ragged)


PAIRS = {
    "coupled-coupled_chain": ("coupled", lambda: chain("coupled")),
    "coupled-tree": ("coupled", lambda: drafts.Random(TREE)),
    "sample_match-chain": ("sample_match", lambda: chain("deterministic")),
    "sample_match-tree": ("sample_match", lambda: drafts.Random(TREE, ragged=True)),
    "rejection-chain": ("rejection", lambda: chain("iid")),
    "rejection-ragged_chain": ("rejection", lambda: chain("iid", ragged=True)),
    "rejection-iid_tree": ("rejection", lambda: siblings("iid")),
    "rejection-wor_tree": ("rejection", lambda: siblings("without_replacement")),
    "rejection-ragged_tree": ("rejection", lambda: siblings("without_replacement", ragged=True)),
}


@pytest.mark.one_in(18)
@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_joint_distribution_is_that_of_enumeration(pair, guide):
    accept, draft = PAIRS[pair]
    make, distribution = GUIDES[guide]
    assert_distribution(lambda: Decoder(draft(), make(), accept), MODEL, distribution)


@pytest.mark.parametrize("pair", ["sample_match-chain", "rejection-chain"])
def test_the_joint_distribution_holds_after_warpers(pair, warm):
    accept, draft = PAIRS[pair]
    distribution = distribution_of(MODEL)
    assert_distribution(
        lambda: Decoder(draft(), None, accept), MODEL, distribution, processors=warm
    )


def test_an_assistant_draws_what_it_claims():
    other = Table(4, seed=2, sharpness=1.0)
    make = lambda: Decoder(Assistant(other, 2), accept="rejection")  # noqa: E731
    assert_distribution(make, MODEL, distribution_of(MODEL), rows=5_000)


class RowTrees(drafts.Siblings):
    """The same trees as every row's own."""

    def draft(self, call, budget):
        proposal = super().draft(call, budget)
        parents = torch.tensor(self.tree.parents).expand(call.batch, -1)
        return replace(proposal, tree=None, parents=parents)


def test_trees_of_a_rows_own_keep_the_distribution():
    make = lambda: Decoder(RowTrees(Q, (2, 2)), accept="rejection")  # noqa: E731
    assert_distribution(make, MODEL, distribution_of(MODEL), samples=20_000)


def accepted(p, q, count, kind):
    """Probability that one of ``count`` siblings is kept, by enumeration of their draws."""
    if count == 0:
        return 0.0
    total = 0.0
    for x in range(len(q)):
        if q[x] == 0:
            continue
        keep = min(1.0, float(p[x] / q[x]))
        rest = (p - q).clamp_min(0)
        rest = rest / rest.sum() if rest.sum() > 0 else p
        less = q.clone()
        if kind == "without_replacement":
            less[x] = 0
            less = less / less.sum() if less.sum() > 0 else less
        total += float(q[x]) * (keep + (1 - keep) * accepted(rest, less, count - 1, kind))
    return total


@pytest.mark.one_in(2)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", ["iid", "without_replacement"])
def test_siblings_are_accepted_as_often_as_enumeration_says(kind, count):
    rows, prompt = 20_000, [1, 0, 2]
    decoder = Decoder(siblings(kind, (count,)), accept="rejection", seed=9)
    ids = torch.tensor([prompt]).repeat(rows, 1)
    decode(MODEL, ids, decoder, do_sample=True, max_new_tokens=3, request=range(rows))
    first = MODEL.target_logits(prompt).double().softmax(-1)
    q = Q.double().softmax(-1)
    p = torch.stack([MODEL.target_logits([*prompt, t]).double().softmax(-1) for t in range(4)])
    expected = sum(float(first[t]) * accepted(p[t], q[t], count, kind) for t in range(4))
    sigma = (expected * (1 - expected) / rows) ** 0.5
    assert abs(decoder.stats.accepted / rows - expected) < 4 * sigma


# The ensemble rule has a distribution of its own


def ensemble_joint(prompt, length, weight, drafted, distribution):
    """All sequences under an ensemble with chains of ``drafted`` tokens from the table q."""
    q_table = Q.double().softmax(-1)

    def below(new, done):  # done: accepted so far in this round; it ends with a token of p
        p = distribution(prompt, new).double().softmax(-1)
        if not new or done == drafted or len(new) == length - 1:
            kept, leftover = torch.zeros_like(p), p  # the last position has no room for a draft
        else:
            q = q_table[new[-1]]
            v = weight * p + (1 - weight) * q
            kept, leftover = torch.minimum(v, q), (v - q).clamp_min(0)
        if len(new) == length - 1:
            return leftover
        return torch.stack(
            [
                kept[t] * below([*new, t], done + 1) + leftover[t] * below([*new, t], 0)
                for t in range(4)
            ]
        )

    return below([], 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("weight", "drafted"), [(0.5, 1), (0.7, 2)])
def test_the_ensemble_rule_follows_its_own_distribution(weight, drafted):
    joint = ensemble_joint([1, 0, 2], 5, weight, drafted, distribution_of(MODEL))
    assert float(joint.sum()) == pytest.approx(1)
    make = lambda: Decoder(drafts.Bigram(Q, drafted, ("iid",)), accept=Ensemble(weight))  # noqa: E731
    options = {"length": 5, "samples": 20_000}
    assert_distribution(make, MODEL, distribution_of(MODEL), joint=joint, **options)
    plain = lambda: Decoder(drafts.Bigram(Q, drafted, ("iid",)), accept="rejection")  # noqa: E731
    with pytest.raises(AssertionError, match="another distribution"):
        assert_distribution(plain, MODEL, distribution_of(MODEL), joint=joint, **options)
    with pytest.raises(AssertionError, match="another distribution"):
        assert_distribution(make, MODEL, distribution_of(MODEL), **options)


def test_an_ensemble_of_siblings_has_its_distribution_where_it_drafts():
    weight, prompt = 0.6, [1, 0, 2]
    first = MODEL.target_logits(prompt).double().softmax(-1)
    p = torch.stack([MODEL.target_logits([*prompt, t]).double().softmax(-1) for t in range(4)])
    second = weight * p + (1 - weight) * Q.double().softmax(-1)
    third = [
        [MODEL.target_logits([*prompt, a, b]).double().softmax(-1) for b in range(4)]
        for a in range(4)
    ]
    joint = (first[:, None] * second)[..., None] * torch.stack([torch.stack(r) for r in third])
    for kind in ("iid", "without_replacement"):
        make = lambda kind=kind: Decoder(siblings(kind, (3,)), accept=Ensemble(weight))  # noqa: E731
        options = {"length": 3, "samples": 20_000, "joint": joint}
        assert_distribution(make, MODEL, distribution_of(MODEL), **options)


def test_an_ensemble_of_the_target_alone_is_plain_rejection():
    found = [
        run_rows(Decoder(siblings("iid"), accept=rule, seed=3), MODEL, PROMPTS, do_sample=True)
        for rule in (Ensemble(1.0), Rejection())
    ]
    assert found[0] == found[1]


# The relative threshold


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("processors", [(), ("unknown",)], ids=["known", "unknown"])
def test_a_judge_that_wants_the_whole_share_is_neutral(do_sample, processors):
    options = {"do_sample": do_sample, "max_new_tokens": 30}
    for draft in (drafts.RandomTrees(), drafts.FullTree(2), drafts.Random()):
        made = [Seen() for _ in processors]
        decoder = Decoder(draft, accept=RelativeThreshold(share=1.0), seed=1)
        found = run_rows(decoder, MODEL, PROMPTS, **options, processors=made)
        made = [Seen() for _ in processors]
        assert found == run_rows(Decoder(seed=1), MODEL, PROMPTS, **options, processors=made)


def test_a_judge_keeps_exactly_what_exceeds_its_share():
    for token, share in itertools.product(range(4), (0.0, 0.3, 0.6, 0.9)):
        decoder = Decoder(drafts.Constant(token, length=1), accept=RelativeThreshold(share))
        [row] = run_rows(decoder, MODEL, [[1, 2]], max_new_tokens=3)
        p = MODEL.target_logits([1, 2, row[0]]).softmax(-1)
        kept = bool(p[token] > share * p.max()) or token == int(p.argmax())
        assert decoder.stats.accepted == kept


class Seen(LogitsProcessor):
    """Of unknown type: leaves the scores alone and notes each row's new tokens."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes += input_ids.tolist()
        return scores


@pytest.mark.parametrize("rule", [Typical, RelativeThreshold])
def test_a_rule_that_tests_every_node_gives_unknown_processors_what_passes_alone(rule):
    options = {"max_new_tokens": 12}
    known = run_rows(Decoder(drafts.RandomTrees(), accept=rule()), MODEL, PROMPTS, **options)
    seen = Seen()
    options["processors"] = [seen]
    found = run_rows(Decoder(drafts.RandomTrees(), accept=rule()), MODEL, PROMPTS, **options)
    assert found == known
    never = rule(epsilon=1.0, delta=1e9) if rule is Typical else rule(share=1.0)
    seen.prefixes.clear()
    draft = drafts.Constant(0, length=6)
    [row] = run_rows(Decoder(draft, accept=never), MODEL, PROMPTS[:1], **options)
    start = len(PROMPTS[0])
    assert all(prefix[start:] == row[: len(prefix) - start] for prefix in seen.prefixes)


@pytest.mark.parametrize("tail", ["redraw", "coupled"])
def test_a_jacobi_window_under_membership_keeps_the_distribution(tail):
    make = lambda: Decoder(window(3, tail), accept="sample_match")  # noqa: E731
    assert_distribution(make, MODEL, distribution_of(MODEL))


def test_a_jacobi_tail_is_judged_by_its_recorded_distribution():
    make = lambda: Decoder(window(3, "redraw", ("iid",)), accept="rejection")  # noqa: E731
    assert_distribution(make, MODEL, distribution_of(MODEL))


def test_one_draft_token_is_accepted_with_the_overlap_of_the_distributions():
    rows = 40_000
    prompt = [1, 0, 2]
    ids = torch.tensor([prompt]).repeat(rows, 1)
    draft = drafts.Bigram(Q, length=1, kinds=("iid",))
    decoder = Decoder(draft, accept="rejection", seed=9)
    decode(MODEL, ids, decoder, do_sample=True, max_new_tokens=3, request=range(rows))
    # of the first scoring pass alone: token 2, given every token 1
    first = MODEL.target_logits(prompt).double().softmax(-1)
    p = torch.stack([MODEL.target_logits([*prompt, t]).double().softmax(-1) for t in range(4)])
    overlap = torch.minimum(p, Q.double().softmax(-1)).sum(-1)
    expected = float(first @ overlap)
    accepted = decoder.stats.accepted  # the second pass has no room for a draft
    assert decoder.stats.drafted == rows
    sigma = (expected * (1 - expected) / rows) ** 0.5
    assert abs(accepted / rows - expected) < 4 * sigma


def test_a_coupled_draft_is_accepted_as_its_closed_form_says():
    rows = 10_000
    prompt = [1, 0, 2]
    ids = torch.tensor([prompt]).repeat(rows, 1)
    decoder = Decoder(drafts.Bigram(Q, length=1, kinds=("coupled",)), seed=9)
    decode(MODEL, ids, decoder, do_sample=True, max_new_tokens=3, request=range(rows))
    first = MODEL.target_logits(prompt).double().softmax(-1)
    p = torch.stack([MODEL.target_logits([*prompt, t]).double().softmax(-1) for t in range(4)])
    q = Q.double().softmax(-1)
    worst = torch.maximum(p[:, None] / p[..., None], q[:, None] / q[..., None]).sum(-1)
    expected = float(first @ (1 / worst).sum(-1))
    sigma = (expected * (1 - expected) / rows) ** 0.5
    assert abs(decoder.stats.accepted / rows - expected) < 4 * sigma


def test_the_residual_is_the_positive_part_renormalised():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    q = torch.tensor([[0.2, 0.4, 0.4], [0.2, 0.2, 0.6]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[1.0, 0, 0], [0.2, 0.2, 0.6]]))


def test_the_statistic_knows_right_from_wrong():
    exact = exact_joint(distribution_of(MODEL), [1, 0, 2], 3)
    assert float(exact.sum()) == pytest.approx(1)
    flat = exact.flatten()
    torch.manual_seed(0)
    right = [torch.multinomial(flat, 40_000, replacement=True).bincount(minlength=64)]
    assert 0.001 < p_value(right[0], exact) < 0.999
    tilted = (flat**1.05) / (flat**1.05).sum()
    wrong = torch.multinomial(tilted, 40_000, replacement=True).bincount(minlength=64)
    assert p_value(wrong, exact) < 1e-4
    forbidden = exact.clone()
    forbidden[0, 0, 0] = 0
    assert p_value(right[0], forbidden) == 0.0


def test_the_temperature_limit_is_greedy():
    cold = [lp.TemperatureLogitsWarper(1e-6)]
    single = [lp.TopKLogitsWarper(1)]
    expected = run_rows(Decoder(), MODEL, PROMPTS[:1])
    for processors in (cold, single):
        for pair in PAIRS.values():
            decoder = Decoder(pair[1](), accept=pair[0], seed=1)
            options = {"do_sample": True, "processors": processors}
            assert run_rows(decoder, MODEL, PROMPTS[:1], **options) == expected


# Typical acceptance is heuristic: its limits and its formula


def test_typical_without_a_threshold_keeps_every_draft():
    decoder = Decoder(drafts.Random(), accept=Typical(epsilon=0.0, delta=0.0), seed=1)
    run_rows(decoder, MODEL, PROMPTS, do_sample=True, max_new_tokens=21)
    assert decoder.stats.accepted == decoder.stats.drafted > 0
    assert decoder.stats.passes == 4  # 1 + 4 * 5 tokens


@pytest.mark.parametrize("do_sample", [False, True])
def test_typical_with_the_highest_threshold_is_neutral(do_sample):
    decoder = Decoder(drafts.FullTree(2), accept=Typical(epsilon=1.0, delta=1e9), seed=1)
    options = {"do_sample": do_sample}
    found = run_rows(decoder, MODEL, PROMPTS, **options)
    assert decoder.stats.accepted == 0
    assert found == run_rows(Decoder(seed=1), MODEL, PROMPTS, **options)


def test_the_typical_threshold_is_the_papers():
    p = torch.tensor([[0.7, 0.2, 0.1, 0.0], [0.25, 0.25, 0.25, 0.25]])
    entropy = -torch.xlogy(p, p).sum(-1)
    expected = torch.minimum(torch.tensor(0.09), 0.3 * (-entropy).exp())
    torch.testing.assert_close(threshold(p.log(), 0.09, 0.3), expected)
    assert float(threshold(p.log(), 0.09, 0.3)[1]) == pytest.approx(0.075)  # 0.3 / 4


def test_typical_keeps_exactly_what_passes_the_threshold():
    prompts = [[1, 2]]
    rule = Typical(epsilon=0.3, delta=0.9)
    for token in range(4):
        draft = drafts.Constant(token, length=1)
        decoder = Decoder(draft, accept=rule)
        [row] = run_rows(decoder, MODEL, prompts, max_new_tokens=3)
        p = MODEL.target_logits([1, 2, row[0]]).softmax(-1)
        entropy = -torch.xlogy(p, p).sum()
        kept = bool(p[token] > min(0.3, 0.9 * float((-entropy).exp())))
        assert decoder.stats.accepted == kept
