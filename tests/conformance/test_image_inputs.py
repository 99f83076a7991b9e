"""`mmdecode.generate` in image mode: accepted and refused inputs, and decoding of codes."""

import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

import mmdecode
from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.draft.amateur import Amateur
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.jacobi import Jacobi
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.errors import (
    IncompatibleError,
    InputError,
    OptionError,
    ShapeError,
    UnknownNameError,
    UnsupportedModelError,
)
from mmdecode.guide.guidance import Guidance
from mmdecode.image_ar.raster import generate
from mmdecode.image_ar.sampling import Sampling
from mmdecode.models import chameleon_vq, vq
from tests.support.tiny import text_model
from tests.support.tiny_images import (
    BEGINS,
    CODES,
    DRAFTS,
    EOL,
    FIRST,
    GRID,
    MODELS,
    OPENS,
    PAD,
    SEED,
    STARTS,
    conditions,
    draw,
    image_model,
    llamagen,
    opening,
    rows_of_ids,
)

FAMILIES = pytest.mark.parametrize("family", MODELS)
WRITTEN = ["janus", "emu3", "chameleon"]


# Texts


def tokenizer():
    """Letters, and what opens images, with the ids of the tiny models."""
    words = {f"<{i}>": i for i in range(FIRST)}
    names = {chr(97 + i): 14 + i for i in range(26)} | {"*": 3} | {str(n): 4 + n for n in range(10)}
    special = {"<racm3:break>": OPENS, "<|image token|>": STARTS, "<s>": BEGINS, "<pad>": PAD}
    taken = {**names, **special}
    vocabulary = {w: i for w, i in words.items() if i not in taken.values()} | taken
    own = Tokenizer(models.WordLevel(vocabulary, "<0>"))
    own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=own,
        bos_token="<s>",
        pad_token="<pad>",
        extra_special_tokens={"boi_token": "<racm3:break>", "starts": "<|image token|>"},
    )


@pytest.mark.parametrize("family", WRITTEN)
def test_texts_are_read_as_ids(family):
    words = tokenizer()
    begins = "" if family == "emu3" else "<s>"  # its processor begins the sequence itself
    texts = [f"{begins}cat", f"{begins}a"]
    ids = [[BEGINS, *([14 + ord(c) - 97 for c in text]), *opening(family)] for text in ("cat", "a")]
    options = {"do_sample": False, "guidance": 2.5, **({"grid": GRID} if family == "emu3" else {})}
    expected = generate(image_model(family), **rows_of_ids(ids), **options)
    negative = {"negative_prompt": f"{begins}bad"}
    for given in (words, type("Processor", (), {"tokenizer": words})()):
        found = generate(image_model(family), prompt=texts, tokenizer=given, **options)
        assert torch.equal(found.tokens, expected.tokens)
    away = generate(image_model(family), prompt=texts, tokenizer=words, **negative, **options)
    assert not torch.equal(away.tokens, expected.tokens)
    with pytest.raises(OptionError, match="pass tokenizer"):
        generate(image_model(family), prompt="cat", **options)
    with pytest.raises(OptionError, match="give one of them"):
        generate(image_model(family), prompt="cat", tokenizer=words, **rows_of_ids(ids), **options)
    with pytest.raises(OptionError, match="nothing to draw"):
        generate(image_model(family), **options)


def test_emu3_takes_the_grid_that_its_processor_names():
    given = conditions("emu3")
    rows = draw("emu3")
    sizes = [list(given.pop("grid"))] * 3
    model = image_model("emu3")
    named = {"request": ["image 0", "image 1", "image 2"], "seed": SEED, "guidance": 2.5}
    for image_sizes in (sizes, torch.tensor(sizes)):
        found = generate(model, **given, **named, image_sizes=image_sizes, do_sample=False)
        assert torch.equal(found.tokens, rows)
        assert found.codes.shape == (3, *GRID)
    for wrong in ({}, {"image_sizes": [[3, 4], [4, 4]]}, {"grid": (3, 4), "image_sizes": [[4, 3]]}):
        with pytest.raises(OptionError, match=r"give one, grid=\(rows, columns\)"):
            generate(model, **given, **wrong)
    with pytest.raises(OptionError, match=r"a prompt asks for 3\*4 codes, but grid is 4\*4"):
        generate(model, **given, grid=(4, 4))


