"""Choosing a hypothesis: agreement, language models, certainty."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from mmdecode.asr.correction import selection
from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.correction.selection import (
    TextScorer,
    expected_edits,
    highest,
    joined_scores,
    least_risk,
    most_certain,
    self_certainty,
)
from mmdecode.errors import InputError, OptionError, ShapeError, UnsupportedModelError
from tests.support import tiny_models

WORDS = [f"w{n}" for n in range(12)]
TEXTS = ["w1 w2 w3", "w4", "", "w1 w2 w3 w5 w6 w7 w8", "w9 w1", "w2 w2 w2 w2", "w4", "w11 w10"]


def tokenizer(**special):
    vocab = {name: n for n, name in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **special)


def llama():
    sizes = {"vocab_size": 15, "hidden_size": 16, "intermediate_size": 24}
    return tiny_models.llama(**sizes, initializer_range=0.6)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=15, n_embd=16, n_layer=2, n_head=2, initializer_range=0.6)
    return GPT2LMHeadModel(config)


BOTH = {"bos_token": "<s>", "eos_token": "</s>"}


# Agreement


def test_least_risk_by_hand():
    one = NBestList("u", ("a b c", "a b d", "a x d"))
    # d: 0-1 1, 0-2 2, 1-2 1
    assert expected_edits(one) == pytest.approx([1, 2 / 3, 1])
    choice = least_risk(one)
    assert (choice.index, choice.gain) == (1, pytest.approx(1 / 3))
    weighted = NBestList("u", one.hypotheses, (math.log(0.8), math.log(0.1), math.log(0.1)))
    assert expected_edits(weighted, "scores") == pytest.approx([0.3, 0.9, 1.7])
    assert least_risk(weighted, "scores").index == 0


def test_equal_hypotheses_vote_together():
    one = NBestList("u", ("a", "b", "b"))
    assert expected_edits(one) == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert least_risk(one).index == 1
    assert least_risk(NBestList("u", ("a", "b"))) == selection.Choice(0, 0.0)


def test_equal_scores_weigh_as_no_scores():
    texts = ("a b c", "a c", "b c d", "a c")
    plain = expected_edits(NBestList("u", texts))
    assert expected_edits(NBestList("u", texts, (-3.0,) * 4), "scores") == pytest.approx(plain)


def test_unknown_weights_and_missing_scores_are_refused():
    with pytest.raises(OptionError, match="uniform or scores"):
        least_risk(NBestList("u", ("a",)), "score")
    with pytest.raises(InputError, match="'u' has no scores"):
        least_risk(NBestList("u", ("a",)), "scores")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("abc"), max_size=4).map(" ".join), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_least_risk_is_the_least_and_does_not_hang_on_the_order(texts, random):
    one = NBestList("u", tuple(texts))
    risks = expected_edits(one)
    choice = least_risk(one)
    assert risks[choice.index] == pytest.approx(min(risks))
    assert choice.gain == pytest.approx(risks[0] - min(risks))
    order = list(range(len(texts)))
    random.shuffle(order)
    shuffled = expected_edits(NBestList("u", tuple(texts[index] for index in order)))
    assert shuffled == pytest.approx([risks[index] for index in order])


# Certainty


def test_self_certainty_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.25], [1 / 3] * 3]).log()
    first = -(math.log(0.5) + 2 * math.log(0.25)) / 3 - math.log(3)
    assert self_certainty(logits).item() == pytest.approx(first / 2)
    assert self_certainty(logits + 7).item() == pytest.approx(first / 2)
    assert self_certainty(logits, torch.tensor([True, False])).item() == pytest.approx(first)
    assert self_certainty(torch.zeros(2, 5, 9)).tolist() == pytest.approx([0, 0], abs=1e-6)


def test_the_most_certain_text_is_chosen_by_the_mean():
    flat, sharp = torch.zeros(4, 6), torch.eye(6)[:1] * 5
    assert most_certain([flat, sharp.expand(2, -1), sharp]).index == 1
    assert most_certain([sharp, sharp]).index == 0


def test_forbidden_tokens_make_certainty_infinite_and_are_refused():
    logits = torch.zeros(2, 4)
    logits[1, 0] = -math.inf
    with pytest.raises(OptionError, match="raw logits"):
        self_certainty(logits)
    assert self_certainty(logits, torch.tensor([True, False])).item() == pytest.approx(0, abs=1e-6)


# Language models


def by_hand(model, ids):
    """Log-probability of ids after the first, token by token."""
    total = 0.0
    for index in range(1, len(ids)):
        logits = model(torch.tensor([ids[:index]])).logits[0, -1].double()
        total += float(logits.log_softmax(-1)[ids[index]])
    return total


@pytest.mark.parametrize("build", [llama, gpt2])
def test_scores_are_those_of_the_model_alone(build):
    model = build().eval()
    words = tokenizer(**BOTH)
    with torch.inference_mode():
        alone = [by_hand(model, [0, *words(text)["input_ids"], 1]) for text in TEXTS]
    for size in (1, 3, 16):
        found = TextScorer(model, words, batch_size=size)(TEXTS)
        assert [one.total for one in found] == pytest.approx(alone, abs=1e-4)
    assert [one.tokens for one in found] == [len(text.split()) + 1 for text in TEXTS]
    assert found[0].mean == pytest.approx(alone[0] / 4, abs=1e-4)


def test_padding_and_other_texts_change_nothing():
    model, words = llama(), tokenizer(**BOTH)
    batched = TextScorer(model, words, batch_size=8)(TEXTS)
    single = TextScorer(model, words, batch_size=1)(TEXTS)
    assert [one.total for one in batched] == pytest.approx([o.total for o in single], abs=1e-5)


@pytest.mark.parametrize("mutant", ["left", "no end"])
def test_mutants_of_the_scorer_fail(mutant, monkeypatch):
    model, words = llama(), tokenizer(**BOTH)
    scorer = TextScorer(model, words, batch_size=8)
    expected = [one.total for one in TextScorer(model, words, batch_size=1)(TEXTS)]
    if mutant == "left":  # padded in front, where later tokens look
        ids, width = TextScorer._ids, 12
        monkeypatch.setattr(
            TextScorer, "_ids", lambda *given: [0] * (width - len(ids(*given))) + ids(*given)
        )
    else:
        scorer._end = []
    assert [one.total for one in scorer(TEXTS)] != pytest.approx(expected, abs=1e-3)


def test_a_tokenizer_with_an_end_only_starts_with_it_and_one_without_both_is_refused():
    model = llama().eval()
    scorer = TextScorer(model, tokenizer(eos_token="</s>"))
    with torch.inference_mode():
        assert scorer(["w1"])[0].total == pytest.approx(by_hand(model, [1, 4, 1]), abs=1e-4)
    open_ended = TextScorer(model, tokenizer(bos_token="<s>"))
    assert [one.tokens for one in open_ended(["w1", ""])] == [1, 0]
    assert open_ended([""])[0].mean == -math.inf
    with pytest.raises(OptionError, match="neither a bos nor an eos"):
        TextScorer(model, tokenizer())


def test_an_encoder_decoder_is_refused():
    size = {"vocab_size": 15, "d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "d_kv": 8}
    with pytest.raises(UnsupportedModelError, match="causal"):
        TextScorer(T5ForConditionalGeneration(T5Config(**size)), tokenizer(**BOTH))


def test_lists_are_scored_in_order_and_loaded_models_score_alike(tmp_path):
    model, words = llama(), tokenizer(**BOTH)
    lists = [NBestList("u", ("w1", "w2 w3")), NBestList("v", ("w4", "w1", "w5 w5"))]
    found = TextScorer(model, words).of_lists(lists)
    flat = TextScorer(model, words)(["w1", "w2 w3", "w4", "w1", "w5 w5"])
    assert found == [flat[:2], flat[2:]]
    model.save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    loaded = TextScorer.from_pretrained(tmp_path, device="cpu")
    assert [one.total for one in loaded(["w1"])] == pytest.approx([flat[0].total], abs=1e-5)


# Ranking


def test_the_first_of_the_highest_is_taken():
    assert highest([1.0, 3.0, 3.0]) == selection.Choice(1, 2.0)
    assert highest([3.0, 1.0, 3.0]) == selection.Choice(0, 0.0)


def test_joined_scores():
    one = NBestList("u", ("a", "b"), (-1.0, -2.0))
    assert joined_scores(one, [-9.0, -1.0], 0.0) == [-1.0, -2.0]
    assert joined_scores(one, [-math.inf, -1.0], 0.0) == [-1.0, -2.0]
    assert joined_scores(one, [-9.0, -1.0], 0.5) == [-5.5, -2.5]
    with pytest.raises(ShapeError, match="2 hypotheses and 1 scores"):
        joined_scores(one, [-1.0], 0.5)
    with pytest.raises(InputError, match="no scores"):
        joined_scores(NBestList("u", ("a",)), [-1.0], 0.5)
