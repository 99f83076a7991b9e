"""LlamaGen checkpoints, against what the reference's own code computed on them."""

import functools
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, DynamicCache

from mmdecode.engine.cache import RaggedCache
from mmdecode.engine.masks import block_mask, chain
from mmdecode.errors import InputError, OptionError, ShapeError
from mmdecode.image_ar.sampling import Sampling, guided
from mmdecode.models import llamagen, vq
from mmdecode.models.llamagen import (
    LlamaGenConfig,
    LlamaGenForImageGeneration,
    left_padded,
    padding_mask,
    rotary_table,
)

DATA = Path(__file__).parents[1] / "data" / "golden" / "llamagen"
CONFIG = json.loads((DATA / "config.json").read_text())
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
PIXELS = {"atol": 2e-4, "rtol": 0.0}
LAYOUTS = ("model", "module", "state_dict", "bare")


@functools.cache
def numbers(name):
    return load_file(DATA / f"{name}_io.safetensors")


@functools.cache
def class_model(layout="model"):
    return llamagen.load_published(DATA / f"gpt_c2i_{layout}.pt", grid_size=4, num_heads=3)


@functools.cache
def caption_model():
    return llamagen.load_published(DATA / "gpt_t2i_model.pt", grid_size=3, num_heads=2)


@functools.cache
def tokenizer():
    return vq.load_published(DATA / "vq.pt", codebook_size=128)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def full_logits(model, condition, codes, mask=None):
    """Logits of the reference's uncached pass, over slots and all codes."""
    embeds = torch.cat([model.embed_condition(condition), model.model.embed_tokens(codes)], 1)
    return model(inputs_embeds=embeds, attention_mask=mask).logits


# The transformer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_logits_of_classes(layout):
    model, io = class_model(layout), numbers("c2i")
    classes, codes = io["full.in.cond"], io["full.in.idx"]
    torch.testing.assert_close(full_logits(model, classes, codes), io["full.out.logits"], **CLOSE)
    nothing = full_logits(model, model.unconditional(classes), codes)
    torch.testing.assert_close(nothing, io["full.out.logits_uncond"], **CLOSE)
    distributions = model.code_logits(classes, codes)
    torch.testing.assert_close(distributions, io["full.out.logits"][:, :-1], **CLOSE)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_of_captions_match(attention):
    model, io = caption_model(), numbers("t2i")
    model.set_attn_implementation(attention)
    features, codes = io["full.in.caption"], io["full.in.idx"]
    mask = io["full.in.attn_mask"].bool()[:, None]
    last = slice(119, None)  # the fixture keeps what predicts codes, and one more
    logits = full_logits(model, features, codes, mask)[:, last]
    torch.testing.assert_close(logits, io["full.out.logits"], **CLOSE)
    nothing = full_logits(model, model.unconditional(features), codes, mask)[:, last]
    torch.testing.assert_close(nothing, io["full.out.logits_uncond"], **CLOSE)
    plain = full_logits(model, features, codes)[:, last]
    torch.testing.assert_close(plain, io["full_nomask.out.logits"], **CLOSE)
    slots = io["pad.out.mask_left"].bool()
    distributions = model.code_logits(features, codes, slots)
    torch.testing.assert_close(distributions, io["full.out.logits"][:, :-1], **CLOSE)


def test_captions_are_padded_on_the_left():
    io = numbers("t2i")
    features, mask = left_padded(io["pad.in.caption_embs"], io["pad.in.emb_masks"])
    assert torch.equal(features, io["pad.out.caption_left"])
    assert torch.equal(mask, io["pad.out.mask_left"].bool())
    assert torch.equal(padding_mask(mask, 129)[:, 0], io["full.in.attn_mask"].bool())


@pytest.mark.parametrize("name", ["c2i", "t2i"])
def test_rotations_match_bit_for_bit_and_slots_have_none(name):
    model = class_model() if name == "c2i" else caption_model()
    table = rotary_table(model.config)
    assert torch.equal(table, numbers(name)["rope.out.freqs_cis"])
    assert table[: model.config.slots].count_nonzero() == 0