# Refusals


@pytest.mark.parametrize("family", WRITTEN)
def test_prompts_that_do_not_open_an_image_or_are_too_long_are_refused(family):
    model, options = image_model(family), {"grid": GRID} if family == "emu3" else {}
    with pytest.raises(OptionError, match="a prompt does not end with"):
        generate(model, input_ids=torch.tensor([[BEGINS, 5, 6]]), **options)
    with pytest.raises(OptionError, match=r"has 128 positions: shorten the prompt to \d+"):
        generate(model, **rows_of_ids([[BEGINS, *[5] * 120, *opening(family)]]), **options)
    given = rows_of_ids([[BEGINS, 5, *opening(family)]])
    right = {**given, "attention_mask": given["attention_mask"].clone()}
    right["attention_mask"][:, -1] = 0
    with pytest.raises(IncompatibleError, match="on the left"):
        generate(model, **right, **options)
    with pytest.raises(OptionError, match="2 negative prompts for 1 images"):
        negative = given["input_ids"].repeat(2, 1)
        generate(model, **given, **options, negative_prompt_ids=negative)


@pytest.mark.parametrize("label", [-1, 6, 1000])
def test_classes_out_of_range_are_refused(label):
    with pytest.raises(OptionError, match=rf"class {label} does not exist; expected 0 to 5"):
        draw("llamagen", classes=[0, label, 1])


def test_conditions_of_another_kind_or_shape_are_refused():
    features = torch.zeros(1, 3, 12)
    for family, given, error, message in (
        ("llamagen", {"features": features}, OptionError, "conditioned on classes; give classes"),
        ("llamagen", {}, OptionError, "conditioned on classes"),
        ("llamagen", {"classes": [[1]]}, ShapeError, "give a list"),
        ("llamagen", {"classes": [1], "prompt": "x"}, OptionError, "no option named 'prompt'"),
        ("llamagen_captions", {"classes": [1]}, OptionError, "on captions; give features"),
        ("llamagen_captions", {"features": features[..., 1:]}, ShapeError, r"\(batch, n, 12\)"),
        (
            "llamagen_captions",
            {"features": features, "mask": torch.ones(1, 4)},
            ShapeError,
            r"expected \(1, 3\), as the features",
        ),
        (
            "llamagen_captions",
            {"features": torch.zeros(1, 9, 12)},
            OptionError,
            "a caption has 9 tokens, the model reads 6: shorten it",
        ),
        ("imagegpt", {"count": 0}, OptionError, "count must be 1"),
    ):
        with pytest.raises(error, match=message):
            generate(image_model(family), **given)


def test_padding_beyond_the_slots_of_a_caption_is_no_caption():
    given = conditions("llamagen_captions")
    longer = {
        "features": F.pad(given["features"], (0, 0, 0, 3)),
        "mask": F.pad(given["mask"], (0, 3)),
    }
    assert torch.equal(draw("llamagen_captions", **longer), draw("llamagen_captions"))


def test_guidance_needs_something_to_lead_away_from():
    with pytest.raises(IncompatibleError, match="leave guidance out, or set it to 1"):
        draw("imagegpt", guidance=2.0)
    assert torch.equal(draw("imagegpt", guidance=None), draw("imagegpt", guidance=1))


def test_a_window_is_no_larger_than_the_image():
    with pytest.raises(OptionError, match="a window of 17 tokens is larger than the image"):
        draw("llamagen", Decoder(Jacobi(17)))


def test_parts_that_do_not_fit_image_mode_are_refused():
    with pytest.raises(IncompatibleError, match="each would set the distribution"):
        draw("llamagen", Decoder(guide="guidance:scale=2"), guidance=3.0)
    with pytest.raises(IncompatibleError, match="use guide 'guidance'"):
        draw("llamagen", Decoder(guide="cfg:scale=2"), guidance=None)
    with pytest.raises(IncompatibleError, match="use guide 'guidance'"):
        draw("llamagen", Decoder(Amateur(2)))
    with pytest.raises(IncompatibleError, match="a draft or guide that reads layers"):
        draw("imagegpt", Decoder(LayerSkip(exit_layer=1, length=2)))
    with pytest.raises(UnsupportedModelError, match="to write image tokens"):
        generate(text_model("llama"), classes=[1])
    with pytest.raises(OptionError, match="no option named 'clusters'"):
        registry.image_adapter_for(image_model("llamagen"), clusters=1)


