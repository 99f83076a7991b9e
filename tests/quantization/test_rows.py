"""The oracle of int8 targets: logits of drafted blocks equal those of single steps, to the bit."""

import copy
import threading

import pytest
import torch

import mmdecode
from mmdecode import registry
from mmdecode.adapters.audio import lean_step
from mmdecode.decoder import Decoder
from mmdecode.engine.adapter import Prompt
from mmdecode.engine.cache import RaggedCache, bucket
from mmdecode.engine.masks import block_mask
from mmdecode.errors import UnsupportedModelError
from mmdecode.quantization import attention, quantize
from mmdecode.quantization.modules import Int8Linear
from mmdecode.quantization.source import Int8Source, Int8States
from tests.support import tiny, tiny_vlm
from tests.support.int8 import counted
from tests.support.seams import edited
from tests.support.tiny_models import whisper

STATES, LAYERS = 150, 2


@pytest.fixture(scope="module")
def speech():
    """Wide enough that its products and attention take the ways of real ones."""
    sizes = {"encoder_layers": 1, "decoder_layers": LAYERS, "max_source_positions": STATES}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "d_model": 128}
    ids = {"vocab_size": 500, "pad_token_id": 0, "decoder_start_token_id": 1}
    model = whisper(**sizes, **heads, **widths, **ids, max_target_positions=200)
    dice = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5, generator=dice)
    return quantize(model)


@torch.no_grad()
def logits(model, blocks, batch, tree=None, rows=None):
    """Logits of the same tokens, read in blocks; ``tree`` gives depths and ancestors of nodes."""
    adapter = registry.adapter_for(model)
    assert adapter.steps_unmasked(32), "the lean step agrees with the modules"
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(500, (8, sum(blocks)), generator=dice)
    states = torch.randn(8, STATES, adapter.source_width, generator=dice)
    chosen = slice(batch) if rows is None else rows
    ids, states = ids[chosen], states[chosen]
    count = len(ids)
    cache = RaggedCache(adapter.num_layers, count, torch.device("cpu"))
    mask = torch.ones(count, blocks[0], dtype=torch.bool)
    past = adapter.open(cache, Prompt(ids=ids, mask=mask, inputs={"source": states}))
    begin, found = 0, []
    for size in blocks:
        start = torch.full((count,), begin)
        cache.set_start(start)
        visible = bucket(begin + size)
        cache.open(visible)
        depths = torch.arange(size)[None]
        seen = block_mask(start, past.pads, depths, None, visible, torch.float32, None)
        states = adapter.forward(ids[:, begin : begin + size], seen, start[:, None] + depths, past)
        found.append(adapter.head(states))
        begin += size
    return torch.cat(found, 1)


def blocks_of(size, total=96):
    """A prompt of four tokens, then blocks; the cache grows past two buckets."""
    return [4, *[size] * (total // size), *([total % size] if total % size else [])]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("threads", "batch"),
    [(1, 1), (1, 8), *(pytest.param(2, n, marks=pytest.mark.slow) for n in (1, 8))],
)
def test_blocks_equal_single_steps(speech, batch, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    registry.adapter_for(speech)  # compares the lean step with the modules
    try:
        with counted() as count:
            expected = logits(speech, blocks_of(1), batch)
        # eight products of a layer, two of cross-attention and two more for each row, and the head
        passes = 97
        assert count.products == passes * (LAYERS * (10 + 2 * batch) + 1)
        for size in (2, 3, 5, 8, 17, 33, 64):
            assert torch.equal(logits(speech, blocks_of(size), batch), expected), size
        alone = logits(speech, blocks_of(5), batch, rows=slice(batch - 1, batch))
        assert torch.equal(alone[0], expected[-1]), "a row alone"
    finally:
        torch.set_num_threads(before)


def test_attention_over_a_block_would_not_do(speech, monkeypatch):
    def together(query, key, value, mask=None, scale=None):
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
        return found.transpose(1, 2)

    monkeypatch.setattr(lean_step, "attend_by_rows", together)
    expected = logits(speech, blocks_of(1), 1)
    assert not torch.equal(logits(speech, blocks_of(5), 1), expected)


# Whole decoding, of every kind of model: logits of all new tokens


TEXT = ("llama", "qwen2", "gemma2")
VISION = ("llava", "qwen2_vl", "llava_next", "idefics3", "gemma3")


def fresh(family):
    model = tiny_vlm.vision_model(family) if family in VISION else tiny.model_of(family)
    return quantize(copy.deepcopy(model))


def decoded(model, family, draft, batch=3, compile=False, **options):
    inputs = tiny_vlm.vision_inputs(family, batch) if family in VISION else None
    inputs = inputs or tiny.inputs_of(family, batch)
    decoder = Decoder(draft, seed=3, compile=compile)
    found = mmdecode.generate(
        model,
        decoder=decoder,
        max_new_tokens=20,
        return_dict_in_generate=True,
        output_logits=True,
        **inputs,
        **options,
    )
    return found.sequences, torch.stack(found.logits), decoder.stats


DRAFTS = ("quantized:length=5", "recycling:nodes=12", "layer_skip:exit_layer=1", "jacobi")


FAMILIES = [*TEXT, *VISION, "whisper", "moonshine", "moonshine_padded", "moonshine_streaming"]
QUICK = ("llama", "gemma3", "llava", "whisper", "moonshine")
"""Families of the default suite; the others are among the slow tests."""


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES],
)
def test_drafted_logits_are_the_undrafted_ones(family):
    try:
        model = fresh(family)
    except Exception as error:
        assert "query by query" in str(error), error  # says what to do
        return
    ids, expected, _ = decoded(model, family, None)
    kept = 0
    for draft in DRAFTS:
        with counted() as count:
            found, logits, stats = decoded(model, family, draft)
        assert torch.equal(found, ids), draft
        rows = expected.isfinite()
        assert torch.equal(logits[rows], expected[rows]), draft
        assert count.products >= 7 * 2 * stats.passes
        kept += stats.acceptance_length > 1
    assert kept >= 2, "blocks of several tokens were accepted"
    one = decoded(model, family, "quantized:length=5", batch=1)
    assert torch.equal(one[1], decoded(model, family, None, batch=1)[1])