def rows_of(model, conditions, mask, codes, cache, step):
    """Logits of cached passes: slots first, then ``step`` codes at a time, ``(R, n, V)``."""
    slots = model.config.slots
    length = slots + codes.shape[1] - 1
    seen = padding_mask(mask, length) if mask is not None else None
    embeds = torch.cat(
        [model.embed_condition(conditions), model.model.embed_tokens(codes[:, :-1])], 1
    )
    found, start = [], 0
    for end in [slots, *range(slots + step, length, step), length]:
        block = None if seen is None else seen[:, :, start:end, :end]
        output = model(
            inputs_embeds=embeds[:, start:end], attention_mask=block, past_key_values=cache
        )
        found.append(output.logits[:, -1:] if start == 0 else output.logits)
        start = end
    return torch.cat(found, 1)


@pytest.mark.parametrize("step", [1, 3])
def test_cached_steps_and_their_guidance_match(step):
    io = numbers("c2i")
    codes = io["cached.in.idx"].repeat(2, 1)
    rows = rows_of(class_model(), io["cached.in.cond_rows"], None, codes, DynamicCache(), step)
    torch.testing.assert_close(rows, io["cached.out.logits_rows"], **CLOSE)
    distribution = guided(*rows.chunk(2), CONFIG["c2i"]["cases"]["cfg_scale"])
    torch.testing.assert_close(distribution, io["cached.out.guided"], **CLOSE)


@pytest.mark.parametrize("step", [1, 3])
def test_cached_steps_of_padded_captions_match(step):
    io = numbers("t2i")
    codes = io["full.in.idx"].repeat(2, 1)
    mask = io["cached.in.mask_rows"].bool()
    rows = rows_of(caption_model(), io["cached.in.caption_rows"], mask, codes, DynamicCache(), step)
    torch.testing.assert_close(rows, io["cached.out.logits_rows"], **CLOSE)
    distribution = guided(*rows.chunk(2), CONFIG["t2i"]["cases"]["cfg_scale"])
    torch.testing.assert_close(distribution, io["cached.out.guided"], **CLOSE)


def test_the_engines_cache_gives_the_same_rows():
    model, io = class_model(), numbers("c2i")
    codes, classes = io["cached.in.idx"].repeat(2, 1), io["cached.in.cond_rows"]
    cache = RaggedCache(model.config.num_hidden_layers, len(classes), codes.device)
    zero, found = torch.zeros(len(classes), dtype=torch.long), []
    blocks = [model.embed_condition(classes)]
    blocks += model.model.embed_tokens(codes[:, :-1]).split(3, 1)
    for block in blocks:
        parents, order = chain(block.shape[1], codes.device)
        cache.open(32)
        mask = block_mask(cache.start, zero, parents, order, 32, block.dtype)
        positions = cache.start[:, None] + torch.arange(block.shape[1])
        found.append(
            model(
                inputs_embeds=block,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
            ).logits
        )
        cache.commit(zero + block.shape[1])
    torch.testing.assert_close(torch.cat(found, 1), io["cached.out.logits_rows"], **CLOSE)


