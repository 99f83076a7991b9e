"""Captured rounds of real models: on a tape they generate, and draft, what rounds do as usual.

A warning fails a test here, so all of these rounds are captured as wholes.
"""

import pytest

from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.engine.cache import RaggedCache
from mmdecode.engine.proposal import MAX_NODES
from tests.conformance import test_encoder_decoder
from tests.support import seams, tiny, tiny_vlm
from tests.support.tiny import MOONSHINE_DRAFTS, TEXT_DRAFTS, WHISPER_DRAFTS

UNLIKE = ("known", "known_tree", "random_trees")  # drafts of tests, which run on the host
UNLIKE += ("assistant_is_target",)  # too soon at the end
DRAFTS = [
    *(("llama", name) for name in TEXT_DRAFTS if name not in UNLIKE),
    *(("whisper", name) for name in WHISPER_DRAFTS if name not in UNLIKE),
    *(("moonshine", name) for name in ("none", "assistant", "medusa_tree")),
]


def drafted(generate, decoder):
    """What a decoder generates, and what it drafts in every round."""
    rounds = []

    def noting(sync):
        def noted(run, result, count):
            rows = result.proposal.tokens.tolist()
            rounds.append([[token for token in row if token >= 0] for row in rows])
            return sync(run, result, count)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        seams.SYNC.plant(patch, noting)
        return generate(decoder).tolist(), rounds


def assert_replayed(generate, make, taped, **options):
    """Asserts that tokens and drafts are those of a decoder that captures nothing."""
    expected = drafted(generate, Decoder(make(), **options))
    assert not taped
    assert drafted(generate, Decoder(make(), compile=True, **options)) == expected
    assert len(taped) >= 4


def draft_of(family, name):
    table = {"whisper": WHISPER_DRAFTS, "moonshine": MOONSHINE_DRAFTS}.get(family, TEXT_DRAFTS)
    return lambda: table[name](family, [])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "name"), DRAFTS)
def test_drafts_of_real_states(family, name, taped):
    assert_replayed(lambda decoder: tiny.ours(decoder, family), draft_of(family, name), taped)


@pytest.mark.slow
def test_the_longest_draft_stays_within_the_reserved_slots(taped):
    def longest():
        return Assistant(tiny.small_of("llama"), length=MAX_NODES)

    assert_replayed(lambda decoder: tiny.ours(decoder, "llama"), longest, taped)


@pytest.mark.parametrize("name", ["medusa_tree", "assistant"])
def test_sampled_rounds(name, taped):
    def generate(decoder):
        options = {**tiny.prompts(3), "max_new_tokens": 20, "do_sample": True, "temperature": 0.8}
        return tiny.model_of("llama").generate(**options, custom_generate=decoder)

    assert_replayed(generate, draft_of("llama", name), taped, seed=3)


@pytest.mark.parametrize("family", sorted({*tiny.TEXT_CONFIGS} - {"llama"}))
def test_every_text_family(family, taped):
    assert_replayed(lambda decoder: tiny.ours(decoder, family), lambda: None, taped)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", tiny_vlm.CONFIGS)
def test_every_vision_language_family(family, taped):
    assert_replayed(lambda decoder: tiny_vlm.ours(decoder, family), lambda: None, taped)


@pytest.mark.parametrize("family", ["t5", "umt5", "bart", "marian"])
def test_encoder_decoders(family, taped):
    def generate(decoder):
        return test_encoder_decoder.generate(family, prompt=True, custom_generate=decoder)

    assert_replayed(generate, lambda: None, taped)


def test_a_view_of_the_whole_model(taped, monkeypatch):
    seams.STEP.plant(monkeypatch, lambda _: 64)

    def generate(decoder):
        return tiny.ours(decoder, "llama", max_new_tokens=30)

    assert_replayed(generate, lambda: LayerSkip(skip=(), length=3), taped)


def moved(cache, start):
    cache.rows.start = start


def test_a_block_whose_cache_moves_is_found(taped, monkeypatch):
    monkeypatch.setattr(RaggedCache, "set_start", moved)
    with pytest.raises(AssertionError):
        make = draft_of("whisper", "medusa_block")
        assert_replayed(lambda decoder: tiny.ours(decoder, "whisper"), make, taped)
