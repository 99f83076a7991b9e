"""VAR, its tokenizer and CoDe, against what the reference's own code computed."""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmdecode.errors import InputError
from mmdecode.image_ar import next_scale
from mmdecode.image_ar.next_scale import Collaborative, Drawing, Known, NextScale
from mmdecode.image_ar.sampling import Sampling
from mmdecode.models import multiscale_vq, var
from mmdecode.models.multiscale_vq import convolution_of_scale

DATA = Path(__file__).parents[1] / "data" / "golden" / "var"
SETUP = json.loads((DATA / "config.json").read_text())
PATCH_NUMS = tuple(SETUP["patch_nums"])
LABELS = SETUP["cases"]["labels"]
LOGITS = {"atol": 2e-4, "rtol": 1e-4}
LATENTS = {"atol": 1e-4, "rtol": 0.0}
PROBS = {"atol": 1e-5, "rtol": 0.0}
PIXELS = {"atol": 2e-4, "rtol": 0.0}
LAST = ("top_k", "top_p", "temperature")

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


@functools.cache
def values(name):
    return load_file(DATA / f"{name}_io.safetensors")


@functools.cache
def tokenizer():
    return multiscale_vq.load_published(DATA / "vae.pth", patch_nums=PATCH_NUMS)


@functools.cache
def transformer(name):
    return var.load_published(DATA / f"var_{name}.pth")


def of(name, case):
    """Expected tensors of a case, and its inputs under ``in.``."""
    found = {k.removeprefix(f"{case}."): v for k, v in values(name).items()}
    return {k.removeprefix("out."): v for k, v in found.items() if k.startswith(("out.", "in."))}


# the tokenizer


def test_latents_codes_and_running_sums_match():
    expected = of("vae", "encode")
    latents = tokenizer().encode(expected["in.image"])
    torch.testing.assert_close(latents, expected["f"], **LATENTS)
    found = tokenizer().quantize(latents)
    assert torch.equal(found.codes, expected["codes"])
    torch.testing.assert_close(found.running, expected["fhat_per_scale"], **LATENTS)


def test_inputs_of_a_transformer_match():
    codes = of("vae", "encode")["codes"]
    found = tokenizer().inputs_of(codes)
    torch.testing.assert_close(found, values("vae")["var_input.out.x"], **LATENTS)


def test_decoded_pixels_match_after_every_scale_that_is_given():
    expected = of("vae", "decode")
    codes = expected["in.codes"]
    image = tokenizer().decode(tokenizer().f_hat_of(codes)).clamp(-1, 1)
    torch.testing.assert_close(image, expected["image"], **PIXELS)
    shown = tokenizer().image(tokenizer().f_hat_of(codes)) * 2 - 1
    torch.testing.assert_close(shown, expected["image"], **PIXELS)
    for index, tokens in enumerate((1, 5)):
        early = tokenizer().decode(tokenizer().f_hat_of(codes[:, :tokens])).clamp(-1, 1)
        torch.testing.assert_close(early, expected["image_first_scales"][:, index], **PIXELS)


def test_scales_use_the_published_convolutions():
    expected = values("vae")["phi.out.index_per_scale"].tolist()
    assert list(convolution_of_scale(6, 4)) == expected
    assert convolution_of_scale(10, 4) == (0, 0, 1, 1, 1, 2, 2, 3, 3, 3)


def test_shape_of_the_tokenizer_is_read_from_the_weights():
    config, expected = tokenizer().config, SETUP["vae"]
    assert config.codebook_size == expected["vocab_size"]
    assert config.codebook_dim == expected["z_channels"]
    assert config.channels == expected["ch"]
    assert list(config.channel_multipliers) == expected["ch_mult"]
    assert config.residual_blocks == expected["num_res_blocks"]
    assert config.kernel == expected["quant_conv_ks"]
    assert config.residual_convolutions == expected["share_quant_resi"]


# the transformer


@pytest.mark.parametrize("name", ["drafter", "refiner", "shared"])
def test_teacher_forced_logits_match(name):
    expected, model = of(f"var_{name}", "teacher"), transformer(name)
    found = model(expected["in.labels"], expected["in.x"])
    torch.testing.assert_close(found, expected["logits"], **LOGITS)
    null = torch.full_like(expected["in.labels"], model.null_class)
    found = model(null, expected["in.x"])
    torch.testing.assert_close(found, expected["logits_uncond"], **LOGITS)


@pytest.mark.parametrize("name", ["drafter", "refiner", "shared"])
def test_shape_of_the_transformer_is_read_from_the_weights(name):
    config, expected = transformer(name).config, SETUP["transformers"][name]
    assert tuple(config.patch_nums) == PATCH_NUMS
    assert config.num_classes == SETUP["num_classes"]
    assert config.num_hidden_layers == expected["depth"]
    assert config.hidden_size == expected["embed_dim"]
    assert config.num_attention_heads == expected["num_heads"]
    assert config.shared_adaln == expected["shared_aln"]
    assert config.attn_l2_norm == expected["attn_l2_norm"]


