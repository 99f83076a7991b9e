"""Prompts that begin alike: their prefix is read once, and every token is what it was."""

import copy

import pytest
import torch
import torch.nn.functional as F

from mmdecode import generate
from mmdecode.decoder import Decoder
from mmdecode.draft import features
from mmdecode.draft.eagle import Eagle
from mmdecode.engine import prompt_cache
from mmdecode.engine.prompt_cache import PromptCache
from mmdecode.engine.shared_prefill import SharedReader
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.testing.drafts import RandomTrees
from tests.draft.test_seeing import random_draft
from tests.engine.test_prefill import eagle
from tests.support import seams
from tests.support.tiny import DifferentError
from tests.support.tiny_vlm import (
    CONFIGS,
    DRAFTS,
    IMAGE,
    QWEN,
    SIZES,
    SQUARE,
    image_tokens,
    pixels,
    vision_model,
)

NEW = 8
WHOLE = ("paligemma", "paligemma2")
"""Families whose prompts are read whole."""
FAMILIES = pytest.mark.parametrize("family", CONFIGS)
CAUSAL = [family for family in CONFIGS if family not in WHOLE]


@pytest.fixture(autouse=True)
def share_always(monkeypatch):
    """As soon as a single token is."""

    def pays(reader, reserved):
        read = (
            sum(reader.lengths) - sum(reader.counts) + sum(reader.counts[r] for r in reader.reads)
        )
        return read < sum(reader.lengths)

    monkeypatch.setattr(SharedReader, "pays", pays)


def asked(family, rows, seed=0):
    """A prompt for each of ``rows``, a image (``None``: words alone) and a question.

    A image has words of its own before it; questions differ in length.
    """
    found, owners, parts, sizes = [], [], [], SIZES.get(family, [SQUARE])
    for row, (image, question) in enumerate(rows):
        words = torch.Generator().manual_seed(100 + (image or 0))
        tokens = torch.randint(1, 60, (2,), generator=words).tolist()
        if image is not None:
            size = sizes[image % len(sizes)]
            tokens += [IMAGE] * image_tokens(family, size)
            parts.append(pixels(family, [size], 1, [0], seed=7 + image + 50 * seed))
            owners.append(row)
        words = torch.Generator().manual_seed(question)
        tokens += torch.randint(1, 60, (2 + question % 4,), generator=words).tolist()
        found.append(tokens)
    width = max(map(len, found))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in found])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in found])
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family.startswith("paligemma"):
        inputs["token_type_ids"] = torch.zeros_like(ids)
    elif family == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    elif family in QWEN:
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    if family in ("idefics3", "smolvlm") and parts:
        values = torch.zeros(len(rows), 1, 3, 8, 8)
        for row, part in zip(owners, parts, strict=True):
            values[row] = part["pixel_values"][0]
        return inputs | {"pixel_values": values}
    for name in parts[0] if parts else ():
        inputs[name] = torch.cat([part[name] for part in parts])
    return inputs


FIRST = [(0, 1), (1, 2), (0, 3), (None, 4), (0, 6), (1, 7)]
AGAIN = [(1, 9), (0, 11), (2, 12), (0, 1)]


def ids_of(family, rows, decoder, cache=None, seed=0, **options):
    call = {"max_new_tokens": NEW, "do_sample": False} | options
    inputs = asked(family, rows, seed)
    if decoder is None:
        return vision_model(family).generate(**inputs, **call).tolist()
    model, kept = vision_model(family), {"decoder": decoder, "prompt_cache": cache}
    return generate(model, **inputs, **call, **kept).tolist()


def total(family, rows):
    return int(asked(family, rows)["attention_mask"].sum())


def check(family, make, batches=(FIRST, AGAIN), **options):
    """Compares calls that share a cache with calls without one; returns the tokens by kind."""
    cache, decoder = PromptCache(), make()
    for rows in batches:
        expected = ids_of(family, rows, make(), **options)
        found = ids_of(family, rows, decoder, cache, **options)
        if found != expected:
            raise DifferentError(f"{found} instead of {expected}")
    return decoder.stats