def test_a_guide_of_the_decoder_is_the_guidance():
    expected = draw("llamagen", guidance=Guidance(2.0, until=5))
    assert torch.equal(draw("llamagen", Decoder(guide=Guidance(2.0, 5)), guidance=None), expected)
    decoder = Decoder()
    draw("llamagen", decoder)
    assert decoder.guide is None and decoder.seed is None and decoder.stats.calls == 1


def test_unguided_rows_are_read_alone(monkeypatch):
    widths = []
    forward = registry.image_adapter_class(image_model("llamagen")).forward
    monkeypatch.setattr(
        registry.image_adapter_class(image_model("llamagen")),
        "forward",
        lambda self, tokens, *args: (widths.append(len(tokens)), forward(self, tokens, *args))[1],
    )
    for guidance, rows in ((1.0, 3), (2.0, 6)):
        widths.clear()
        draw("llamagen", guidance=guidance)
        assert set(widths) == {rows}


# The front door


class Collector:
    def __init__(self):
        self.tokens, self.ended = [], 0

    def put(self, tokens):
        self.tokens += tokens.flatten().tolist()

    def end(self):
        self.ended += 1


def test_the_front_door_leads_to_image_mode():
    model, small = image_model("llamagen"), image_model("llamagen", seed=1)
    given = {"classes": [3], "seed": 5}
    expected = generate(model, **given).tokens
    streamer = Collector()
    found = mmdecode.generate(model, mode="image", streamer=streamer, **given)
    assert torch.equal(found.tokens, expected)
    assert streamer.tokens == expected[0].tolist() and streamer.ended == 1
    decoder = Decoder()
    drafted = mmdecode.generate(model, mode="image", decoder=decoder, draft_model=small, **given)
    assert torch.equal(drafted.tokens, expected) and decoder.stats.drafted
    with pytest.raises(UnknownNameError, match="did you mean 'image'"):
        mmdecode.generate(model, mode="images", **given)
    with pytest.raises(OptionError, match="no stop_strings"):
        mmdecode.generate(model, torch.ones(1, 1), mode="image", **given)
    streamer = Collector()
    with pytest.raises(OptionError):
        mmdecode.generate(model, mode="image", streamer=streamer, classes=[77])
    assert streamer.ended == 1


@pytest.mark.parametrize(
    ("family", "guidance", "sampling_options"),
    [
        ("llamagen", 4.0, {"top_k": 2000}),
        ("llamagen_captions", 7.5, {"top_k": 1000}),
        ("janus", 5.0, {}),
        ("emu3", 3.0, {"top_k": 2048}),
        ("chameleon", 3.0, {"temperature": 0.7, "top_p": 0.9}),
        ("imagegpt", 1.0, {"top_k": 40}),
    ],
)
def test_a_family_samples_as_published_by_default(family, guidance, sampling_options):
    given = {**conditions(family), "seed": SEED}
    found = generate(image_model(family), **given)
    explicit = generate(
        image_model(family), guidance=guidance, sampling=Sampling(**sampling_options), **given
    )
    assert torch.equal(found.tokens, explicit.tokens)
    other = generate(image_model(family), guidance=guidance, sampling=Sampling(2.0), **given)
    assert not torch.equal(found.tokens, other.tokens)


@pytest.mark.parametrize("family", ["emu3", "chameleon"])
def test_a_head_that_is_no_plain_matrix_says_the_same(family, monkeypatch):
    expected = draw(family)
    model = image_model(family)
    monkeypatch.setitem(model._modules, "lm_head", torch.nn.Sequential(model.lm_head))
    assert torch.equal(draw(family), expected)