@pytest.mark.parametrize("broken", ["clamp", "position", "level"])
def test_mutants_of_the_transformer_do_not_match(broken, monkeypatch):
    expected, model = of("var_drafter", "teacher"), transformer("drafter")
    if broken == "clamp":
        monkeypatch.setattr(var, "MOST_SHARPNESS", 100.0)
    elif broken == "position":
        monkeypatch.setattr(model.pos_1LC, "data", model.pos_1LC.roll(1, 1))
    else:
        monkeypatch.setattr(model.lvl_embed.weight, "data", model.lvl_embed.weight.roll(1, 0))
    found = model(expected["in.labels"], expected["in.x"])
    assert (found - expected["logits"]).abs().max() > 1e-2


# pictures


@pytest.mark.parametrize("name", ["drafter", "refiner"])
@pytest.mark.parametrize("case", ["greedy_nocfg", "greedy_cfg"])
def test_greedy_images_match(name, case):
    expected = of(f"var_{name}", case)
    drawing = Drawing(guidance=SETUP["cases"][case]["cfg"], greedy=True)
    found = NextScale(transformer(name), tokenizer()).generate(LABELS, drawing=drawing)
    check_image(found, expected)


def check_image(found, expected):
    assert torch.equal(found.codes, expected["codes"])
    torch.testing.assert_close(found.f_hat, expected["fhat"], **LATENTS)
    torch.testing.assert_close(found.images, expected["image"], **PIXELS)


@dataclass(frozen=True)
class Recorded(Sampling):
    """A pipeline that notes what goes through it."""

    seen: list = field(default_factory=list)

    def warp(self, logits):
        distribution = super().warp(logits)
        self.seen.append((logits, distribution.softmax(-1)))
        return distribution


class Fed:
    """Noise under which the listed codes are sampled."""

    codes = None

    @classmethod
    def of(cls, seed, requests, device):
        return cls()

    def sample(self, scores, positions, role):
        return self.codes.gather(1, positions).expand(scores.shape[:-1])


def fed_back(monkeypatch, codes, samplings, guidance, generator):
    """Draws the listed codes; what each scale's logits were, and its distribution."""
    monkeypatch.setattr(Fed, "codes", codes)
    monkeypatch.setattr(next_scale, "Noise", Fed)
    seen = []
    recorded = tuple(
        Recorded(s.temperature, s.top_k, s.top_p, s.order, seen=seen) for s in samplings
    )
    found = generator.generate(LABELS, drawing=Drawing(guidance=guidance, sampling=recorded))
    return found, *(torch.cat([pair[part] for pair in seen], 1) for part in (0, 1))


@pytest.mark.parametrize("name", ["drafter", "refiner"])
def test_sampled_distributions_match_when_their_codes_are_fed_back(name, monkeypatch):
    expected, case = of(f"var_{name}", "sampled_cfg"), SETUP["cases"]["sampled_cfg"]
    samplings = [Sampling(top_k=case["top_k"], top_p=case["top_p"])] * len(PATCH_NUMS)
    generator = NextScale(transformer(name), tokenizer())
    found, logits, probs = fed_back(
        monkeypatch, expected["codes"], samplings, case["cfg"], generator
    )
    check_image(found, expected)
    torch.testing.assert_close(logits, expected["guided"], **LOGITS)
    torch.testing.assert_close(probs, expected["probs"], **PROBS)
    drawing = Drawing(guidance=case["cfg"])
    scored = generator.score(LABELS, expected["codes"], drawing=drawing)
    torch.testing.assert_close(scored, expected["guided"], **LOGITS)


@pytest.mark.parametrize("name", ["drafter", "refiner"])
def test_latents_after_every_scale_match(name):
    expected = of(f"var_{name}", "sampled_cfg")
    for scale, tokens in enumerate(tokenizer().starts[1:]):
        found = tokenizer().f_hat_of(expected["codes"][:, :tokens])
        torch.testing.assert_close(found, expected["fhat_per_scale"][:, scale], **LATENTS)


def drafted_by(count):
    return Collaborative(transformer("drafter"), transformer("refiner"), tokenizer(), count)


@pytest.mark.parametrize("count", [2, 4])
def test_greedy_images_of_two_models_match(count):
    expected = of("code", f"greedy_n{count}")
    between = {}
    found = drafted_by(count).generate(
        LABELS,
        drawing=Drawing(guidance=SETUP["cases"]["code"]["cfg"], greedy=True),
        on_scale=lambda scale, f_hat: between.update({scale: f_hat}),
    )
    check_image(found, expected)
    torch.testing.assert_close(between[count - 1], expected["draft_fhat"], **LATENTS)
    drafted = found.codes[:, : tokenizer().starts[count]]
    handed = tokenizer().inputs_of(drafted)
    torch.testing.assert_close(handed, expected["draft_next_inputs"], **LATENTS)


