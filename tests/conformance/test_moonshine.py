"""Moonshine: token for token what plain greedy `generate` gives, whatever drafts."""

import copy

import pytest
import torch
from transformers import MoonshineForConditionalGeneration

import mmdecode
from mmdecode.adapters.audio import moonshine
from mmdecode.adapters.audio.moonshine import MoonshineAdapter, by_column
from mmdecode.adapters.seq2seq.base import EncoderDecoderAdapter
from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.lookup import PromptLookup
from mmdecode.errors import IncompatibleError
from tests.support.tiny import (
    MOONSHINE_DRAFTS,
    NEW,
    DifferentError,
    HiddenPath,
    assert_same,
    moonshine_model,
    ours,
    plain,
    reference,
    waves,
)

EVERY_DRAFT = pytest.mark.parametrize("draft", MOONSHINE_DRAFTS)
DECODER_PROMPT = {
    "decoder_input_ids": torch.tensor([[1, 5, 7, 9], [0, 0, 1, 8], [0, 1, 4, 4]]),
    "decoder_attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]]),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("processors", ["no_processor", "penalties", "prefix_bias", "bad_words"])
@EVERY_DRAFT
def test_drafted_tokens_are_those_of_generate(draft, processors):
    assert_same("moonshine", draft, processors=processors)


@pytest.mark.one_in(2)
@EVERY_DRAFT
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_padded_batch_gives_what_generate_makes_of_that_batch(draft, batch):
    assert_same("moonshine", draft, batch=batch)


@EVERY_DRAFT
def test_heads_like_the_real_ones_give_the_same(draft):
    if not draft.startswith("medusa"):  # of another width
        assert_same("moonshine_padded", draft)


@pytest.mark.parametrize("family", ["moonshine", "moonshine_padded"])
@pytest.mark.parametrize("draft", ["none", "known", "known_tree", "random_trees"])
def test_eager_attention_gives_the_same(draft, family):
    assert_same(family, draft, attention="eager")


@pytest.mark.parametrize("draft", ["known", "known_tree", "random_trees"])
def test_a_padded_prompt_of_the_decoder_gives_the_same(draft):
    model, options = moonshine_model(), {**waves(3), **DECODER_PROMPT, "max_new_tokens": NEW}
    expected = model.generate(**options)
    rows = expected[:, -NEW:].tolist()
    decoder = Decoder(MOONSHINE_DRAFTS[draft]("moonshine", rows))
    assert model.generate(**options, custom_generate=decoder).tolist() == expected.tolist()


def alone(row):
    """A recording of the batch without its padding."""
    batch = waves(3)
    return {
        "input_values": batch["input_values"][row : row + 1, : batch["attention_mask"][row].sum()]
    }


def test_recordings_that_were_encoded_alone_are_decoded_together_as_each_alone():
    """Their states are padded, which the group norm of a padded batch never sees."""
    model = moonshine_model()
    expected = [model.generate(**alone(row), max_new_tokens=NEW)[0].tolist() for row in range(3)]
    batch = model.generate(**waves(3), max_new_tokens=NEW).tolist()
    assert expected[0] == batch[0]
    assert expected != batch, "padding changes nothing: the case did not occur"
    encoded = [model.get_encoder()(**alone(row)) for row in range(3)]
    states = [each.last_hidden_state[0] for each in encoded]
    together = type(encoded[0])(
        last_hidden_state=torch.nn.utils.rnn.pad_sequence(states, batch_first=True),
        attention_mask=torch.nn.utils.rnn.pad_sequence(
            [torch.ones(len(each), dtype=torch.int) for each in states], batch_first=True
        ),
    )
    for draft in (None, HiddenPath([row[1:] for row in expected])):
        found = mmdecode.generate(
            model, encoder_outputs=together, decoder=Decoder(draft), max_new_tokens=NEW
        )
        assert found.tolist() == expected


def test_one_recording_needs_no_mask():
    expected = moonshine_model().generate(**alone(1), max_new_tokens=NEW)
    found = mmdecode.generate(moonshine_model(), **alone(1), max_new_tokens=NEW)
    assert found.tolist() == expected.tolist()


def test_positions_go_on_past_those_the_model_was_made_for():
    expected = plain("moonshine", max_new_tokens=40)
    with pytest.warns(UserWarning, match="made for 32"):
        found = ours(Decoder(PromptLookup()), "moonshine", max_new_tokens=40)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("draft", ["known", "known_tree"])
def test_end_of_sequence_inside_an_accepted_block_ends_the_row_there(draft):
    row, *others = reference("moonshine", ())[1]
    seen = {token for other in others for token in other}
    position = next(i for i in range(2, NEW) if row[i] not in {*row[:i], *seen})
    decoder = assert_same("moonshine", draft, eos_token_id=row[position], pad_token_id=0)
    last = decoder.trace[0][-1]
    assert (*last.accepted, last.decided)[last.kept - 1] == row[position]


@pytest.mark.parametrize("draft", ["lookup", "assistant", "medusa_tree", "layer_skip"])
def test_sampled_tokens_are_those_of_the_undrafted_loop(draft):
    options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": NEW}

    def sampled(draft):
        return moonshine_model().generate(
            **waves(3), **options, custom_generate=Decoder(draft, seed=3)
        )

    expected = sampled(None)
    assert expected.tolist() != plain("moonshine").tolist()
    assert sampled(MOONSHINE_DRAFTS[draft]("moonshine", [])).tolist() == expected.tolist()


def test_an_assistant_that_cannot_read_the_targets_encoder_is_refused():
    other = moonshine_model(width=36)
    with pytest.raises(IncompatibleError, match="width 36"):
        ours(Decoder(Assistant(other)), "moonshine")


def test_a_guide_that_changes_the_audio_is_refused_by_name():
    with pytest.raises(IncompatibleError, match="Whisper"):
        ours(Decoder(guide="whisper_cd"), "moonshine")


def test_logits_of_one_row_come_from_a_copy_by_column_that_follows_the_weights():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, 8192, bias=False), torch.randn(1, 1, 16)
    first = by_column(head)
    assert torch.allclose(hidden @ first, head(hidden), atol=1e-5)
    assert by_column(head) is first
    head.weight.data[7, 3] += 1.0  # as merged adapters do, unseen by the version of a tensor
    assert torch.allclose(hidden @ by_column(head), head(hidden), atol=1e-5)
    head.register_forward_hook(lambda *_: None)
    assert by_column(head) is None
    assert by_column(torch.nn.Linear(16, 8192, bias=False).bfloat16()) is None
    assert by_column(torch.nn.Linear(16, 80, bias=False)) is None


