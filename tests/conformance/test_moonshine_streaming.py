"""MoonshineStreaming: token for token what plain greedy `generate` gives, whatever drafts."""

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

import mmdecode
from mmdecode.adapters.audio.lean_step import LeanAdapter
from mmdecode.adapters.audio.moonshine_streaming import MoonshineStreamingAdapter
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.errors import IncompatibleError
from tests.support.tiny import (
    MOONSHINE_DRAFTS,
    NEW,
    DifferentError,
    assert_same,
    moonshine_streaming_model,
    plain,
    waves,
)

FAMILY = "moonshine_streaming"
EVERY_DRAFT = pytest.mark.parametrize("draft", MOONSHINE_DRAFTS)


@EVERY_DRAFT
def test_drafted_tokens_are_those_of_generate(draft):
    assert_same(FAMILY, draft)


@pytest.mark.parametrize("processors", ["penalties", "prefix_bias"])
@pytest.mark.parametrize("draft", ["known_tree"])
def test_with_logits_processors_too(draft, processors):
    assert_same(FAMILY, draft, processors=processors)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("draft", ["known_tree"])
def test_a_padded_batch_gives_what_generate_makes_of_that_batch(draft, batch):
    assert_same(FAMILY, draft, batch=batch)


@pytest.mark.parametrize("draft", ["known_tree", "assistant", "layer_skip"])
def test_heads_padded_to_a_multiple_of_eight_give_the_same(draft):
    assert_same(f"{FAMILY}_padded", draft)


@pytest.mark.parametrize("family", [FAMILY, f"{FAMILY}_padded"])
@pytest.mark.parametrize("draft", ["known_tree", "assistant"])
def test_eager_attention_gives_the_same(draft, family):
    assert not MoonshineStreamingAdapter(moonshine_streaming_model("eager"))._lean
    assert_same(family, draft, attention="eager")


def test_the_lean_step_is_used():
    assert MoonshineStreamingAdapter(moonshine_streaming_model())._lean


def encoded(model, batch=2):
    return model.get_encoder()(**waves(batch))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("draft", ["none", "assistant"])
def test_encoder_states_of_the_caller_do_not_change(draft, attention):
    model = moonshine_streaming_model(attention)
    expected = plain(FAMILY, attention, batch=2).tolist()
    states = encoded(model)
    before = states.last_hidden_state.clone()
    for _ in range(2):
        decoder = Decoder(MOONSHINE_DRAFTS[draft](FAMILY, []))
        found = mmdecode.generate(
            model, encoder_outputs=states, decoder=decoder, max_new_tokens=NEW
        )
        assert found.tolist() == expected
    assert torch.equal(states.last_hidden_state, before)


def test_plain_generate_changes_them():
    """Why the adapter copies: this test fails once transformers does not need it any more."""
    model = moonshine_streaming_model()
    states = encoded(model)
    before = states.last_hidden_state.clone()
    model.generate(encoder_outputs=states, max_new_tokens=2)
    assert (states.last_hidden_state - before).abs().max() > 0.1


def test_states_that_were_encoded_without_windows_are_warned_of():
    """Plain `generate` makes no mask of its own, and without one there are no windows."""
    model, inputs = moonshine_streaming_model(), {"input_values": waves(1)["input_values"]}
    mask = {"attention_mask": torch.ones(1, 6000, dtype=torch.long)}
    expected = model.generate(**inputs, max_new_tokens=NEW)
    with pytest.warns(UserWarning, match="pass attention_mask"):
        found = mmdecode.generate(model, **inputs, max_new_tokens=NEW)
    assert found.tolist() == expected.tolist()
    masked = mmdecode.generate(model, **inputs, **mask, max_new_tokens=NEW)
    assert masked.tolist() == model.generate(**inputs, **mask, max_new_tokens=NEW).tolist()
    assert masked.tolist() != found.tolist()


def test_more_states_than_positions_are_refused():
    model = moonshine_streaming_model()
    states = BaseModelOutput(last_hidden_state=torch.zeros(1, 129, 24))
    with pytest.raises(IncompatibleError, match=r"129 encoder states; .* positions for 128"):
        mmdecode.generate(model, encoder_outputs=states, max_new_tokens=2)


def test_an_assistant_with_another_encoder_is_refused():
    model = moonshine_streaming_model()
    states = BaseModelOutput(last_hidden_state=torch.zeros(1, 9, 32))
    with pytest.raises(IncompatibleError, match="width 24"):
        mmdecode.generate(
            model, encoder_outputs=states, decoder=Decoder(Assistant(model)), max_new_tokens=2
        )


# Known mistakes


def test_modules_that_are_given_the_callers_states_are_noticed(monkeypatch):
    monkeypatch.setattr(MoonshineStreamingAdapter, "changes_source", False)
    model = moonshine_streaming_model("eager")
    states = encoded(model)
    before = states.last_hidden_state.clone()
    first, second = (
        mmdecode.generate(model, encoder_outputs=states, max_new_tokens=NEW).tolist()
        for _ in range(2)
    )
    assert first != second
    assert not torch.equal(states.last_hidden_state, before)


def test_states_without_positions_are_not_used(monkeypatch):
    """The lean step that reads them differs from the modules, which are run instead."""
    monkeypatch.setattr(MoonshineStreamingAdapter, "embed_source", LeanAdapter.embed_source)
    model = moonshine_streaming_model.__wrapped__(width=24)  # states need no projection
    with pytest.warns(UserWarning, match="differs from them"):
        assert not MoonshineStreamingAdapter(model)._lean
    expected = model.generate(**waves(2), max_new_tokens=NEW)
    found = mmdecode.generate(model, **waves(2), max_new_tokens=NEW)
    assert found.tolist() == expected.tolist()


def test_a_mask_that_is_not_that_of_states_is_noticed(monkeypatch):
    def all_of_them(self, call):
        return torch.ones(call.request.model_kwargs["encoder_outputs"][0].shape[:2])

    monkeypatch.setattr(MoonshineStreamingAdapter, "source_mask", all_of_them)
    with pytest.raises(DifferentError):
        assert_same(FAMILY, "known")