@pytest.mark.parametrize("count", [2, 4])
def test_sampled_distributions_of_two_models_match(count, monkeypatch):
    expected, code = of("code", f"sampled_n{count}"), SETUP["cases"]["code"]
    case = code["sampled"]
    samplings = [
        Sampling(temperature, top_k, case["top_p"], LAST)
        for temperature, top_k in zip(case["temp"], case["top_k"], strict=True)
    ]
    found, logits, probs = fed_back(
        monkeypatch, expected["codes"], samplings, code["cfg"], drafted_by(count)
    )
    check_image(found, expected)
    torch.testing.assert_close(logits, expected["guided"], **LOGITS)
    torch.testing.assert_close(probs, expected["probs"], **PROBS)


def test_temperature_first_gives_other_distributions_than_the_fixture(monkeypatch):
    expected, code = of("code", "sampled_n2"), SETUP["cases"]["code"]
    case = code["sampled"]
    samplings = [
        Sampling(temperature, top_k, case["top_p"])
        for temperature, top_k in zip(case["temp"], case["top_k"], strict=True)
    ]
    _, _, probs = fed_back(monkeypatch, expected["codes"], samplings, code["cfg"], drafted_by(2))
    assert (probs - expected["probs"]).abs().max() > 1e-3


def test_inpainted_images_match():
    expected = of("code", "inpaint")
    keep = expected["in.keep_mask"][:, 0] > 0
    known = Known.of(tokenizer(), expected["in.image"] / 2 + 0.5, keep)
    torch.testing.assert_close(known.running, expected["in.fhat_per_scale"], **LATENTS)
    drawing = Drawing(guidance=SETUP["cases"]["code"]["cfg"], greedy=True)
    found = NextScale(transformer("drafter"), tokenizer()).generate(
        LABELS, drawing=drawing, known=known
    )
    check_image(found, expected)


# files


def test_wrong_files_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(InputError, match=r"6 scales.*patch_nums has 10"):
        multiscale_vq.load_published(DATA / "vae.pth")
    with pytest.raises(InputError, match=r"'quantize\.embedding\.weight'"):
        multiscale_vq.load_published(DATA / "var_drafter.pth")
    with pytest.raises(InputError, match="'pos_1LC'"):
        var.load_published(DATA / "vae.pth")
    with pytest.raises(InputError, match="scales 1, 2, 3, 4, 5, 6"):
        var.load_published(DATA / "var_drafter.pth", patch_nums=(1, 2, 3))
    weights = torch.load(DATA / "var_refiner.pth", weights_only=True)
    del weights["head.bias"]
    torch.save(weights, tmp_path / "cut.pth")
    with pytest.raises(InputError, match=r"head\.bias: missing"):
        var.load_published(tmp_path / "cut.pth")
    vae = torch.load(DATA / "vae.pth", weights_only=True)
    torch.save({k: v for k, v in vae.items() if "quant_resi" not in k}, tmp_path / "plain.pth")
    with pytest.raises(InputError, match=r"vae_\*\.pth of VAR"):
        multiscale_vq.load_published(tmp_path / "plain.pth", patch_nums=PATCH_NUMS)


def test_pickled_code_is_not_run(tmp_path):
    torch.save({"pos_1LC": Path("x")}, tmp_path / "code.pth")
    with pytest.raises(InputError, match="cannot be read as weights"):
        var.load_published(tmp_path / "code.pth")


def test_saved_models_are_those_that_were_loaded(tmp_path):
    for model in (transformer("shared"), tokenizer()):
        model.save_pretrained(tmp_path)
        again = type(model).from_pretrained(tmp_path)
        assert all(v.equal(again.state_dict()[k]) for k, v in model.state_dict().items())
        assert again.config.to_dict() == type(model).from_pretrained(tmp_path).config.to_dict()
        assert list(again.config.patch_nums) == list(PATCH_NUMS)


def test_a_transformer_without_learned_sharpness_is_read_too(tmp_path):
    """Its heads are not seen in the weights; published models have as many as blocks."""
    shape = {"vocab_size": 8, "codebook_dim": 4, "patch_nums": (1, 2), "num_classes": 3}
    size = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2}
    config = var.VarConfig(**shape, **size, num_attention_heads=2, attn_l2_norm=False)
    model = var.VarForImageGeneration(config)
    weights = model.state_dict() | {"lvl_1L": torch.tensor([[0, 1, 1, 1, 1]])}
    weights["blocks.0.attn.zero_k_bias"] = torch.zeros(12)
    torch.save(weights, tmp_path / "plain.pth")
    assert var.load_published(tmp_path / "plain.pth").config.num_attention_heads == 2
    again = var.load_published(tmp_path / "plain.pth", num_heads=3)
    assert again.config.num_attention_heads == 3
    assert not again.config.attn_l2_norm
    weights["blocks.0.attn.zero_k_bias"] = torch.ones(12)
    torch.save(weights, tmp_path / "biased.pth")
    with pytest.raises(InputError, match="keys have no bias"):
        var.load_published(tmp_path / "biased.pth")