def test_a_large_vocabulary_gives_the_same():
    config = copy.deepcopy(moonshine_model().config)
    config.vocab_size = 8192
    torch.manual_seed(1)
    model = MoonshineForConditionalGeneration(config).eval()
    adapter, hidden = MoonshineAdapter(model), torch.zeros(2, 1, config.hidden_size)
    adapter.unembed(hidden)
    assert model.proj_out not in moonshine.by_column_copies, "nothing is copied for batches"
    expected = model.generate(**waves(1), max_new_tokens=NEW)
    assert len(set(expected[0].tolist())) >= 5
    for draft in (None, PromptLookup()):
        found = model.generate(**waves(1), max_new_tokens=NEW, custom_generate=Decoder(draft))
        assert found.tolist() == expected.tolist()
    assert model.proj_out in moonshine.by_column_copies


# Known mistakes


def assert_noticed(draft):
    with pytest.raises(DifferentError):
        assert_same("moonshine", draft)


def test_a_mask_of_samples_instead_of_that_of_states_is_noticed(monkeypatch):
    assert_same("moonshine", "known")
    samples = EncoderDecoderAdapter.source_mask

    def first(self, call):
        return samples(self, call)[:, : call.request.model_kwargs["encoder_outputs"][0].shape[1]]

    monkeypatch.setattr(MoonshineAdapter, "source_mask", first)
    assert_noticed("known")


@pytest.mark.parametrize("draft", ["known", "known_tree"])
def test_positions_that_are_not_given_are_noticed(draft, monkeypatch):
    monkeypatch.setattr(MoonshineAdapter, "takes_positions", False)
    monkeypatch.setattr(MoonshineAdapter, "forward", EncoderDecoderAdapter.forward)
    assert_noticed(draft)


def test_positions_by_slot_instead_of_depth_are_noticed(monkeypatch):
    assert_same("moonshine", "known_tree")
    forward = MoonshineAdapter.forward

    def by_slot(self, tokens, mask, positions, past):
        order = torch.arange(tokens.shape[1])
        return forward(self, tokens, mask, positions[:, :1] + order, past)

    monkeypatch.setattr(MoonshineAdapter, "forward", by_slot)
    assert_noticed("known_tree")