def test_equal_seeds_give_equal_images_and_others_do_not():
    one, two, three = (draw("llamagen", do_sample=True, seed=s).tolist() for s in (1, 1, 2))
    assert one == two != three


# Drafting models


@pytest.mark.one_in(2)
@FAMILIES
def test_a_drafting_model_is_named_by_its_folder(family, tmp_path, monkeypatch):
    small = image_model(family, seed=1)
    if family == "janus":  # as published: otherwise the id that opens an image is not read again
        monkeypatch.setattr(small.generation_config, "_from_model_config", False)
    small.save_pretrained(tmp_path)
    loads, load = [], type(small).from_pretrained
    monkeypatch.setattr(
        type(small), "from_pretrained", lambda *a, **k: loads.append(1) or load(*a, **k)
    )
    plain = Decoder(Assistant(small, 3), accept="fastest")
    named = Decoder(f"assistant:model={tmp_path},length=3", accept="fastest")
    rows = [draw(family, decoder, do_sample=True) for decoder in (plain, named, named)]
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[1], rows[2])
    assert named.stats.acceptance_rate == plain.stats.acceptance_rate
    assert len(loads) == 1, "it is loaded once"


def test_a_drafting_model_of_other_images_is_refused(tmp_path):
    image_model("imagegpt").save_pretrained(tmp_path)
    for draft, message in (
        (Assistant(llamagen(grid_size=2)), "they generate 2 x 2 and 4 x 4 codes"),
        (Assistant(llamagen(vocab_size=CODES + 1)), "or have different tokens for the codes"),
        (f"assistant:model={tmp_path}", "its model type 'imagegpt'"),
    ):
        with pytest.raises(IncompatibleError, match=message):
            draw("llamagen", Decoder(draft))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="names a model_type"):
        Decoder(f"assistant:model={tmp_path / 'empty'}")


@pytest.mark.parametrize("family", ["llamagen", "emu3"])
@pytest.mark.parametrize("draft", ["past_a_row", "itself"])
def test_captured_rounds_draw_the_same(family, draft, taped):
    expected = draw(family, do_sample=True)
    decoder = Decoder(DRAFTS[draft](family), compile=True)
    assert torch.equal(draw(family, decoder, do_sample=True), expected)
    assert taped
    if draft == "itself":
        assert decoder.stats.acceptance_rate == 1.0


# Pixels


@FAMILIES
def test_codes_become_pixels_and_neighbours_are_those_of_the_decoder(family):
    colours = torch.rand(CODES, 3) * 2 - 1
    options = {
        "imagegpt": {"clusters": colours},
        "chameleon": {"vq": tiny_chameleon_vq()},
        "emu3": {"grid": GRID},
    }.get(family, {})
    if family.startswith("llamagen"):
        options = {"vq": tiny_vq()}
    model = image_model(family)
    adapter = registry.image_adapter_for(model, **options)
    codes = torch.arange(adapter.layout.rows * adapter.layout.columns).flip(0) % CODES
    codes = codes.view(1, adapter.layout.rows, adapter.layout.columns).repeat(2, 1, 1)
    pixels, book = adapter.decode(codes), adapter.codebook()
    assert pixels.shape[:2] == (2, 3) and pixels.dtype == torch.float32
    assert float(pixels.min()) >= 0 and float(pixels.max()) <= 1
    assert len(book) == CODES
    with torch.no_grad():
        if family == "janus":
            own = model.decode_image_tokens(codes.flatten(1)).permute(0, 3, 1, 2)
        elif family == "emu3":
            tokens = F.pad(codes + FIRST, (0, 1), value=EOL).flatten(1)
            tokens = torch.cat([tokens, tokens[:, :3]], 1)
            own = model.decode_image_tokens(image_tokens=tokens, height=GRID[0], width=GRID[1])
        elif family == "imagegpt":
            own = colours[codes].permute(0, 3, 1, 2)
        else:
            own = options["vq"].decode_codes(codes)
    torch.testing.assert_close(pixels, ((own + 1) / 2).clamp(0, 1))
    with pytest.raises(ShapeError, match=r"expected \(batch, "):
        adapter.decode(codes[:, :-1])
    if family in ("janus", "llamagen"):
        torch.testing.assert_close(book.norm(dim=-1), torch.ones(CODES))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("family", ["llamagen", "imagegpt"])