def generated(name, scale, sampling=None, interval=-1, feed=None, masked=True):
    """Codes step by step, what enters the sampler, and the distribution it is given."""
    io, sampling = numbers(name), sampling or Sampling()
    if name == "c2i":
        model, mask = class_model(), None
        conditions = io["full.in.cond"]
    else:
        model, conditions = caption_model(), io["full.in.caption"]
        mask = io["pad.out.mask_left"].bool() if masked else None
    conditions = torch.cat([conditions, model.unconditional(conditions)])
    codes = torch.zeros(len(conditions) // 2, 0, dtype=torch.long)
    entering, distributions = [], []
    for index in range(model.config.image_tokens):
        padded = torch.nn.functional.pad(codes, (0, 1)).repeat(2, 1)
        slots = None if mask is None else mask.repeat(2, 1)
        given, nothing = model.code_logits(conditions, padded, slots)[:, -1].chunk(2)
        alone = scale == 1 or -1 < interval < index - 1
        entering.append(given if alone else guided(given, nothing, scale))
        distributions.append(sampling.warp(entering[-1]).softmax(-1))
        code = distributions[-1].argmax(-1) if feed is None else feed[:, index]
        codes = torch.cat([codes, code[:, None]], 1)
    return codes, torch.stack(entering, 1), torch.stack(distributions, 1)


@pytest.mark.parametrize(
    ("name", "case", "guided_until"),
    [
        ("c2i", "greedy_nocfg", None),
        ("c2i", "greedy_cfg", -1),
        ("c2i", "greedy_cfg_interval", 5),
        ("t2i", "greedy_nocfg", None),
        ("t2i", "greedy_cfg", -1),
        ("t2i", "greedy_cfg_nomask", -1),
    ],
)
def test_greedy_codes_match(name, case, guided_until):
    scale = 1.0 if guided_until is None else CONFIG[name]["cases"]["cfg_scale"]
    codes, entering, _ = generated(
        name, scale, interval=guided_until or -1, masked="nomask" not in case
    )
    assert torch.equal(codes, numbers(name)[f"{case}.out.codes"])
    torch.testing.assert_close(entering, numbers(name)[f"{case}.out.guided"], **CLOSE)


@pytest.mark.parametrize("name", ["c2i", "t2i"])
def test_the_distribution_handed_to_the_sampler_matches(name):
    io, cases = numbers(name), CONFIG[name]["cases"]
    options = {k: v for k, v in cases["sampled"].items() if k != "seed"}
    sampled = io["sampled_cfg.out.codes"]
    _, entering, distributions = generated(
        name, cases["cfg_scale"], Sampling(**options), feed=sampled
    )
    torch.testing.assert_close(entering, io["sampled_cfg.out.guided"], **CLOSE)
    torch.testing.assert_close(distributions, io["sampled_cfg.out.probs"], atol=1e-5, rtol=0.0)


# The tokenizer


def test_images_are_encoded_and_decoded_as_in_the_reference():
    model, io = tokenizer(), numbers("vq")
    latents = model.latents(io["encode.in.image"])
    torch.testing.assert_close(latents, io["encode.out.prequant"], **CLOSE)
    codes = model.encode(io["encode.in.image"])
    assert torch.equal(codes, io["encode.out.indices"])
    torch.testing.assert_close(model.lookup(codes), io["encode.out.quant"])
    image = model.decode(io["decode.in.quant"])
    torch.testing.assert_close(image, io["decode.out.image"], **PIXELS)


def test_codes_are_decoded_as_in_the_reference():
    model, io = tokenizer(), numbers("vq")
    batch, _, height, width = io["decode_code.in.shape"].tolist()
    codes = io["decode_code.in.codes"].view(batch, height, width)
    torch.testing.assert_close(model.lookup(codes), io["decode_code.out.entry"])
    torch.testing.assert_close(model.decode_codes(codes), io["decode_code.out.image"], **PIXELS)


@pytest.mark.parametrize("name", ["c2i", "t2i"])
def test_generated_codes_become_the_pixels_of_the_reference(name):
    io = numbers(name)
    side = class_model().config.grid_size if name == "c2i" else caption_model().config.grid_size
    codes = io["image.in.codes"].unflatten(1, (side, side))
    torch.testing.assert_close(tokenizer().decode_codes(codes), io["image.out.image"], **PIXELS)


# Saving


@pytest.mark.parametrize("load", [class_model, caption_model, tokenizer])
def test_a_saved_model_is_the_same(load, tmp_path):
    model = load()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    for name, value in {**model.state_dict(), **dict(model.named_buffers())}.items():
        assert torch.equal(value, {**again.state_dict(), **dict(again.named_buffers())}[name]), name


def test_transformers_finds_the_model_by_its_folder(tmp_path):
    class_model().save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LlamaGenConfig)
    assert AutoConfig.from_pretrained(tmp_path).num_classes == 7


# What is refused


def test_heads_are_asked_for_unless_the_width_is_published():
    with pytest.raises(InputError, match=r"width 48, .*give num_heads"):
        llamagen.load_published(DATA / "gpt_c2i_model.pt", grid_size=4)
    assert llamagen.PUBLISHED_HEADS[1280] == 20


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"weights": {"a": torch.zeros(1)}}, "holds weights; expected 'tok_embeddings.weight'"),
        ({}, "holds nothing"),
        ({"model": {"quantize.embedding.weight": torch.zeros(1)}}, "holds model; expected"),
    ],
)
def test_another_layout_is_refused(content, says, tmp_path):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(InputError, match=says):
        llamagen.load_published(tmp_path / "other.pt", grid_size=4, num_heads=3)