def test_compile_leaves_int8_models_as_they_are():
    model = fresh("llama")
    expected = decoded(model, "llama", None)[1]
    with pytest.warns(UserWarning, match="nothing is compiled: int8 products"):
        found = decoded(model, "llama", None, compile=True)[1]
    assert torch.equal(found, expected)


def test_two_threads_share_a_model():
    model = fresh("llama")
    expected = decoded(model, "llama", None)[1]
    found = {}

    def run(name, draft):
        found[name] = decoded(model, "llama", draft)[1]

    threads = [
        threading.Thread(target=run, args=(i, draft)) for i, draft in enumerate((None, DRAFTS[1]))
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert torch.equal(found[0], expected) and torch.equal(found[1], expected)


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("run_attention_by_rows", "if path != shown", "if False"),
        ("run_attention_by_rows", "if len(shown) > 0", "if False"),
        ("_path", "slots[hole - 1 :]", "slots[hole:]"),
    ],
)
def test_keys_of_trees_have_to_be_moved_and_put_back(monkeypatch, function, old, new):
    model = fresh("llama")
    expected = decoded(model, "llama", None)[1]
    right = getattr(attention, function)
    wrong = edited(getattr(right, "function", right), old, new)
    monkeypatch.setattr(attention, function, wrong)
    assert not torch.equal(decoded(model, "llama", "recycling:nodes=12")[1], expected)


# Attention query by query


def random_attention(heads=4, groups=2, queries=7, keys=40, seed=0):
    dice = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, queries, 16), (2, groups, keys, 16), (2, groups, keys, 16)]
    return [torch.randn(*shape, generator=dice) for shape in shapes]


@pytest.mark.parametrize("additive", [False, True])
def test_it_is_attention(additive):
    query, key, value = random_attention()
    dice = torch.Generator().manual_seed(1)
    mask = torch.rand(2, 1, 7, 40, generator=dice) < 0.5
    mask[..., 0] = True
    stored = key.clone(), value.clone()
    given = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    found = attention.attend_by_rows(query, key, value, given if additive else mask)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, enable_gqa=True
    )
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-6)
    assert torch.equal(key, stored[0]) and torch.equal(value, stored[1]), "put back"


@torch.inference_mode()
def test_masks_of_inference_mode_are_read():
    query, key, value = random_attention()
    mask = torch.ones(7, 40, dtype=torch.bool).tril(33).expand(2, 1, 7, 40)
    found = attention.attend_by_rows(query, key, value, mask)
    assert torch.equal(attention.attend_by_rows(query, key, value, mask.clone()), found)
    whole = torch.ones(2, 1, 7, 40, dtype=torch.bool)
    attention.attend_by_rows(query, key, value, whole)
    whole.copy_(mask)
    assert torch.equal(attention.attend_by_rows(query, key, value, whole), found), "changed"


def test_biases_are_refused():
    query, key, value = random_attention()
    with pytest.raises(UnsupportedModelError, match="bias"):
        attention.attend_by_rows(query, key, value, torch.randn(1, 1, 7, 40))


# Cross-attention to the encoder's states in int8


@pytest.mark.parametrize("width", [64, 576])  # one group of heads, and two of three heads
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_int8_sources_are_near_and_by_rows(width, padded):
    dice = torch.Generator().manual_seed(0)
    heads = 6 if width == 576 else 4
    states = torch.randn(2, 300, 40, generator=dice)
    states[:, :, 7] *= 30  # a channel that is large in all states
    keys, values = torch.nn.Linear(40, width, bias=False), torch.nn.Linear(40, width)
    keys.weight.data[:, 7] /= 30
    queries = torch.randn(2, 6, heads, width // heads, generator=dice)
    read = torch.arange(300) < torch.tensor([[300], [200]]) if padded else None
    rounded = [Int8Linear.of(one) for one in (keys, values)]
    source = Int8Source(Int8States.of(states, read), *rounded)
    layer = type("Layer", (), {"scale": None})
    found = source.attend(layer, queries)

    def attention(projections):
        given = (one(states).unflatten(2, (heads, -1)).transpose(1, 2) for one in projections)
        mask = None if read is None else read[:, None, None]
        given = queries.transpose(1, 2), *given, mask
        whole = torch.nn.functional.scaled_dot_product_attention(*given)
        return whole.transpose(1, 2).flatten(2)

    expected = attention((keys, values))
    error, usual = ((one - expected).norm() for one in (found, attention(rounded)))
    assert error < 1.5 * usual
    for node in range(6):
        assert torch.equal(source.attend(layer, queries[:, [node]])[:, 0], found[:, node])
    row = source.select_rows(torch.tensor([1]))
    assert torch.equal(row.attend(layer, queries[1:]), found[1:])


def test_states_are_rounded_once_for_a_target_and_its_drafter():
    states = torch.randn(1, 30, 40)
    assert Int8States.of(states) is Int8States.of(states)
    before = Int8States.of(states)
    assert before is not Int8States.of(states.clone())
    states.mul_(2)
    assert torch.equal(Int8States.of(states).scale, 2 * before.scale), "changed in place"
    with torch.inference_mode():
        states = torch.randn(1, 30, 40)
        before = Int8States.of(states)
        states.mul_(2)
        assert torch.equal(Int8States.of(states).scale, 2 * before.scale), "not counted"
