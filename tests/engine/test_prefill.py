"""How prompts are read: row by row, in chunks, or in one pass, and that it changes nothing."""

import functools
from collections import Counter

import pytest
import torch

from mmdecode.decoder import Decoder
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.dream import Dream
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.features import FeatureSession
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.mirror import CacheCopyDrafter
from mmdecode.draft.recycling import Recycling
from mmdecode.draft.sparse import Sparse
from mmdecode.engine.prefill import Cost
from mmdecode.engine.stats import Stats
from mmdecode.guide.dola import DoLa
from mmdecode.guide.vcd import VCD
from mmdecode.models import eagle as eagles
from mmdecode.testing.drafts import RandomTrees
from tests.draft.test_seeing import random_draft, random_model
from tests.engine.test_long_prompts import Dense, words
from tests.support import seams, tiny, tiny_vlm
from tests.support.sessions import noting
from tests.support.tiny import VOCAB, WIDTH, random_heads, text_model

NEW = 10
TOKENS = 3  # of a chunk
TEXT = ["llama", "mistral", "gemma3", "qwen2_mixed"]
VISION = ["llava", "llava_next", "qwen2_vl", "qwen3_vl", "idefics3", "internvl"]
TWO_WAY = ["gemma3", "paligemma"]


def chunks(lengths):
    """Passes of rows of these lengths, none as long as another."""
    split = sum(-(-length // TOKENS) for length in lengths if length > TOKENS)
    whole = sum(length <= TOKENS for length in lengths)
    return {"prefill in chunks": split} | ({"prefill by rows": whole} if whole else {})


def model_of(family):
    return tiny_vlm.vision_model(family) if family in VISION else text_model(family)


def inputs_of(family, batch=3):
    if family in VISION:
        return tiny_vlm.vision_inputs(family, batch)
    return tiny.prompts(batch)


def generated(family, decoder=None, batch=3, **options):
    call = {"max_new_tokens": NEW, "do_sample": False} | inputs_of(family, batch) | options
    return model_of(family).generate(**call, custom_generate=decoder).tolist()


def prefills(decoder):
    """Passes that read the prompt, by the way that they took."""
    return {key: n for key, n in decoder.stats.paths.items() if key.startswith("prefill")}


def decoded(family, draft=None, guide=None, **options):
    """Ids, paths, and how many tokens of how many were accepted."""
    decoder = Decoder(draft, guide, seed=3)
    ids = generated(family, decoder, **options)
    return ids, prefills(decoder), decoder.stats.as_dict()["accepted_histogram"]


@pytest.fixture(params=["by rows", "in chunks"])
def path(request, monkeypatch):
    """Every prompt that can be is read in this way."""
    if request.param == "by rows":
        seams.read_by_rows(monkeypatch)
    else:
        seams.read_in_chunks(monkeypatch, TOKENS)
    return f"prefill {request.param}"


@pytest.mark.parametrize("draft", [None, RandomTrees()], ids=["none", "trees"])
@pytest.mark.parametrize("family", TEXT)
def test_a_padded_batch_is_read_without_its_padding(family, draft, path):
    ids, paths, _ = decoded(family, draft)
    assert ids == generated(family)
    lengths = inputs_of(family)["attention_mask"].sum(1).tolist()
    assert paths == ({path: 3} if "rows" in path else chunks(lengths))


@pytest.mark.parametrize("family", TEXT)
def test_rows_of_one_length_are_read_together(family, monkeypatch):
    seams.read_by_rows(monkeypatch)
    ids = words(12, rows=4)
    mask = torch.ones_like(ids)
    mask[1::2, :5] = 0
    call = {"input_ids": ids, "attention_mask": mask}
    found, paths, _ = decoded(family, **call)
    assert paths == {"prefill by rows": 2}
    assert found == generated(family, **call)


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("family", TEXT)
def test_an_unpadded_prompt_is_read_in_chunks(family, tokens, monkeypatch):
    seams.read_in_chunks(monkeypatch, tokens)
    ids, paths, _ = decoded(family, batch=1)
    assert ids == generated(family, batch=1)
    assert paths == {"prefill in chunks": -(-7 // tokens)}


@pytest.mark.parametrize("family", TEXT)
def test_embeddings_are_read_like_ids(family, path):
    model, inputs = model_of(family), inputs_of(family)
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"]).roll(1, -1)
    call = {**inputs, "max_new_tokens": NEW, "do_sample": False}
    decoder = Decoder()
    found = model.generate(**call, custom_generate=decoder)
    assert found.tolist() == model.generate(**call).tolist() != generated(family)
    assert decoder.stats.paths[path] >= 2


@pytest.mark.parametrize("family", VISION)
def test_rows_keep_their_images(family, monkeypatch):
    seams.read_by_rows(monkeypatch)
    ids, paths, _ = decoded(family)
    assert ids == generated(family)
    assert paths == {"prefill by rows": 3}


@pytest.mark.parametrize("family", TWO_WAY)
def test_images_that_are_read_in_both_directions_stay_in_one_pass(family, path):
    model, inputs = tiny_vlm.vision_model(family), tiny_vlm.vision_inputs(family, 3)
    call, decoder = {**inputs, "max_new_tokens": NEW, "do_sample": False}, Decoder()
    found = model.generate(**call, custom_generate=decoder)
    assert found.tolist() == model.generate(**call).tolist()
    assert prefills(decoder) == {"prefill masked": 1}


def test_a_decoder_of_a_sequence_to_sequence_model_reads_as_before(path):
    decoder = Decoder()
    assert tiny.ours(decoder, "whisper").tolist() == tiny.plain("whisper").tolist()
    assert prefills(decoder) == {"prefill masked": 1}


@functools.cache
def eagle():
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
    }
    torch.manual_seed(2)
    drafter = eagles.KINDS["eagle"](sizes, False)
    for name, weight in drafter.named_parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=1.0 if "fc" in name else 0.3)
    return drafter


DRAFTS = {
    "lookup": lambda: PromptLookup(length=3),
    "recycling": Recycling,
    "medusa": lambda: Medusa(random_heads()),
    "eagle": lambda: Eagle(eagle(), depth=3, top_k=2, nodes=6),
    "layer_skip": lambda: LayerSkip(exit_layer=1, length=3),
    "mirror": lambda: CacheCopyDrafter(length=3),
    "assistant": lambda: Assistant(tiny.small_of("llama"), length=3),
    "target": lambda: Assistant(text_model("llama"), length=3),
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_do_not_depend_on_how_the_prompt_is_read(draft, monkeypatch):
    expected, _, accepted = decoded("llama", DRAFTS[draft]())
    for read in (seams.read_by_rows, lambda patch: seams.read_in_chunks(patch, TOKENS)):
        with monkeypatch.context() as patch:
            read(patch)
            ids, paths, again = decoded("llama", DRAFTS[draft]())
        assert ids == expected
        assert again == accepted
        assert not {"prefill masked", "prefill causal"} & paths.keys()
    assert expected == generated("llama")


def drafted(family, draft):
    """Ids, proposals, and how the drafter read the prompt."""
    proposals = []
    noted = noting(draft, proposed=lambda _, proposal: proposals.append(proposal.tokens.tolist()))
    decoder = Decoder(noted, seed=3)
    ids = generated(family, decoder)
    paths = {key: n for key, n in decoder.stats.paths.items() if key.startswith("drafter")}
    return ids, proposals, paths


READERS = {
    "eagle": DRAFTS["eagle"],
    "vispec": lambda: random_draft("vispec"),
    "flash": lambda: random_draft("flash"),
    "dream": lambda: random_draft("dream"),
    "dream_uniform": lambda: Dream(random_model("dream", first_row="uniform"), depth=4, top_k=2),
}


@pytest.mark.parametrize("name", READERS)
def test_a_drafter_reads_rows_without_their_padding(name, monkeypatch):
    family, draft = "llama" if name == "eagle" else "llava", READERS[name]
    *expected, paths = drafted(family, draft())
    assert paths == {"drafter prefill masked": 1}
    seams.read_by_rows(monkeypatch)
    *found, paths = drafted(family, draft())
    assert found == expected
    assert paths == {"drafter prefill by rows": 3}
    wrong = seams.edited(FeatureSession._read, "width - tokens, 0", "0, 0")
    monkeypatch.setattr(FeatureSession, "_read", wrong)
    assert list(drafted(family, draft())[:2]) != expected


@pytest.mark.parametrize("draft", [Sparse(2, length=3), CacheCopyDrafter(length=3)])
def test_drafts_of_a_model_that_reads_images(draft, monkeypatch):
    expected, _, accepted = decoded("llava", draft)
    seams.read_by_rows(monkeypatch)
    ids, paths, again = decoded("llava", draft)
    assert ids == expected
    assert again == accepted
    # where attention is read, rows stay together
    assert paths == ({"prefill masked": 1} if isinstance(draft, Sparse) else {"prefill by rows": 3})


@pytest.mark.parametrize("batch", [1, 3])
def test_a_negative_prompt_of_another_length(batch, path):
    negative = words(5, rows=batch)
    call = {"guidance_scale": 1.8, "negative_prompt_ids": negative, "batch": batch}
    ids, paths, _ = decoded("llama", RandomTrees(), **call)
    assert ids == generated("llama", **call)
    assert ids != generated("llama", batch=batch)
    lengths = {*inputs_of("llama", batch)["attention_mask"].sum(1).tolist(), 5}
    assert paths == ({path: len(lengths)} if "rows" in path else chunks(lengths))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_exits_of_inner_layers(family, monkeypatch):
    expected, before, _ = decoded(family, guide=DoLa((0.0, 1.0)))
    assert before == {"prefill masked": 1}
    seams.read_in_chunks(monkeypatch, TOKENS)
    ids, paths, _ = decoded(family, guide=DoLa((0.0, 1.0)))
    assert paths["prefill in chunks"] > 2
    assert ids == expected != generated(family)


def test_pixels_of_another_branch(monkeypatch):
    inputs = inputs_of("llava")
    call = {"mm_request": ["a", "b", "c"], "mm_inputs": {"pixel_values": inputs["pixel_values"]}}
    expected, _, _ = decoded("llava", guide=VCD(1.0), **call)
    seams.read_by_rows(monkeypatch)
    ids, paths, _ = decoded("llava", guide=VCD(1.0), **call)
    assert ids == expected != generated("llava")
    assert paths == {"prefill by rows": 6}


def test_no_tensor_is_as_large_as_the_square_of_the_prompt(monkeypatch):
    seams.read_by_rows(monkeypatch)
    ids = words(96, rows=3)
    mask = torch.ones_like(ids)
    mask[0, :30], mask[2, :77] = 0, 0
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5}
    decoder = Decoder()
    generated("llama", Decoder(), **call)  # the first call may check the model
    with Dense(96) as made:
        generated("llama", decoder, **call)
    assert not made.types
    assert prefills(decoder) == {"prefill by rows": 3}


def test_a_chunk_makes_a_mask_of_its_own_size(monkeypatch):
    seams.read_in_chunks(monkeypatch, 8)
    call = {"input_ids": words(), "attention_mask": torch.ones(1, 96).long(), "max_new_tokens": 5}
    for family in ("llama", "mistral"):
        decoder = Decoder()
        with Dense(96) as made:
            generated(family, decoder, **call)
        assert not made.types
        assert prefills(decoder) == {"prefill in chunks": 12}


# Mistakes, each of which changes what is generated


def positions_off_by_one(patch):
    old = "logical = (begin - pads + self.left_out)[:, None] + depths"
    seams.RUN_BRANCHES.edit(patch, old, f"{old} + (piece is not None and piece.first > 0)")


def padding_counted(patch):
    seams.RUN_BRANCHES.edit(patch, "pads = piece.of(pads)", "pads = piece.of(0 * pads)")


def blind_to_earlier_chunks(patch):
    seams.FIRST_SEEN.plant(patch, lambda sound: lambda self, first: first)


def window_forgotten(patch):
    seams.BLOCK_MASK.plant(patch, seams.without_window)


def written_at_the_left(patch):
    old = "self.keys[rows, :, piece.columns]"
    seams.WRITE_PIECE.edit(patch, old, "self.keys[rows, :, : piece.last]")


@pytest.mark.parametrize(
    ("mistake", "family"),
    [
        (positions_off_by_one, "llama"),
        (padding_counted, "llama"),
        (blind_to_earlier_chunks, "llama"),
        (window_forgotten, "mistral"),
        (window_forgotten, "gemma3"),
        (written_at_the_left, "llama"),
    ],
)
def test_a_mistake_is_noticed(mistake, family, monkeypatch):
    expected = generated(family)
    seams.read_in_chunks(monkeypatch, 99 if mistake is written_at_the_left else TOKENS)
    assert decoded(family)[0] == expected
    mistake(monkeypatch)
    assert decoded(family)[0] != expected


# Decisions


def cost(window=None, eager=False):
    model = text_model("llama", "eager" if eager else "sdpa")
    return Cost(model.config, 4, [window])


def test_one_pass_as_long_as_memory_allows():
    assert cost().chunk(1, 20_000) == 20_000
    assert cost().chunk(1, 10**7) < 10**7
    for masked in (cost(window=64), cost(eager=True)):
        assert masked.chunk(1, 512) == 512
        assert 64 <= masked.chunk(1, 20_000) < 20_000
        assert masked.chunk(8, 20_000) <= masked.chunk(1, 20_000)
    assert cost(window=4096).chunk(1, 4000) == 4000


def test_a_chunk_covers_its_window_and_no_more():
    assert [cost(window=4).seen(first) for first in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert Cost(None, 4, [4, None]).seen(10) == 0


def test_paths_are_counted_over_calls():
    stats, call = Stats(), Stats()
    call.paths["prefill causal"] += 2
    stats.merge(call)
    stats.merge(call)
    assert stats.paths == Counter({"prefill causal": 4})
    assert "paths" not in stats.as_dict()
    stats.reset()
    assert not stats.paths
