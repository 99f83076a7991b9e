"""Greedy rounds that keep the argmax of logits and no logits: tokens, ties, memory."""

from types import SimpleNamespace

import pytest
import torch

import mmdecode as mm
from mmdecode.accept.exact import GreedyMatch
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.engine import branches, target_logits
from mmdecode.engine.target_logits import argmax_of
from tests.support import tiny

DRAFTS = {
    "none": lambda: None,
    "lookup": PromptLookup,
    "medusa": lambda: Medusa(tiny.random_heads(layers=2), paths=tiny.TREE),
    "quantized": lambda: "quantized:bits=8",
}


@pytest.fixture
def widths(monkeypatch):
    """Rows and tokens of every argmax, and the rows of each head."""
    noted = []

    def noting(adapter, states):
        noted.append(states.shape[:2])
        return argmax_of(adapter, states)

    monkeypatch.setattr(branches, "argmax_of", noting)
    return noted


def decoded(draft, **options):
    decoder = mm.Decoder(DRAFTS[draft](), seed=0)
    inputs = tiny.prompts(3)
    model = tiny.text_model("llama")
    return mm.generate(model, decoder=decoder, max_new_tokens=20, **inputs, **options), decoder


@pytest.mark.parametrize("few", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_tokens_are_those_of_whole_logits(draft, few, widths, monkeypatch):
    named = {"return_dict_in_generate": True, "output_logits": True}
    expected = decoded(draft, **named)[0].sequences
    assert not widths, "logits were asked for"
    if few:
        monkeypatch.setattr(target_logits, "LOGITS", 4 * 80)
    found, decoder = decoded(draft)
    assert torch.equal(found, expected)
    assert len(widths) == decoder.stats.passes > 0


@pytest.mark.parametrize(
    "options", [{"do_sample": True}, {"repetition_penalty": 1.2}, {"trace": []}]
)
def test_logits_are_computed_where_they_are_read(options, widths):
    decoded("lookup", **options)
    decoder = mm.Decoder("recycling", seed=0)
    mm.generate(tiny.text_model("llama"), decoder=decoder, max_new_tokens=8, **tiny.prompts(3))
    assert decoder.stats.passes and not widths


def test_of_equal_logits_the_lowest_id_wins_in_every_part(monkeypatch):
    made = []

    def head(states):
        made.append(states.shape[:2])
        logits = torch.zeros(*states.shape[:2], 50)
        logits[..., [7, 30, 44]] = states[..., :1]
        return logits

    states = torch.ones(3, 5, 4)
    states[1, 2] = -1  # zeros are the largest: of ids but three
    adapter = SimpleNamespace(vocab=50, head=head)
    expected = torch.full((3, 5), 7)
    expected[1, 2] = 0
    assert torch.equal(argmax_of(adapter, states), expected)
    monkeypatch.setattr(target_logits, "LOGITS", 4 * 50 + 49)
    assert torch.equal(argmax_of(adapter, states), expected)
    assert made == [(3, 5), (1, 4), (1, 4), (1, 4), (1, 3)]


def test_a_subclass_that_may_read_logits_declares_it_anew():
    class Reading(GreedyMatch):
        def __call__(self, proposal, target, call):
            assert target.all().shape[-1] == call.plan.adapter.vocab
            return super().__call__(proposal, target, call)

    class Alike(PromptLookup):
        summary = "the same"

    assert GreedyMatch.capabilities.argmax_only and Alike.capabilities.argmax_only
    assert not Reading.capabilities.argmax_only and Reading.capabilities.drafter_invariant
    decoder = mm.Decoder("lookup", accept=Reading(), seed=0)
    mm.generate(tiny.text_model("llama"), decoder=decoder, max_new_tokens=8, **tiny.prompts(2))