def test_what_codes_stand_for_lies_where_the_model_is(family, moved):
    """Tensors without data stand for those of another device."""
    colours = {"clusters": torch.zeros(CODES, 3).tolist()}
    options = {"vq": tiny_vq()} if family == "llamagen" else colours
    model = copy.deepcopy(image_model(family))
    if moved:
        adapter = registry.image_adapter_for(model, **options)
        model.to("meta")
    else:
        adapter = registry.image_adapter_for(model.to("meta"), **options)
        assert adapter.layout.ids.device == model.device
    assert adapter.codebook().device == model.device
    assert adapter.codebook() is adapter.codebook(), "it is copied once"


def tiny_vq(**options):
    torch.manual_seed(0)
    config = {
        "codebook_size": CODES,
        "codebook_dim": 4,
        "channels": 32,
        "channel_multipliers": (1, 1),
        "residual_blocks": 1,
        "latent_channels": 8,
        **options,
    }
    return vq.VQModel(vq.VQConfig(**config)).eval()


def tiny_chameleon_vq(**options):
    torch.manual_seed(0)
    config = {
        "codebook_size": CODES,
        "codebook_dim": 4,
        "channels": 32,
        "channel_multipliers": (1, 2),
        "residual_blocks": 1,
        "latent_channels": 8,
        **options,
    }
    return chameleon_vq.ChameleonVQDecoder(chameleon_vq.ChameleonVQConfig(**config)).eval()


def grouped(x, weights, name):
    return F.silu(F.group_norm(x, 32, weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-6))


