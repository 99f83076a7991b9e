"""Text models: token for token what plain greedy `generate` gives, whatever drafts."""

import pytest
import torch

from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.lookup import PromptLookup
from tests.support.tiny import (
    NEW,
    PROCESSORS,
    TEXT_CONFIGS,
    TEXT_DRAFTS,
    WINDOW,
    assert_same,
    ours,
    plain,
    prompts,
    reference,
    small_of,
    text_model,
)

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2_mixed"])
OTHERS = pytest.mark.parametrize("family", sorted({*TEXT_CONFIGS} - {"llama", "qwen2_mixed"}))
EVERY_DRAFT = pytest.mark.parametrize("draft", TEXT_DRAFTS)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("processors", PROCESSORS)
@EVERY_DRAFT
@FAMILIES
def test_drafted_tokens_are_those_of_generate(family, draft, processors):
    assert_same(family, draft, processors=processors)


@EVERY_DRAFT
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_any_batch_gives_the_same(draft, batch):
    assert_same("qwen2_mixed", draft, batch=batch)


@EVERY_DRAFT
@FAMILIES
def test_eager_attention_gives_the_same(family, draft):
    assert_same(family, draft, attention="eager")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("draft", "processors"),
    [
        ("none", "no_processor"),
        ("known_tree", "penalties"),
        ("assistant", "prefix_bias"),
        ("assistant_is_target", "no_processor"),
        ("medusa_tree", "no_processor"),
    ],
)
@OTHERS
def test_every_family_generates_what_transformers_does(family, draft, processors, attention):
    assert_same(family, draft, processors=processors, attention=attention)


def test_windows_are_shorter_than_the_shortest_sequence():
    assert int(prompts(4)["attention_mask"].sum(1).min()) + NEW > 2 * WINDOW


def token_at(family, position, **options):
    """A token that row 0 generates at ``position`` and not before."""
    _, rows = reference(family, tuple(sorted(options.items())))
    token = rows[0][position]
    assert token not in rows[0][:position], "take another position"
    return token


@OTHERS
def test_every_family_ends_inside_a_block(family):
    token = token_at(family, 3)
    decoder = assert_same(family, "known", eos_token_id=token, pad_token_id=0)
    last = decoder.trace[0][-1]
    assert last.kept <= len(last.accepted), "nothing was cut: the case did not occur"


@pytest.mark.parametrize("draft", ["known", "known_tree", "assistant_is_target", "medusa_tree"])
@FAMILIES
def test_end_of_sequence_inside_an_accepted_block_ends_the_row_there(family, draft):
    token = token_at(family, 3)
    decoder = assert_same(family, draft, eos_token_id=token, pad_token_id=0)
    last = decoder.trace[0][-1]
    if draft != "medusa_tree":
        assert last.kept <= len(last.accepted), "nothing was cut: the case did not occur"
    assert (*last.accepted, last.decided)[last.kept - 1] == token


@EVERY_DRAFT
@FAMILIES
def test_minimum_length_holds_inside_a_block(family, draft):
    token = token_at(family, 3)
    options = {"eos_token_id": token, "pad_token_id": 0, "min_new_tokens": 6}
    decoder = assert_same(family, draft, **options)
    assert sum(r.kept for r in decoder.trace[0]) >= 6


@pytest.mark.one_in(3)
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
@EVERY_DRAFT
def test_the_length_cap_truncates_a_block(draft, limit):
    found = ours(Decoder(TEXT_DRAFTS[draft]("llama", reference("llama", ())[1])), "llama")
    capped = Decoder(TEXT_DRAFTS[draft]("llama", reference("llama", ())[1]))
    short = ours(capped, "llama", max_new_tokens=limit)
    assert short.tolist() == plain("llama", max_new_tokens=limit).tolist()
    assert short.tolist() == found[:, : short.shape[1]].tolist()


@pytest.mark.one_in(2)
@EVERY_DRAFT
@FAMILIES
def test_a_prompt_of_one_token_is_enough(family, draft):
    assert_same_from_one_token(family, draft)


@OTHERS
def test_every_family_starts_from_one_token(family):
    assert_same_from_one_token(family, "known_tree")


def assert_same_from_one_token(family, draft):
    model = text_model(family)
    ids = torch.tensor([[5], [0], [41]])
    expected = model.generate(ids, max_new_tokens=14, do_sample=False)
    rows = expected[:, 1:].tolist()
    decoder = Decoder(TEXT_DRAFTS[draft](family, rows))
    found = model.generate(ids, max_new_tokens=14, do_sample=False, custom_generate=decoder)
    assert found.tolist() == expected.tolist()


@FAMILIES
def test_a_row_alone_is_the_row_in_a_padded_batch(family):
    expected, rows = reference(family, ())
    model = text_model(family)
    ids = expected[1:2, 6:9]  # the prompt of row 1 without its padding
    found = model.generate(
        ids, max_new_tokens=14, do_sample=False, custom_generate=Decoder(PromptLookup())
    )
    assert found[0, 3:].tolist() == rows[1]


def test_a_draft_longer_than_what_is_left_is_cut():
    draft = Assistant(small_of("llama"), length=40)
    assert ours(Decoder(draft), "llama").tolist() == plain("llama").tolist()


def test_nothing_to_draft_is_the_plain_loop():
    for draft in (PromptLookup(length=0), Assistant(small_of("llama"), length=0)):
        decoder = Decoder(draft)
        assert ours(decoder, "llama").tolist() == plain("llama").tolist()
        assert decoder.stats.drafted == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft", TEXT_DRAFTS)
@pytest.mark.parametrize("processors", ["penalties", "prefix_bias", "prefix_allowed"])
def test_processors_stop_and_padding_together(draft, processors):
    token = token_at("llama", 5, processors=processors)
    options = {"eos_token_id": token, "pad_token_id": 0, "processors": processors}
    assert_same("llama", draft, batch=4, min_new_tokens=3, **options)
