"""Tier B: sampled sequences, counted whole, have the law that enumeration gives."""

import pytest
import torch
from transformers.generation import logits_process as lp

from mmdecode.accept.exact import residual
from mmdecode.accept.typical import Typical, threshold
from mmdecode.draft.assistant import Assistant
from mmdecode.engine.decoder import Decoder
from mmdecode.engine.proposal import Tree
from mmdecode.guide.cfg import CFG
from mmdecode.testing import drafts
from mmdecode.testing.checks import (
    PROMPTS,
    assert_distribution,
    bigram,
    exact_joint,
    law_of,
    p_value,
    run_rows,
)
from mmdecode.testing.table import Table, decode

MODEL = Table(4, seed=11, sharpness=1.5)
TREE = Tree((-1, -1, 0, 0, 2))
warm = pytest.fixture(lambda: lambda: [lp.TemperatureLogitsWarper(0.6), lp.TopKLogitsWarper(3)])


def cfg_law(prompt, new):
    conditional = MODEL.law([*prompt, *new]).log_softmax(-1)
    unconditional = MODEL.law([prompt[-1], *new]).log_softmax(-1)
    return 2.0 * (conditional - unconditional) + unconditional


GUIDES = {"none": (lambda: None, law_of(MODEL)), "cfg": (lambda: CFG(2.0), cfg_law)}
Q = bigram(4)


def chain(kind, ragged=False):
    return drafts.Bigram(Q, kinds=(kind,), ragged=ragged)


PAIRS = {
    "coupled-coupled_chain": ("coupled", lambda: chain("coupled")),
    "coupled-tree": ("coupled", lambda: drafts.Random(TREE)),
    "membership-chain": ("membership", lambda: chain("deterministic")),
    "membership-tree": ("membership", lambda: drafts.Random(TREE, ragged=True)),
    "rejection-chain": ("rejection", lambda: chain("iid")),
    "rejection-ragged_chain": ("rejection", lambda: chain("iid", ragged=True)),
}


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_joint_law_is_that_of_enumeration(pair, guide):
    accept, draft = PAIRS[pair]
    make, law = GUIDES[guide]
    assert_distribution(lambda: Decoder(draft(), make(), accept), MODEL, law)


@pytest.mark.parametrize("pair", ["membership-chain", "rejection-chain"])
def test_the_joint_law_holds_behind_warpers(pair, warm):
    accept, draft = PAIRS[pair]
    law = law_of(MODEL)
    assert_distribution(lambda: Decoder(draft(), None, accept), MODEL, law, processors=warm)


def test_an_assistant_draws_what_it_claims():
    other = Table(4, seed=2, sharpness=1.0)
    make = lambda: Decoder(Assistant(other, 2), accept="rejection")  # noqa: E731
    assert_distribution(make, MODEL, law_of(MODEL), rows=5_000)


@pytest.mark.parametrize("tail", ["redraw", "coupled"])
def test_a_jacobi_window_under_membership_keeps_the_law(tail):
    make = lambda: Decoder(drafts.Jacobi(3, tail), accept="membership")  # noqa: E731
    assert_distribution(make, MODEL, law_of(MODEL))


def test_a_jacobi_tail_is_judged_by_its_recorded_law():
    make = lambda: Decoder(drafts.Jacobi(3, "redraw", ("iid",)), accept="rejection")  # noqa: E731
    assert_distribution(make, MODEL, law_of(MODEL))


def test_one_draft_token_is_accepted_with_the_overlap_of_the_laws():
    rows = 40_000
    prompt = [1, 0, 2]
    ids = torch.tensor([prompt]).repeat(rows, 1)
    draft = drafts.Bigram(Q, length=1, kinds=("iid",))
    decoder = Decoder(draft, accept="rejection", seed=9)
    decode(MODEL, ids, decoder, do_sample=True, max_new_tokens=3, request=range(rows))
    # of the first scoring pass alone: token 2, given every token 1
    first = MODEL.law(prompt).double().softmax(-1)
    p = torch.stack([MODEL.law([*prompt, t]).double().softmax(-1) for t in range(4)])
    overlap = torch.minimum(p, Q.double().softmax(-1)).sum(-1)
    expected = float(first @ overlap)
    accepted = decoder.stats.accepted  # the second pass has no room for a draft
    assert decoder.stats.drafted == rows
    sigma = (expected * (1 - expected) / rows) ** 0.5
    assert abs(accepted / rows - expected) < 4 * sigma


def test_a_coupled_draft_is_accepted_as_its_closed_form_says():
    rows = 40_000
    prompt = [1, 0, 2]
    ids = torch.tensor([prompt]).repeat(rows, 1)
    decoder = Decoder(drafts.Bigram(Q, length=1, kinds=("coupled",)), seed=9)
    decode(MODEL, ids, decoder, do_sample=True, max_new_tokens=3, request=range(rows))
    first = MODEL.law(prompt).double().softmax(-1)
    p = torch.stack([MODEL.law([*prompt, t]).double().softmax(-1) for t in range(4)])
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
    exact = exact_joint(law_of(MODEL), [1, 0, 2], 3)
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
        p = MODEL.law([1, 2, row[0]]).softmax(-1)
        entropy = -torch.xlogy(p, p).sum()
        kept = bool(p[token] > min(0.3, 0.9 * float((-entropy).exp())))
        assert decoder.stats.accepted == kept
