"""Late fusion: closed forms, candidates, and the two-model loop against full passes."""

import pytest
import torch

from mmdecode import Decoder, generate
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.source import Source
from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import InputError, OptionError
from mmdecode.guide.fusion import ACOUSTIC, Shallow, Static, second_model
from mmdecode.guide.uadf import UADF
from mmdecode.testing import check_guide
from tests.support import tiny_models
from tests.support.target_logits import context, distribution
from tests.support.tiny import whisper_model

BRANCH = BranchSpec(name=ACOUSTIC)
SALTED = BranchSpec(name=ACOUSTIC, transform="salt", transform_options={"by": 9})
V = 40


def draws(rows=200, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(2, rows, V, generator=generator)


# Closed forms


def one_hot(tokens):
    return torch.full((len(tokens), V), -torch.inf).scatter(1, tokens[:, None], 0.0)


def test_a_certain_main_model_decides_alone():
    main, acoustic = draws()
    certain = one_hot(main.argmax(-1))
    assert torch.equal(distribution(UADF(BRANCH), certain, acoustic).argmax(-1), main.argmax(-1))


def test_a_second_model_that_knows_nothing_changes_no_choice():
    main, _ = draws()
    for guide in (UADF(BRANCH), Static(BRANCH), Shallow(BRANCH)):
        found = distribution(guide, main, torch.zeros_like(main))
        assert torch.equal(found.argmax(-1), main.argmax(-1))


def test_a_main_model_that_knows_nothing_follows_the_second():
    main, acoustic = draws()
    found = distribution(UADF(BRANCH), torch.zeros_like(main), acoustic)
    assert torch.equal(found.argmax(-1), acoustic.argmax(-1))


def test_the_second_model_decides_only_where_the_margin_is_below_the_weight():
    main, acoustic = draws(4000, scale=1.5)
    guide = UADF(BRANCH)
    weight = guide.weight(main.log_softmax(-1))[:, 0]
    assert weight.min() >= 0 and weight.max() < 0.5
    first, second = main.softmax(-1).topk(2).values.unbind(-1)
    changed = distribution(guide, main, acoustic).argmax(-1) != main.argmax(-1)
    assert not (changed & (first - second >= weight)).any()
    assert changed.float().mean() > 0.1


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "guide",
    [
        UADF(SALTED, beta=1.0),
        UADF(SALTED, beta=1.5),
        UADF(SALTED, beta=0.5, scale=0.0),
        Static(SALTED, weight=0.0, main_temperature=3.0),
        Shallow(SALTED, weight=0.0),
    ],
    ids=lambda guide: type(guide).__name__,
)
def test_without_weight_the_model_decodes_bit_for_bit(guide):
    assert guide.neutral
    check_guide(lambda: UADF(SALTED), neutral=lambda: guide)


def test_a_weight_that_falls_below_zero_is_none():
    main, acoustic = draws()
    guide = UADF(BRANCH, beta=0.8)
    weight = guide.weight(main.log_softmax(-1))
    silent = weight[:, 0] == 0
    assert silent.any() and not guide.neutral
    found = distribution(guide, main, acoustic)
    torch.testing.assert_close(found[silent], main.log_softmax(-1)[silent], atol=0, rtol=0)


@pytest.mark.parametrize("guide", [UADF(BRANCH), Static(BRANCH), Shallow(BRANCH)])
def test_tokens_that_are_ruled_out_make_nothing_nan(guide):
    main, acoustic = draws(50)
    main[:, ::2] = -torch.inf
    acoustic[:, ::3] = -torch.inf
    acoustic[7] = -torch.inf  # a position at which the second model says nothing at all
    found = distribution(guide, main, acoustic)
    assert not found.isnan().any()
    torch.testing.assert_close(found[7], main[7].log_softmax(-1))
    if isinstance(guide, Shallow):
        assert (found[:7, ::3] == -torch.inf).all()
    else:
        torch.testing.assert_close(found.exp().sum(-1), torch.ones(50))
        assert (found[:, 0] == -torch.inf).all()  # neither allows it


def test_each_fusion_is_its_formula():
    main, acoustic = draws(20)
    p, q = (main / 2).softmax(-1), (acoustic / 0.5).softmax(-1)
    heat = {"main_temperature": 2.0, "acoustic_temperature": 0.5}
    found = distribution(Static(BRANCH, weight=0.7, **heat), main, acoustic)
    torch.testing.assert_close(found.exp(), (p + 0.7 * q) / 1.7)
    found = distribution(Shallow(BRANCH, weight=0.7, **heat), main, acoustic)
    torch.testing.assert_close(found.softmax(-1), (p * q**0.7) / (p * q**0.7).sum(-1, keepdim=True))
    w = (4 * torch.special.entr(p).sum(-1, keepdim=True)).sigmoid() - 0.6
    found = distribution(UADF(BRANCH, beta=0.6, scale=4.0, **heat), main, acoustic)
    torch.testing.assert_close(found.exp(), (p + w * q) / (1 + w))


# Candidates


def sparse(guide, main, candidates, values):
    scores = {
        "main": BranchOutput(logits=main[:, None]),
        ACOUSTIC: BranchOutput(logits=values[:, None], candidates=candidates[:, None]),
    }
    call = context(len(main))
    return guide.apply(None, call, Proposal.empty(len(main), call.device), scores)[:, 0]