@pytest.mark.one_in(5)
@FAMILIES
@pytest.mark.parametrize("draft", ["none", "trees"])
def test_tokens_are_those_of_generate(family, draft):
    cache = PromptCache()
    decoder = Decoder(None if draft == "none" else RandomTrees())
    for rows in (FIRST, AGAIN):
        assert ids_of(family, rows, decoder, cache) == ids_of(family, rows, None)
    counts = decoder.stats.prompt_tokens
    total = sum(int(asked(family, rows)["attention_mask"].sum()) for rows in (FIRST, AGAIN))
    assert sum(counts.values()) == total
    if family in WHOLE:
        assert not counts["reused"] and not cache.count
    else:
        prefix = 2 + image_tokens(family, SIZES.get(family, [SQUARE])[0])
        assert counts["reused"] >= 4 * prefix  # image 0: two rows of the first call, two later
        assert decoder.stats.paths["prefill continued"] == 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", CAUSAL)
def test_one_row_at_a_time(family):
    """Batches of one find what the batch before them has read."""
    stats = check(family, lambda: Decoder(), [[row] for row in FIRST])
    assert stats.paths["prefill continued"] == 3
    assert stats.prompt_tokens["reused"]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_plain_generate_of_transformers_takes_a_cache(family):
    cache, decoder = PromptCache(), Decoder()
    for rows in (FIRST, AGAIN):
        found = vision_model(family).generate(
            **asked(family, rows),
            max_new_tokens=NEW,
            do_sample=False,
            custom_generate=decoder,
            mm_prompt_cache=cache,
        )
        assert found.tolist() == ids_of(family, rows, None)
    assert decoder.stats.prompt_tokens["reused"]


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_an_image_is_encoded_once(family):
    model, runs = vision_model(family), []
    tower = model.base_model.vision_tower if family == "llava" else model.base_model.visual
    hook = tower.register_forward_hook(lambda *given: runs.append(given))
    try:
        cache, decoder = PromptCache(), Decoder()
        ids_of(family, [(0, n) for n in range(6)], decoder, cache)
        ids_of(family, [(0, n) for n in range(6, 9)], decoder, cache)
    finally:
        hook.remove()
    assert len(runs) == 1
    if family == "llava":
        assert len(runs[0][2].last_hidden_state) == 1