def test_a_tokenizer_is_no_transformer_nor_the_other_way_round():
    with pytest.raises(InputError, match=r"expected 'tok_embeddings\.weight'"):
        llamagen.load_published(DATA / "vq.pt", grid_size=4, num_heads=3)
    with pytest.raises(InputError, match=r"expected 'quantize\.embedding\.weight'"):
        vq.load_published(DATA / "gpt_c2i_model.pt")


def test_another_codebook_is_refused():
    with pytest.raises(InputError, match="codebook of 128; expected 16384"):
        vq.load_published(DATA / "vq.pt", codebook_size=16384)


def test_weights_that_do_not_fit_are_named(tmp_path):
    weights = torch.load(DATA / "gpt_c2i_bare.pt", weights_only=True)
    del weights["norm.weight"]
    weights["output.weight"] = weights["output.weight"][:100]
    weights["strange"] = torch.zeros(2)
    torch.save(weights, tmp_path / "damaged.pt")
    with pytest.raises(InputError) as refused:
        llamagen.load_published(tmp_path / "damaged.pt", grid_size=4, num_heads=3)
    for part in (
        "in 3 weights",
        "model.norm.weight: missing, expected (48,)",
        "lm_head.weight: (100, 48), expected (128, 48)",
        "strange: (2,), expected nothing",
    ):
        assert part in str(refused.value)


def test_the_grid_is_asked_for_unless_its_table_is_stored():
    assert llamagen.load_published(DATA / "gpt_c2i_module.pt", num_heads=3).config.grid_size == 4
    with pytest.raises(InputError, match="give grid_size"):
        llamagen.load_published(DATA / "gpt_c2i_model.pt", num_heads=3)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    class Touch:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    for name, content in (("code.pt", pickle.dumps(Touch())), ("text.pt", b"no weights")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="cannot be read as weights"):
            llamagen.load_published(tmp_path / name, grid_size=4, num_heads=3)
    assert not (tmp_path / "ran").exists()


def test_safetensors_of_the_same_names_are_read(tmp_path):
    weights = torch.load(DATA / "gpt_c2i_bare.pt", weights_only=True)
    save_file(weights, tmp_path / "weights.safetensors")
    model = llamagen.load_published(tmp_path / "weights.safetensors", grid_size=4, num_heads=3)
    assert torch.equal(model.lm_head.weight, class_model().lm_head.weight)


def test_conditions_of_another_kind_are_refused():
    features = numbers("t2i")["full.in.caption"]
    with pytest.raises(ShapeError, match="expected one class id per image, 0 to 6"):
        class_model().embed_condition(features)
    with pytest.raises(ShapeError, match="trained on classes"):
        class_model().embed_condition(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"expected \(batch, 120, 24\)"):
        caption_model().embed_condition(features[:, :100])


@pytest.mark.parametrize(
    "options", [{"num_attention_heads": 5}, {"num_classes": 0}, {"caption_slots": 3}]
)
def test_shapes_that_make_no_model_are_refused(options):
    small = {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    with pytest.raises(OptionError, match="expected"):
        LlamaGenForImageGeneration(LlamaGenConfig(**small | options))


def test_pixels_and_codes_of_another_shape_are_refused():
    with pytest.raises(ShapeError, match="multiples of 2"):
        tokenizer().encode(torch.zeros(1, 3, 5, 4))
    with pytest.raises(ShapeError, match="reshape them to the grid"):
        tokenizer().decode_codes(torch.zeros(1, 16, dtype=torch.long))


# What would break an image without an error


def test_slots_turned_by_nothing_would_give_other_logits():
    model, io = class_model(), numbers("c2i")
    full_logits(model, io["full.in.cond"], io["full.in.idx"])
    (table,) = model.model.rotary.tables.values()
    table[0, :, 0] = 1  # the identity
    try:
        wrong = full_logits(model, io["full.in.cond"], io["full.in.idx"])
    finally:
        table[0, :, 0] = 0
    assert (wrong - io["full.out.logits"]).abs().max() > 0.05


def test_codes_of_any_length_would_give_other_pixels():
    model, io = tokenizer(), numbers("vq")
    batch, _, height, width = io["decode_code.in.shape"].tolist()
    rows = model.quantize.embedding(io["decode_code.in.codes"].view(batch, height, width))
    wrong = model.decode(rows.permute(0, 3, 1, 2))
    assert (wrong - io["decode_code.out.image"]).abs().max() > 0.01