def test_tokens_that_are_no_candidates_keep_the_main_score_or_are_excluded():
    main, acoustic = draws(30)
    best = main.topk(5).indices
    candidates = best.clone()
    candidates[:, 3] = -1  # has no text
    candidates[0] = -1  # nor has any other there
    values = acoustic.gather(1, best)
    p = main.softmax(-1)
    q = torch.zeros_like(p)
    kept = [0, 1, 2, 4]
    q[1:] = q[1:].scatter(1, best[1:][:, kept], values[1:][:, kept].softmax(-1))
    w = torch.full((30, 1), 0.5)
    w[0] = 0.0
    found = sparse(Static(BRANCH, weight=0.5), main, candidates, values)
    torch.testing.assert_close(found.exp(), (p + w * q) / (1 + w))
    found = sparse(Shallow(BRANCH, weight=0.5), main, candidates, values)
    assert torch.equal(found[1:] > -torch.inf, q[1:] > 0)
    torch.testing.assert_close(found[0], main[0].log_softmax(-1))


def test_an_unused_candidate_takes_nothing_from_token_zero():
    main = torch.zeros(1, V)
    candidates = torch.tensor([[0, 7, -1]])
    found = sparse(Shallow(BRANCH, weight=1.0), main, candidates, torch.tensor([[2.0, 1.0, 9.0]]))
    assert found.argmax() == 0 and (found > -torch.inf).sum() == 2


# The loop of two models


@pytest.fixture(scope="module")
def pair():
    """A recogniser, and a causal model of the same vocabulary."""
    recogniser = whisper_model(seed=4)
    language = tiny_models.llama(
        seed=5,
        vocab_size=recogniser.config.vocab_size,
        intermediate_size=32,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return recogniser, language


@pytest.fixture(scope="module")
def features(pair):
    config = pair[0].config
    generator = torch.Generator().manual_seed(6)
    shape = (3, config.num_mel_bins, 2 * config.max_source_positions)
    return torch.randn(*shape, generator=generator)


PROMPT = (3, 5)
TEXTS = torch.tensor([[7, 8, 9], [2, 11, 12], [4, 4, 6]])


@torch.no_grad()
def full_passes(pair, features, row, guide, count, ids=None):
    """Greedy tokens by full passes of both models for every token."""
    recogniser, language = pair
    new = []
    for _ in range(count):
        text = torch.cat([TEXTS[row], torch.tensor(new, dtype=torch.long)])[None]
        main = language(text).logits[:, -1]
        own = [ids[token] for token in new] if ids is not None else new
        acoustic_logits = recogniser(
            input_features=features[row : row + 1],
            decoder_input_ids=torch.tensor([[*PROMPT, *own]]),
        ).logits[:, -1]
        if ids is not None:
            acoustic_logits = acoustic_logits[:, ids]
        new.append(int(distribution(guide, main, acoustic_logits).argmax()))
    return new


def fused(pair, features, spec, rows=(0, 1, 2), draft=None, kind=UADF, count=10):
    decoder = Decoder(draft, kind(spec))
    rows = list(rows)
    out = generate(
        pair[1],
        input_ids=TEXTS[rows],
        attention_mask=torch.ones_like(TEXTS[rows]),
        mm_inputs={"input_features": features[rows]},
        decoder=decoder,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    return out[:, 3:].tolist(), decoder


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [UADF, Static, Shallow])
def test_both_caches_say_what_full_passes_say(pair, features, kind):
    found, _ = fused(pair, features, second_model(pair[0], PROMPT), kind=kind)
    expected = [full_passes(pair, features, row, kind(BRANCH), 10) for row in range(3)]
    assert found == expected
    assert len({tuple(row) for row in found}) == 3
    alone = full_passes(pair, features, 0, UADF(BRANCH, beta=1.0), 10)
    assert found[0] != alone, "the second model has no say"


def test_drafts_and_batches_change_no_token(pair, features):
    spec = second_model(pair[0], PROMPT)
    plain, _ = fused(pair, features, spec)
    for draft in (PromptLookup(), Source(ids=[[*row[:6], 0, *row[6:]] for row in plain])):
        found, decoder = fused(pair, features, spec, draft=draft)
        assert found == plain
    assert decoder.stats.accepted > 0
    for row in range(3):
        assert fused(pair, features, spec, rows=[row])[0] == [plain[row]]


def test_ids_are_carried_over_to_a_vocabulary_in_another_order(pair, features):
    vocab = pair[0].config.vocab_size
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(8))
    found, _ = fused(pair, features, second_model(pair[0], PROMPT, ids), draft=PromptLookup())
    expected = [full_passes(pair, features, row, UADF(BRANCH), 10, ids) for row in range(3)]
    assert found == expected


def test_a_call_without_audio_or_with_too_little_is_refused(pair, features):
    spec = second_model(pair[0], PROMPT)
    for given in ({}, {"input_features": features[:2]}):
        with pytest.raises(InputError, match="one for each of the 3 rows"):
            generate(
                pair[1],
                input_ids=TEXTS,
                mm_inputs=given,
                decoder=Decoder(guide=UADF(spec)),
                max_new_tokens=3,
            )


def test_another_vocabulary_is_refused(pair, features):
    spec = second_model(whisper_model(), PROMPT, torch.arange(7))
    with pytest.raises(OptionError, match="vocabulary of 7"):
        fused(pair, features, spec)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: UADF(BRANCH, beta=-0.1), "beta"),
        (lambda: UADF(BRANCH, scale=-1), "scale"),
        (lambda: Static(BRANCH, weight=-1), "weight"),
        (lambda: Shallow(BRANCH, acoustic_temperature=0), "acoustic_temperature"),
        (lambda: Static(BranchSpec(name="other")), "acoustic"),
    ],
)
def test_values_out_of_range_are_refused(make, match):
    with pytest.raises(OptionError, match=match):
        make()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [UADF, Static, Shallow])
def test_the_distribution_depends_on_each_prefix_alone(kind):
    check_guide(lambda: kind(SALTED))