def convolved(x, weights, name):
    weight = weights[f"{name}.weight"]
    return F.conv2d(x, weight, weights[f"{name}.bias"], padding=weight.shape[-1] // 2)


def block(x, weights, name):
    inner = convolved(grouped(x, weights, f"{name}.norm1"), weights, f"{name}.conv1")
    inner = convolved(grouped(inner, weights, f"{name}.norm2"), weights, f"{name}.conv2")
    if f"{name}.nin_shortcut.weight" in weights:
        x = convolved(x, weights, f"{name}.nin_shortcut")
    return x + inner


def attended(x, weights, name):
    inner = F.group_norm(x, 32, weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"], 1e-6)
    q, k, v = (convolved(inner, weights, f"{name}.{n}").flatten(2) for n in "qkv")
    share = (q.mT @ k * x.shape[1] ** -0.5).softmax(-1)
    return x + convolved((v @ share.mT).view_as(x), weights, f"{name}.proj_out")


def published(codes, weights, levels, blocks):
    """Pixels by the published layout, operation by operation."""
    x = F.embedding(codes, weights["quantize.embedding.weight"]).permute(0, 3, 1, 2)
    x = convolved(x, weights, "post_quant_conv")
    x = convolved(x, weights, "decoder.conv_in")
    x = block(x, weights, "decoder.mid.block_1")
    x = block(attended(x, weights, "decoder.mid.attn_1"), weights, "decoder.mid.block_2")
    for level in reversed(range(levels)):
        for index in range(blocks + 1):
            x = block(x, weights, f"decoder.up.{level}.block.{index}")
            if f"decoder.up.{level}.attn.{index}.q.weight" in weights:
                x = attended(x, weights, f"decoder.up.{level}.attn.{index}")
        if level:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = convolved(x, weights, f"decoder.up.{level}.upsample.conv")
    return convolved(grouped(x, weights, "decoder.norm_out"), weights, "decoder.conv_out")


def published_weights(widths, blocks, attends=False):
    """Random weights in the published layout, what is not read among them."""
    generator = torch.Generator().manual_seed(3)
    weights = {"quantize.embedding.weight": (CODES, 4), "loss.logvar": (1,)}

    def conv(name, out, into, size):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = (out, into, size, size), (out,)

    def norm(name, width):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = (width,), (width,)

    def residual(name, into, out):
        norm(f"{name}.norm1", into), conv(f"{name}.conv1", out, into, 3)
        norm(f"{name}.norm2", out), conv(f"{name}.conv2", out, out, 3)
        if into != out:
            conv(f"{name}.nin_shortcut", out, into, 1)

    def attention(name, width):
        norm(f"{name}.norm", width)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{name}.{part}", width, width, 1)

    conv("encoder.conv_in", widths[0], 3, 3), conv("quant_conv", 4, 8, 1)
    conv("post_quant_conv", 8, 4, 1), conv("decoder.conv_in", widths[-1], 8, 3)
    residual("decoder.mid.block_1", widths[-1], widths[-1])
    residual("decoder.mid.block_2", widths[-1], widths[-1])
    attention("decoder.mid.attn_1", widths[-1])
    width = widths[-1]
    for level in reversed(range(len(widths))):
        for index in range(blocks + 1):
            residual(f"decoder.up.{level}.block.{index}", width, widths[level])
            width = widths[level]
            if attends and level == len(widths) - 1:
                attention(f"decoder.up.{level}.attn.{index}", width)
        if level:
            conv(f"decoder.up.{level}.upsample.conv", width, width, 3)
    norm("decoder.norm_out", width), conv("decoder.conv_out", 3, width, 3)
    return {n: torch.randn(s, generator=generator) * 0.2 for n, s in weights.items()}


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_chameleons_decoder_is_read_from_its_published_layout(tmp_path, bare, attends):
    widths, blocks = [32, 64, 64], 2
    weights = published_weights(widths, blocks, attends)
    torch.save(weights if bare else {"state_dict": weights, "epoch": 1}, tmp_path / "vqgan.ckpt.pt")
    model = chameleon_vq.load_published(tmp_path / "vqgan.ckpt.pt", codebook_size=CODES)
    codes = torch.arange(24).view(2, 3, 4) % CODES
    with torch.no_grad():
        torch.testing.assert_close(
            model.decode_codes(codes),
            published(codes, weights, len(widths), blocks),
            atol=1e-4,
            rtol=1e-4,
        )
    model.save_pretrained(tmp_path / "own")
    again = chameleon_vq.ChameleonVQDecoder.from_pretrained(tmp_path / "own")
    assert torch.equal(again(codes), model(codes))
    with pytest.raises(InputError, match="has a codebook of 24; expected 8192"):
        chameleon_vq.load_published(tmp_path / "vqgan.ckpt.pt", codebook_size=8192)
    torch.save({"state_dict": {"decoder.weight": torch.ones(1)}}, tmp_path / "other.pt")
    with pytest.raises(InputError, match="give a checkpoint of this architecture"):
        chameleon_vq.load_published(tmp_path / "other.pt")
    with pytest.raises(ShapeError):
        model.decode_codes(codes[0])


def test_what_makes_pixels_has_to_be_given_and_to_fit():
    for family, hint in (
        ("llamagen", "pass vq="),
        ("chameleon", "pass vq="),
        ("imagegpt", "pass clusters="),
    ):
        adapter = registry.image_adapter_for(image_model(family))
        with pytest.raises(IncompatibleError, match=hint):
            adapter.decode(torch.zeros(1, 4, 4).long())
        assert (adapter.codebook() is None) == (family != "chameleon")
    with pytest.raises(IncompatibleError, match="it has 9 codes, the model 24"):
        generate(image_model("llamagen"), classes=[1], vq=tiny_vq(codebook_size=9))
    with pytest.raises(IncompatibleError, match="it has 9 codes, the model 24"):
        registry.image_adapter_for(image_model("chameleon"), vq=tiny_chameleon_vq(codebook_size=9))
    with pytest.raises(ShapeError, match=r"expected \(24, 3\)"):
        registry.image_adapter_for(image_model("imagegpt"), clusters=torch.zeros(5, 3))


def test_grey_levels_are_pixels_and_their_own_neighbours():
    adapter = registry.image_adapter_for(llamagen(vocab_size=5, grid_size=2, grey=True))
    pixels = adapter.decode(torch.tensor([[[0, 4], [2, 1]]]))
    assert pixels[0].tolist() == [[[0.0, 1.0], [0.5, 0.25]]] * 3
    assert adapter.codebook().tolist() == [[0.0], [0.25], [0.5], [0.75], [1.0]]
