"""Whisper, short form: token for token what plain greedy `generate` gives, whatever drafts."""

import functools

import pytest
import torch
from transformers import GenerationMixin
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from mmdecode import registry
from mmdecode.adapters.audio import lean_step
from mmdecode.decoder import Decoder
from mmdecode.draft.layer_skip import shallow
from mmdecode.draft.medusa import Medusa
from tests.support.tiny import (
    ALWAYS_SUPPRESSED,
    NO_TIMESTAMPS,
    SPECIAL,
    TREE,
    WHISPER_DRAFTS,
    PrefixBias,
    assert_same,
    audio,
    ours,
    plain,
    random_block,
    random_heads,
    reference,
    whisper_model,
)
from tests.support.traced import Traced

EVERY_DRAFT = pytest.mark.parametrize("draft", WHISPER_DRAFTS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("processors", ["no_processor", "penalties", "prefix_bias", "bad_words"])
@EVERY_DRAFT
def test_drafted_tokens_are_those_of_generate(draft, processors):
    assert_same("whisper", draft, processors=processors)


@pytest.mark.one_in(2)
@EVERY_DRAFT
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_any_batch_gives_the_same(draft, batch):
    assert_same("whisper", draft, batch=batch)


@EVERY_DRAFT
def test_eager_attention_gives_the_same(draft):
    assert_same("whisper", draft, attention="eager")


def test_layers_that_draft_take_the_lean_step():
    view = shallow(registry.adapter_for(whisper_model()), [1])
    assert lean_step.usable(view.get_decoder())


def inner_generate(decoder=None, extra=()):
    """The inner call of Whisper's `generate`, under its rules for timestamps."""
    model = whisper_model()
    rules = WhisperTimeStampLogitsProcessor(model.generation_config, begin_index=3)
    return GenerationMixin.generate(
        model,
        **audio(4),
        decoder_input_ids=torch.tensor(
            [[SPECIAL["sot"], SPECIAL["en"], SPECIAL["transcribe"]]] * 4
        ),
        logits_processor=[rules, *extra],
        suppress_tokens=ALWAYS_SUPPRESSED,
        max_new_tokens=24,
        do_sample=False,
        custom_generate=decoder,
    )


@functools.cache
def with_timestamps(biased):
    return inner_generate(extra=[PrefixBias()] if biased else [])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("biased", [False, True], ids=["vectorised", "node_by_node"])
@EVERY_DRAFT
def test_timestamps_follow_their_rules_at_every_node(draft, biased):
    expected = with_timestamps(biased)
    rows = [[t for t in row[3:] if t != SPECIAL["eos"]] for row in expected.tolist()]
    assert sum(token > NO_TIMESTAMPS for row in rows for token in row) >= 6
    assert sum(token < SPECIAL["eos"] for row in rows for token in row) >= 6
    decoder = Decoder(WHISPER_DRAFTS[draft]("whisper", rows))
    found = inner_generate(decoder, [PrefixBias()] if biased else [])
    assert found.tolist() == expected.tolist()


def test_whispers_own_timestamps_with_a_prompt_of_one_token():
    model = whisper_model(multilingual=False)
    options = {**audio(1), "return_timestamps": True, "max_new_tokens": 8, "do_sample": False}
    later = range(NO_TIMESTAMPS + 19, 100)  # after 0.4 s, where the only window ends
    options["suppress_tokens"] = [*ALWAYS_SUPPRESSED, *later]
    expected = model.generate(**options)
    assert bool((expected > NO_TIMESTAMPS).any())
    draft = Medusa(random_heads(), random_block(), TREE)
    assert model.generate(**options, custom_generate=Decoder(draft)).tolist() == expected.tolist()


def without_suppression(begin):
    """Rows of a model whose first token would be ``begin``'s, were it not suppressed there."""
    return plain("whisper", begin_suppress_tokens=begin)


@pytest.mark.one_in(2)
@EVERY_DRAFT
def test_suppression_at_the_beginning_acts_on_the_first_token_only(draft):
    free = without_suppression([])
    banned = free[:, 0].unique().tolist()
    options = {"begin_suppress_tokens": banned}
    expected = plain("whisper", **options)
    assert not set(banned) & set(expected[:, 0].tolist())
    decoder = Traced()
    ours(decoder, "whisper", **options)
    rows = [[t for r in row for t in (*r.accepted, r.decided)] for row in decoder.trace]
    later = {token for row in rows for token in row[1:]}
    assert later & set(banned), "a suppressed token never came later: the case did not occur"
    drafted = Decoder(WHISPER_DRAFTS[draft]("whisper", rows))
    assert ours(drafted, "whisper", **options).tolist() == expected.tolist()


@pytest.mark.parametrize("draft", ["known", "known_tree", "medusa_block_tree"])
def test_end_of_sequence_inside_an_accepted_block_ends_the_row_there(draft):
    _, rows = reference("whisper", ())
    token = rows[0][3]
    assert token not in rows[0][:3]
    options = {"eos_token_id": token, "pad_token_id": SPECIAL["eos"]}
    expected = plain("whisper", **options)
    decoder = Traced(WHISPER_DRAFTS[draft]("whisper", rows))
    assert ours(decoder, "whisper", **options).tolist() == expected.tolist()
    last = decoder.trace[0][-1]
    if draft != "medusa_block_tree":
        assert last.kept <= len(last.accepted), "nothing was cut: the case did not occur"
    assert (*last.accepted, last.decided)[last.kept - 1] == token


@pytest.mark.parametrize("draft", ["known", "known_tree", "random_trees", "medusa_block_tree"])
def test_the_position_table_is_never_left(draft):
    """Generation to the last position, with drafts that would reach beyond it."""
    model = whisper_model()
    options = {**audio(2), "language": "en", "task": "transcribe", "max_length": 64}
    options["suppress_tokens"] = [2, SPECIAL["eos"], *range(61, 100)]
    expected = model.generate(**options, do_sample=False)
    rows = expected.tolist()
    assert len(rows[0]) >= 59
    decoder = Decoder(WHISPER_DRAFTS[draft]("whisper", rows))
    assert model.generate(**options, custom_generate=decoder).tolist() == rows


def test_the_decoder_prompt_may_hold_earlier_text():
    model = whisper_model()
    options = {**audio(2), "language": "de", "task": "translate", "max_new_tokens": 10}
    options["prompt_ids"] = torch.tensor([66, 7, 8, 9])
    expected = model.generate(**options, do_sample=False)
    draft = Medusa(random_heads(), random_block(), TREE)
    found = model.generate(**options, custom_generate=Decoder(draft))
    assert found.tolist() == expected.tolist()