@pytest.mark.parametrize("processors", [{"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_processors_and_several_sequences(family, processors):
    options = {**processors, "do_sample": True, "num_return_sequences": 2, "top_p": 0.9}
    check(family, lambda: Decoder("lookup", seed=3), **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("guide", ["vcd", "m3id", "dola", "pai", "damro", "rbd"])
def test_guides_decode_what_they_did(family, guide):
    stats = check(family, lambda: Decoder("lookup", guide, seed=3))
    reused = stats.prompt_tokens["reused"]
    assert bool(reused) == (guide != "pai"), "prompts whose attention is edited are read whole"


def test_noise_of_a_question_is_of_that_question():
    """With vcd the changed image of a row is its own, so only the main branch shares."""
    counts = [
        check("llava", lambda guide=guide: Decoder(guide=guide, seed=3)).prompt_tokens
        for guide in (None, "vcd")
    ]
    tokens = sum(int(asked("llava", rows)["attention_mask"].sum()) for rows in (FIRST, AGAIN))
    assert sum(counts[1].values()) == 2 * tokens
    assert counts[1]["reused"] <= counts[0]["reused"] + len(FIRST + AGAIN) * 2


def drafter(kind):
    if kind == "eagle":
        return Eagle(eagle(), depth=3, top_k=2, nodes=6)
    return random_draft(kind)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["eagle", "vispec", "dream", "flash"])
@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_drafters_keep_what_they_have_read(family, kind):
    cache, decoder, alone = PromptCache(), Decoder(drafter(kind)), Decoder(drafter(kind))
    for rows in (FIRST, AGAIN, AGAIN):
        mine, theirs = [], []
        found = ids_of(family, rows, decoder, cache, trace=mine)
        assert found == ids_of(family, rows, alone, trace=theirs)
        assert mine == theirs, "another draft"
    if kind != "dream":  # which reads the attention of the question
        assert decoder.stats.paths["drafter prefill continued"] == 3
    assert alone.stats.drafted


@pytest.mark.one_in(2)
@pytest.mark.parametrize("guide", ["vcd", "m3id", "rbd"])
@pytest.mark.parametrize("kind", ["eagle", "vispec"])
def test_drafters_that_follow_a_guide_share_too(kind, guide):
    """Branches of which one shares prefixes, and another reads its own prompt."""
    check("llava", lambda: Decoder(drafter(kind), guide, seed=3, draft_guided=True))


@pytest.mark.parametrize("kind", ["eagle", "vispec"])
def test_a_drafter_reads_a_prefix_once(kind, monkeypatch):
    passes = []
    sound = features.read_shared

    def counted(drafter, *given):
        kind = type(drafter)
        inner = kind.forward
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", lambda *a: passes.append(len(a[1].embeds)) or inner(*a))
            return sound(drafter, *given)

    monkeypatch.setattr(features, "read_shared", counted)
    cache, decoder = PromptCache(), Decoder(drafter(kind))
    for question in (3, 6):
        ids_of("llava", [(0, question), (0, question + 1)], decoder, cache)
    assert passes == [1, 2, 2]  # the prefix, the rest of both rows; then the rest alone


MATRIX_DRAFTS = [name for name in DRAFTS if not name.startswith("known")]
"""All but those that are given what is generated."""
MATRIX_ROWS = [(None, 1), ("vcd", 1)]
MATRIX_ROWS += [(guide, 8) for guide in (None, "vcd", "m3id", "dola", "pai", "rbd")]
"""Guides with batches: rows alone are those of one guide and of none."""


@pytest.mark.one_in(160)
@pytest.mark.parametrize(("guide", "batch"), MATRIX_ROWS)
@pytest.mark.parametrize("draft", MATRIX_DRAFTS)
@FAMILIES
def test_every_family_draft_guide_and_batch(family, draft, guide, batch):
    rows = [(n % 3, n) for n in range(batch)]
    batches = [rows, [(image, question + 20) for image, question in rows]]

    def make():
        return Decoder(DRAFTS[draft](family, None), guide, seed=3)

    try:
        ids_of(family, rows, make())
    except IncompatibleError:
        pytest.skip("refused without a cache too")
    stats = check(family, make, batches)
    if family not in WHOLE and guide != "pai":
        assert stats.prompt_tokens["reused"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("draft", ["none", "lookup"])
@FAMILIES
def test_three_turns_of_a_conversation(family, draft):
    """Each turn has the answer of the one before, and more words."""
    model, cache = vision_model(family), PromptCache(whole=True)
    decoder, reused = Decoder(DRAFTS[draft](family, None)), []
    inputs = asked(family, [(0, 1), (1, 2), (0, 3)])
    for turn in range(3):
        call = {**inputs, "max_new_tokens": NEW, "do_sample": False}
        before = decoder.stats.prompt_tokens["reused"]
        found = generate(model, **call, decoder=decoder, prompt_cache=cache)
        assert found.tolist() == model.generate(**call).tolist()
        reused.append(decoder.stats.prompt_tokens["reused"] - before)
        old, words = inputs["input_ids"], torch.arange(3).repeat(3, 1) + 7 + turn
        answer = found[:, old.shape[1] :] % 50 + 1  # a random model writes placeholders too
        inputs["input_ids"] = torch.cat([old, answer, words], 1)
        more = NEW + 3
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                value = int(name == "attention_mask")
                inputs[name] = F.pad(inputs[name], (0, more), value=value)
    if family in WHOLE:
        assert reused == [0, 0, 0]
    else:
        assert reused[1] == total(family, [(0, 1), (1, 2), (0, 3)])
        assert reused[2] > reused[1]


# What is the same prefix


def reused(decoder, family, rows, cache, **options):
    before = decoder.stats.prompt_tokens["reused"]
    ids_of(family, rows, decoder, cache, **options)
    return decoder.stats.prompt_tokens["reused"] - before


def test_the_same_words_with_another_image_are_another_prefix():
    cache, decoder = PromptCache(), Decoder()
    assert not reused(decoder, "llava", [(0, 1)], cache)
    assert not reused(decoder, "llava", [(0, 2)], cache, seed=1)
    assert reused(decoder, "llava", [(0, 3)], cache, seed=1) == 6


def test_changed_weights_read_again():
    model, cache, decoder = copy.deepcopy(vision_model("llava")), PromptCache(), Decoder()

    def call(question, draft=decoder, kept=cache):
        inputs = asked("llava", [(0, question)])
        found = generate(
            model, **inputs, max_new_tokens=NEW, do_sample=False, decoder=draft, prompt_cache=kept
        )
        return found.tolist()

    call(1)
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.k_proj.weight.mul_(-1)
    assert call(2) == call(2, Decoder(), None)
    model.get_decoder().layers[1].mlp.up_proj.weight.data.mul_(-1)  # no new version
    assert call(2) == call(2, Decoder(), None)
    assert not decoder.stats.prompt_tokens["reused"]
    cache.clear()
    with torch.autocast("cpu", torch.bfloat16):
        call(2)
    assert call(2) == call(2, Decoder(), None)
    assert not decoder.stats.prompt_tokens["reused"]
    call(3)
    assert decoder.stats.prompt_tokens["reused"]
    handle = model.get_decoder().layers[0].register_forward_hook(lambda *given: None)
    before = decoder.stats.prompt_tokens["reused"]
    call(4)
    handle.remove()
    assert decoder.stats.prompt_tokens["reused"] == before
    assert cache.count == 3
    other = copy.deepcopy(model)
    del model
    model = other
    call(5)
    assert cache.count == 1, "prefixes of a model that is gone are dropped"


def test_the_least_recently_used_is_dropped():
    cache, decoder = PromptCache(), Decoder()
    ids_of("llava", [(0, 1)], decoder, cache)
    cache.max_bytes = 2 * cache.nbytes
    for image in (1, 0, 2):  # 0 is used again, so 1 goes
        ids_of("llava", [(image, 5)], decoder, cache)
    assert cache.count == 2 and cache.nbytes <= cache.max_bytes
    assert reused(decoder, "llava", [(0, 2)], cache) == 6
    assert not reused(decoder, "llava", [(1, 2)], cache)
    cache.clear()
    assert not cache.count and not cache.nbytes


def test_a_prefix_that_does_not_fit_is_shared_by_its_batch_alone():
    cache, decoder = PromptCache(10), Decoder()
    assert reused(decoder, "llava", [(0, 1), (0, 2), (0, 3)], cache) == 12
    assert not cache.count
    assert not reused(decoder, "llava", [(0, 4)], cache)


def test_what_drafters_keep_counts():
    cache, decoder = PromptCache(), Decoder(drafter("eagle"))
    ids_of("llava", [(0, 1)], decoder, cache)
    alone = cache.nbytes
    cache = PromptCache(alone + 1)
    for image in range(3):
        ids_of("llava", [(image, 1)], decoder, cache)
        assert cache.nbytes <= cache.max_bytes
    assert cache.count == 1


def test_nothing_is_shared_without_a_cache():
    decoder = Decoder()
    for cache in (None, PromptCache(0)):
        assert not reused(decoder, "llava", [(0, 1), (0, 2)], cache)
    with pytest.raises(OptionError, match="expected bytes to keep"):
        PromptCache(-1)


def test_few_tokens_in_common_are_not_worth_a_pass(monkeypatch):
    monkeypatch.undo()
    cache, decoder = PromptCache(), Decoder()
    assert not reused(decoder, "llava", [(0, 1), (1, 1)], cache)
    assert "prefill continued" not in decoder.stats.paths
    assert cache.count == 2, "they are kept for later calls"


def test_the_rest_may_be_read_in_chunks(monkeypatch):
    seams.MASKED.plant(monkeypatch, lambda _: 1)
    seams.LEAST.plant(monkeypatch, lambda _: 2)
    stats = check("qwen2_5_vl", lambda: Decoder())
    assert stats.paths["prefill continued"] > 2


# Mutants


def off_by_one(patch):
    """Positions after the prefix are one too large."""
    sound = SharedReader._read_rest

    def moved(reader, runner, *rest):
        runner.left_out = runner.left_out + 1
        sound(reader, runner, *rest)
        runner.left_out = runner.left_out - 1

    patch.setattr(SharedReader, "_read_rest", moved)


MUTANTS = {
    "positions": off_by_one,
    "image of a neighbour": lambda patch: patch.setattr(prompt_cache, "digest", lambda inputs: b""),
    "slot of a neighbour": lambda patch: patch.setattr(
        SharedReader,
        "read",
        seams.edited(SharedReader.read, "cache.put(row, left,", "cache.put(row, max(left - 1, 0),"),
    ),
}


@pytest.mark.parametrize("mutant", ["positions", "image of a neighbour", "slot of a neighbour"])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "llava_next"])
def test_mutants_are_found(family, mutant, monkeypatch):
    if mutant == "image of a neighbour":  # the same words before another image
        batches = [[(0, 1), (0, 2)], [(0, 3)]]
        cache, decoder = PromptCache(), Decoder()
        MUTANTS[mutant](monkeypatch)
        found = [
            ids_of(family, rows, decoder, cache, seed=seed) for seed, rows in enumerate(batches)
        ]
        monkeypatch.undo()
        expected = [ids_of(family, rows, None, seed=seed) for seed, rows in enumerate(batches)]
        assert found != expected
        return
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(DifferentError):
        check(family, lambda: Decoder())
