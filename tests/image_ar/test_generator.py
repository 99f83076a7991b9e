"""`ImageGenerator`: seeds, batches, modes, what is given, and what is refused."""

import json
import weakref
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import T5Config, T5EncoderModel

import mmdecode as mm
from mmdecode.decoder import Decoder
from mmdecode.draft.jacobi import Jacobi
from mmdecode.errors import (
    IncompatibleError,
    InputError,
    OptionError,
    ShapeError,
    UnknownNameError,
    UnsupportedModelError,
)
from mmdecode.image_ar import ImageGenerator, Sampling, backends
from mmdecode.image_ar.completion import completion_of, kept_cells, partly_known
from mmdecode.image_ar.loading import RasterModel, load
from mmdecode.image_ar.modes import MODES
from mmdecode.image_ar.next_scale import CODE, Collaborative, NextScale
from mmdecode.image_ar.rows import ZipAR
from mmdecode.image_ar.sampling import guided
from mmdecode.models.var import VarForImageGeneration
from mmdecode.models.vq import VQConfig, VQModel
from tests.conformance.test_image_inputs import tokenizer
from tests.image_ar.test_next_scale import model_of, tokenizer_of
from tests.support.tiny_images import image_model

CELLS = 25


@pytest.fixture(scope="module")
def model(classes):
    return load(str(classes), "cpu")


@pytest.fixture
def draw(model):
    """Codes of images ``(B, rows, columns)`` of a decoder."""

    def call(conditions, decoder=None, n=1, batch=8, seed=0, **options):
        generator = ImageGenerator(model, decoder, guidance=2.0, seed=seed, batch=batch)
        return torch.stack([image.codes for image in generator(conditions, n, **options)])

    return call


def window(accept, length=9):
    return Decoder(Jacobi(length), accept=accept)


# Pictures by their seed


def test_a_seed_gives_one_image_in_any_batch_and_under_any_exact_drafting(draw):
    plain = draw([0, 2, 2], n=6, batch=18)
    assert len({codes.numpy().tobytes() for codes in plain}) == len(plain)
    for decoder, batch in (
        (None, 7),
        (window("coupled", CELLS), 1),
        (window("coupled"), 16),
        (window("coupled", 2), 18),
    ):
        assert torch.equal(draw([0, 2, 2], decoder, n=6, batch=batch), plain)
    assert torch.equal(draw([2], n=12, batch=12), plain[6:])
    assert not torch.equal(draw([0, 2, 2], n=6, seed=1, batch=18), plain)
    other = draw([0, 2, 2], window("rejection"), n=6, batch=18)
    assert not torch.equal(other, plain)
    assert torch.equal(draw([2, 2], window("rejection"), n=6, batch=5), other[6:])


def test_an_image_is_that_of_generate(model, draw):
    found = mm.generate(
        model.adapter.model,
        mode="image",
        adapter=model.adapter,
        classes=[3, 1],
        guidance=2.0,
        seed=0,
        sampling=Sampling(**model.preset.sampling),
    )
    assert torch.equal(draw([3, 1]), found.codes)


def test_a_mutant_that_names_noise_by_the_batch_is_caught(draw, monkeypatch):
    monkeypatch.setattr(backends, "_name", lambda condition: b"row")
    plain = draw([0, 2])
    monkeypatch.undo()
    assert not torch.equal(draw([0, 2]), plain)


@pytest.mark.parametrize("mode", MODES)
def test_modes_say_what_they_do(classes, mode):
    generator = ImageGenerator.from_pretrained(classes, mode=mode, device="cpu", guidance=2.0)
    images = generator(["ring", "STAR"], 3)
    plain = ImageGenerator.from_pretrained(classes, device="cpu", guidance=2.0)(["ring", "star"], 3)
    same = all(torch.equal(a.codes, b.codes) for a, b in zip(images, plain, strict=True))
    assert same == (mode in ("ar", "exact"))
    assert generator.guarantee == ("heuristic" if mode == "relaxed" else "exact")
    assert {image.guarantee for image in images} == {generator.guarantee}
    assert [(i.condition, i.label, i.ordinal, i.index) for i in images] == [
        *((0, "ring", n, n) for n in range(3)),
        *((1, "star", n, n + 3) for n in range(3)),
    ]
    for image in images:
        assert (image.passes < CELLS - 1) == (mode != "ar")
        assert image.commits.shape == image.codes.shape == (5, 5)
        assert image.commits[0, 0] == 0 and image.commits.max() == image.passes
        steps = image.commits.flatten().diff()
        assert set(steps.tolist()) <= {0, 1}
        if mode == "ar":
            assert torch.equal(image.commits.flatten(), torch.arange(CELLS))
        assert image.image.size == (10, 10) and image.seconds > 0
        assert torch.equal(image.pixels(), image.pixels())


def test_progress_counts_every_token_and_waits_for_the_device_now_and_then_alone(model):
    counted = []
    generator = ImageGenerator(model, batch=3)
    generator([0, 1], 2, on_tokens=counted.append)
    assert counted == [24, 24, 24, 3, 8, 8, 8, 1]  # of 25 passes over 3 rows, and over one
    assert generator.stats.tokens == sum(counted) == 4 * generator.tokens


def test_what_a_condition_is_made_of_is_checked_once(model, monkeypatch):
    generator = ImageGenerator(model, batch=2)
    seen, check = [], generator._backend.check
    monkeypatch.setattr(generator._backend, "check", lambda c: (seen.append(c), check(c)))
    generator([0, 1, 0], 2)
    assert seen == [0, 1]
    list(generator.images(generator.requests([2, 0], 3)))
    assert seen == [0, 1, 2, 0]


@pytest.mark.parametrize("fails", ["sample", "log_likelihood"])
def test_a_batch_that_does_not_fit_is_freed_before_its_parts_are_generated(
    model, monkeypatch, fails
):
    class Memory:
        """What a batch holds on the device."""

    generator = ImageGenerator(model, guidance=2.0)
    expected = [image.codes for image in generator([0, 1, 2])]
    held, alive = [], []
    right = getattr(generator._backend, fails)

    def call(conditions, *given):
        alive.append(sum(one() is not None for one in held))
        memory = Memory()
        held.append(weakref.ref(memory))
        if len(conditions) > 1:
            raise torch.OutOfMemoryError
        return right(conditions, *given)

    monkeypatch.setattr(generator._backend, fails, call)
    images = generator([0, 1, 2], likelihood=True)
    assert all(torch.equal(i.codes, c) for i, c in zip(images, expected, strict=True))
    assert alive == [0] * 5
    monkeypatch.setattr(generator._backend, fails, lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generator(0, likelihood=True)


def short_of_memory(*given):
    raise torch.OutOfMemoryError


def test_an_image_that_does_not_fit_fails_alone(model, monkeypatch):
    generator = ImageGenerator(model)
    monkeypatch.setattr(generator._backend, "log_likelihood", short_of_memory)
    failed = list(generator.images(generator.requests([0, 1]), likelihood=True))
    assert [image.kind for image in failed] == ["OutOfMemoryError"] * 2
    assert "there is not enough memory" in failed[0].error


def test_a_small_model_drafts(classes, draw):
    generator = ImageGenerator.from_pretrained(
        classes, f"assistant:model={classes},length=4", device="cpu", guidance=2.0
    )
    images = generator([0, 2], 2)
    assert torch.equal(torch.stack([image.codes for image in images]), draw([0, 2], n=2))
    assert max(image.passes for image in images) == 5  # itself drafts: 4 and one each


# Likelihood


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_likelihood_is_that_of_one_pass_over_the_whole_image(model, scale):
    sampling = Sampling(temperature=0.7, top_k=8)
    generator = ImageGenerator(model, guidance=scale, sampling=sampling)
    images = generator([3, 1], 2, likelihood=True)
    network = model.adapter.model
    for image in images:
        codes, label = image.codes.view(1, -1), torch.tensor([image.condition])
        with torch.no_grad():
            branch_logits = [
                network.code_logits(condition, codes)
                for condition in (label, network.unconditional(label))
            ]
        distribution = (guided(*branch_logits, scale) / 0.7).log_softmax(-1)
        found = distribution.gather(2, codes[..., None]).sum()
        assert image.log_likelihood == pytest.approx(float(found), rel=1e-4)


def test_a_guide_of_the_decoder_is_the_guidance(model, draw):
    generator = ImageGenerator(model, Decoder(guide="guidance:scale=2.0"))
    images = generator([0, 3], likelihood=True)
    assert torch.equal(torch.stack([image.codes for image in images]), draw([0, 3]))
    again = ImageGenerator(model, guidance=2.0)([0, 3], likelihood=True)
    for one, other in zip(images, again, strict=True):
        assert one.log_likelihood == other.log_likelihood
    assert generator.settings["guidance"] == 2.0
    with pytest.raises(IncompatibleError, match="each would set the distribution"):
        ImageGenerator(model, Decoder(guide="guidance:scale=2.0"), guidance=3.0)


# A part is given


def test_the_first_codes_are_continued_as_the_model_would_have(draw):
    [whole] = draw([2])
    for decoder in (None, window("coupled"), window("coupled", 3)):
        for known in (1, 10, 24):
            assert torch.equal(draw([2], decoder, start=whole, known=known)[0], whole)


@pytest.mark.parametrize("accept", ["auto", "rejection", "lantern:delta=0.3", "cool_sd:delta=2"])
def test_given_codes_stay_and_their_runs_take_one_pass(model, accept):
    generator = ImageGenerator(model, window(accept), guidance=2.0)
    [start] = generator([0])
    known = torch.zeros(5, 5, dtype=torch.bool)
    known[1:3] = True
    known[4, 3:] = True
    images = generator([1, 3], 3, start=start.codes, known=known)
    for image in images:
        assert torch.equal(image.codes[known], start.codes[known])
        assert not torch.equal(image.codes[~known], start.codes[~known])
        assert image.completion == "locally constrained"
        exact = generator.guarantee == "exact"
        assert image.guarantee == ("locally constrained" if exact else "heuristic")
        assert torch.equal(image.commits == -1, known)
    plain = ImageGenerator(model, guidance=2.0)
    for image in plain([1, 3], 3, start=start.codes, known=known):
        # 13 free places, of which the two before runs decide the run's pass with their own
        assert image.passes <= 14


def test_windows_put_given_codes_at_their_positions(model):
    generator = ImageGenerator(model, window("coupled", CELLS), guidance=2.0)
    [start] = generator([0])
    for image in generator([1], 4, start=start.codes, known=20):
        assert image.passes <= 5  # the first one takes all that is given


def test_given_pixels_are_read_by_the_tokenizer(model):
    generator = ImageGenerator(model)
    [start] = generator([0])
    codes = model.adapter.vq.encode(start.pixels()[None] * 2 - 1)[0]
    mask = torch.ones(10, 10, dtype=torch.bool)
    mask[9, 9] = False  # one pixel of the last code
    [image] = generator([1], start=start.pixels(), known=mask)
    assert torch.equal(image.codes.flatten()[:-1], codes.flatten()[:-1])
    assert image.completion == "continued"


def test_likelihood_leaves_out_what_was_given(model):
    generator = ImageGenerator(model)
    [start] = generator([0], likelihood=True)
    parts = [
        generator([0], start=start.codes, known=known, likelihood=True)[0].log_likelihood
        for known in (0, 24)
    ]
    assert parts[0] == pytest.approx(start.log_likelihood, rel=1e-4)
    assert start.log_likelihood < parts[1] < 0


def test_continuation_is_distinguished_from_inpainting(model):
    layout, codes = model.adapter.layout, torch.zeros(5, 5, dtype=torch.long)
    assert completion_of(partly_known(layout, codes, 0)) == "continued"
    assert completion_of(partly_known(layout, codes, 7)) == "continued"
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[3, 3] = True
    assert completion_of(partly_known(layout, codes, mask)) == "locally constrained"


def test_a_cell_stays_if_all_its_pixels_do():
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[0, 1] = False
    assert kept_cells(mask, 2, 3).tolist() == [[False, True, True], [True, True, True]]
    assert kept_cells(4, 2, 3).tolist() == [[True, True, True], [True, False, False]]


# Other families


def test_captions_are_read_by_their_encoder_and_do_not_depend_on_their_batch(captions):
    generator = ImageGenerator.from_pretrained(captions, device="cpu", batch=3, guidance=2.0)
    texts = ["a red ring", "a blue star beside a", "star"]
    images = generator(texts, 2)
    alone = ImageGenerator.from_pretrained(
        captions, device="cpu", batch=1, mode="exact", guidance=2.0
    )
    for one, other in zip(images, alone(texts, 2), strict=True):
        assert torch.equal(one.codes, other.codes) and one.condition == other.condition
    assert not torch.equal(images[0].codes, images[2].codes)
    with pytest.raises(OptionError, match="a caption has 8 tokens, the model reads 6"):
        generator("a red ring beside a blue star")
    requests = generator.requests(["a red ring beside a blue star", "star"])
    failed, fine = generator.images(requests)
    assert "shorten it" in failed.error and failed.kind == "OptionError" and not fine.error
    with pytest.raises(InputError, match="shorten it"):
        failed.pixels()


def test_a_next_scale_model_generates_through_the_same_class(scales):
    generator = ImageGenerator.from_pretrained(
        scales, device="cpu", guidance=2.5, batch=2, mode="ar"
    )
    counted = []
    images = generator(["ring", 3], 2, on_tokens=counted.append, likelihood=True)
    stock = NextScale.from_pretrained(scales, "cpu")
    drawing = generator._backend.drawing
    assert drawing.guidance == 1.5 and generator.settings["guidance"] == 2.5
    found = stock.generate([0, 0, 3, 3], drawing=drawing, seed=0)
    for image, codes, pixels in zip(images, found.codes, found.images, strict=True):
        assert torch.equal(image.codes, codes)
        torch.testing.assert_close(image.pixels(), pixels)
        assert image.passes == 4 and image.image.size == (8, 8)
        assert image.commits.tolist() == [0] + [1] * 4 + [2] * 9 + [3] * 16
        distribution = stock.score(
            [image.condition], image.codes[None], drawing=drawing
        ).log_softmax(-1)
        value = -F.nll_loss(distribution[0], image.codes, reduction="sum")
        assert image.log_likelihood == pytest.approx(float(value), rel=1e-4)
    assert sum(counted) == 4 * generator.tokens == 4 * 30
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[:4] = False
    [filled] = generator([1], start=images[0].pixels(), known=mask)
    assert filled.completion == "laid over" and filled.guarantee == "locally constrained"
    both = ImageGenerator.from_pretrained(
        scales, device="cpu", guidance=2.5, refiner=scales, drafted=2
    )
    assert both.guarantee == "hybrid of two models"
    assert torch.equal(both(["ring"])[0].codes, images[0].codes)


def test_families_of_transformers_are_loaded_with_their_processor(tmp_path, monkeypatch):
    network = image_model("janus")
    monkeypatch.setattr(network.generation_config, "_from_model_config", False)
    network.save_pretrained(tmp_path)
    asked = []

    def tokenizer(texts, **options):
        asked.extend(texts)
        raise OptionError("no words")

    tokenizer.boi_token = "<image>"
    processor = SimpleNamespace(tokenizer=tokenizer, chat_template=None)
    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda *_, **__: processor)
    model = load(str(tmp_path), "cpu")
    assert model.classes == 0
    assert model.given(["one"]) == {"prompt": ["one"], "tokenizer": processor}
    with pytest.raises(OptionError, match="no words"):
        ImageGenerator(model)(["one"], on_error="raise")
    assert asked == ["one<image>"]


@pytest.fixture
def janus(tmp_path, monkeypatch):
    """A Janus, and the processor that it comes with."""
    network = image_model("janus")
    monkeypatch.setattr(network.generation_config, "_from_model_config", False)
    network.save_pretrained(tmp_path)
    processor = SimpleNamespace(
        tokenizer=tokenizer(),
        chat_template="yes",
        apply_chat_template=lambda turns, add_generation_prompt, tokenize: (
            f"<s>{turns[0]['role'][0]}{turns[0]['content'][0]['text']}"
            + "a" * add_generation_prompt
        ),
    )
    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda *_, **__: processor)
    return tmp_path


def test_janus_draws_of_a_turn_of_a_chat(janus):
    chat, raw = load(str(janus), "cpu"), load(str(janus), "cpu", template=False)
    assert chat.given(["cat"])["prompt"] == ["<s>ucata"]
    assert raw.given(["cat"])["prompt"] == ["cat"]
    assert chat.steered("bad") == {"negative_prompt": "<s>ubada"}
    generators = [
        ImageGenerator.from_pretrained(janus, device="cpu", template=template, guidance=1)
        for template in (True, False)
    ]
    [chatted], [plain], [written] = (
        [
            generators[which]._backend.adapter.condition(
                **generators[which]._backend.model.given([t])
            )
        ]
        for which, t in ((0, "cat"), (1, "cat"), (1, "<s>ucata"))
    )
    assert torch.equal(chatted["prompt_ids"], written["prompt_ids"])
    assert chatted["prompt_ids"].shape != plain["prompt_ids"].shape


def test_guidance_leads_away_from_a_negative_prompt(janus, model, scales):
    def draw(**options):
        options = {"device": "cpu", "template": False, "guidance": 4.0} | options
        return ImageGenerator.from_pretrained(janus, **options)("<s>cat")

    plain, away, other = draw(), draw(negative_prompt="<s>bad"), draw(negative_prompt="<s>dull")
    assert not torch.equal(plain.codes, away.codes) and not torch.equal(away.codes, other.codes)
    read = load(str(janus), "cpu", template=False)
    inputs = read.away_from("<s>bad").given(["<s>cat"])
    found = mm.generate(
        read.adapter.model,
        mode="image",
        adapter=read.adapter,
        guidance=4.0,
        seed=0,
        request=[b"0 <s>cat"],
        **inputs,
    )
    assert torch.equal(found.codes[0], away.codes)
    with pytest.raises(OptionError, match="does nothing without guidance"):
        draw(negative_prompt="<s>bad", guidance=1.0)
    with pytest.raises(OptionError, match="shorten the negative prompt to"):
        draw(negative_prompt="<s>" + "bad" * 50)
    with pytest.raises(OptionError, match="cannot be a text; leave the negative"):
        ImageGenerator(model, negative_prompt="bad")
    with pytest.raises(OptionError, match="leave out negative_prompt and lead"):
        ImageGenerator.from_pretrained(scales, device="cpu", negative_prompt="bad")


def test_emu3_says_how_to_name_its_grid(tmp_path):
    image_model("emu3").config.save_pretrained(tmp_path)
    with pytest.raises(OptionError, match=r"grid=\(rows, columns\) or --codes ROWSxCOLUMNS"):
        ImageGenerator.from_pretrained(tmp_path, device="cpu")


def test_rows_side_by_side_have_a_door(classes, model, scales):
    def draw(mode, **options):
        options = {"device": "cpu", "guidance": 2.0} | options
        return ImageGenerator.from_pretrained(classes, mode=mode, **options)

    generator = draw("zipar:window=2", top_k=9, seed=4)
    assert generator.guarantee == "heuristic"
    images = generator([0, 2, 2], likelihood=True)
    alone = ZipAR(model.adapter, 2, 2.0, Sampling(top_k=9)).generate(classes=[0, 2, 2], seed=4)
    assert not torch.equal(images[1].codes, images[2].codes)
    for image in images:
        assert image.passes == alone.passes - 1 == 12 and image.guarantee == "heuristic"
        assert torch.equal(image.commits, alone.commits) and image.log_likelihood < 0
        assert image.image.size == (10, 10)
    assert generator.stats.passes == 12
    apart = draw("zipar:window=2", top_k=9, seed=4, batch=1)([2, 2])
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(apart, images[1:], strict=True))
    whole, plain = draw("zipar:window=5")([1]), draw("ar")([1])
    assert torch.equal(whole[0].codes, plain[0].codes)
    assert torch.equal(draw("zipar")([1])[0].codes, plain[0].codes)  # 8 of 5
    for wrong, message in (
        ("zipar:window=0", "expected 1 code or more"),
        ("zipar:widow=2", "did you mean 'window'"),
    ):
        with pytest.raises(OptionError, match=message):
            draw(wrong)
    for options in ({"draft": "jacobi"}, {"accept": "coupled"}, {"compile": True}):
        with pytest.raises(OptionError, match=r"cannot be compiled|uses no drafter and no rule"):
            draw("zipar", **options)
    with pytest.raises(IncompatibleError, match="an image to complete"):
        generator([0], start=images[0].codes, known=5)
    with pytest.raises(OptionError, match="cannot be used with a decoder"):
        ImageGenerator(model, Decoder(), lead=2)
    with pytest.raises(OptionError, match="is for models in raster order"):
        ImageGenerator.from_pretrained(scales, device="cpu", mode="zipar")


def test_a_model_that_draws_of_nothing_has_one_class(tmp_path):
    network = image_model("imagegpt")
    network.save_pretrained(tmp_path)
    colours = torch.linspace(-1, 1, 72).view(24, 3)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"clusters": colours.tolist()}))
    generator = ImageGenerator.from_pretrained(tmp_path, device="cpu", mode="exact")
    first, second = generator(0, 2)
    assert not torch.equal(first.codes, second.codes)
    expected = (colours[first.codes].permute(2, 0, 1) + 1) / 2
    torch.testing.assert_close(first.pixels(), expected)
    with pytest.raises(IncompatibleError, match="leave guidance out, or set it to 1"):
        ImageGenerator.from_pretrained(tmp_path, device="cpu", guidance=2.0)(0)


def settings_of(guidance, sampling):
    return {"guidance": guidance, "sampling": asdict(sampling)}


def test_a_checkpoint_says_how_it_is_sampled(classes, altered):
    path = altered(classes)
    config_values = {"guidance_scale": 1.5, "temperature": 0.8, "top_k": 7}
    (path / "generation_config.json").write_text(json.dumps(config_values))
    settings = ImageGenerator.from_pretrained(path, device="cpu").settings
    assert settings == settings_of(1.5, Sampling(temperature=0.8, top_k=7))
    given = ImageGenerator.from_pretrained(path, device="cpu", guidance=3.0, top_k=0, top_p=0.5)
    assert given.settings == settings_of(3.0, Sampling(temperature=0.8, top_p=0.5))
    plain = ImageGenerator.from_pretrained(classes, device="cpu").settings
    assert plain == settings_of(4.0, Sampling(top_k=2000))


def test_a_next_scale_checkpoint_says_how_it_is_sampled(scales, altered):
    path = altered(scales)
    config_values = {"guidance_scale": 3.0, "top_k": 7}
    (path / "generation_config.json").write_text(json.dumps(config_values))
    settings = ImageGenerator.from_pretrained(path, device="cpu").settings
    assert settings == settings_of(3.0, Sampling(top_k=7, top_p=0.96))
    given = ImageGenerator.from_pretrained(path, device="cpu", guidance=1.5, top_k=3)
    assert given.settings == settings_of(1.5, Sampling(top_k=3, top_p=0.96))
    whole = ImageGenerator.from_pretrained(path, device="cpu", sampling=Sampling())
    assert whole.settings == settings_of(3.0, Sampling())


def test_two_models_of_ten_scales_are_sampled_as_published():
    sides = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
    codes = tokenizer_of(patch_nums=sides)
    large, small = (model_of(seed, patch_nums=sides) for seed in (2, 3))
    generator = ImageGenerator(Collaborative(large, small, codes, 8))
    published = [asdict(sampling) for sampling in CODE.sampling]
    assert generator.settings == {"guidance": 2.5, "sampling": published}
    hot = ImageGenerator(Collaborative(large, small, codes, 8), temperature=2.0)
    assert [one["temperature"] for one in hot.settings["sampling"]] == [2.0] * 10
    one = ImageGenerator(NextScale(large, codes)).settings
    assert one == settings_of(2.5, Sampling(top_k=900, top_p=0.96))


def test_pixels_of_a_next_scale_model_are_decoded_where_they_are_asked_for(scales, monkeypatch):
    generator = ImageGenerator.from_pretrained(scales, device="cpu")
    tokenizer, decoded = generator._backend.model.tokenizer, []
    right = tokenizer.image
    monkeypatch.setattr(
        tokenizer, "image", lambda latents: (decoded.append(len(latents)), right(latents))[1]
    )
    first, _ = generator([0, 1])
    assert decoded == []
    assert first.pixels().shape == (3, 8, 8) and decoded == [1]


# What is refused


@pytest.mark.parametrize("one", [np.int64(2), torch.tensor(2), np.array(2), np.uint8(2), 2])
def test_numbers_of_classes_may_be_those_of_numpy_and_torch(model, one):
    generator = ImageGenerator(model)
    for given in (one, [one]):
        [request] = generator.requests(given)
        assert request.condition == 2 and type(request.condition) is int
    many = (np.array([1, 2]), torch.tensor([1, 2]), range(1, 3))
    for given in many:
        assert [request.condition for request in generator.requests(given)] == [1, 2]


@pytest.mark.parametrize(
    "given", [1.7, True, np.bool_(True), torch.tensor(True), torch.tensor(1.0), None, 2.0]
)
def test_what_is_no_number_of_a_class_is_refused(model, given):
    for conditions in (given, [given]):
        with pytest.raises(
            OptionError, match="neither a class number nor a class name; expected 0 to 3"
        ):
            ImageGenerator(model).requests(conditions)


def test_texts_that_are_no_unicode_are_refused(captions):
    generator = ImageGenerator.from_pretrained(captions, device="cpu")
    with pytest.raises(OptionError, match="cannot be encoded in UTF-8"):
        generator("a \udcff ring")


@pytest.mark.parametrize(
    ("conditions", "error", "message"),
    [
        (4, OptionError, "class 4 does not exist; expected 0 to 3"),
        (-1, OptionError, "class -1 does not exist"),
        ("rign", UnknownNameError, "no class named 'rign'; did you mean 'ring'?"),
        ([], OptionError, "nothing to generate"),
    ],
)
def test_invalid_conditions_are_refused_before_anything_is_generated(
    model, conditions, error, message
):
    generator = ImageGenerator(model)
    with pytest.raises(error, match=message.replace("?", r"\?")):
        generator(conditions)
    assert generator.stats.calls == 0


def test_one_condition_gives_one_image_and_several_a_list_with_failures_in_it(model):
    generator = ImageGenerator(model)
    alone, [listed], [counted] = generator("ring"), generator(["ring"]), generator("ring", 1)
    assert torch.equal(alone.codes, listed.codes) and torch.equal(alone.codes, counted.codes)
    found = generator(["rign", 0, [7], 9, 0])
    assert [image.kind for image in found] == [
        "UnknownNameError", None, "OptionError", "OptionError", None,
    ]  # fmt: skip
    assert torch.equal(found[1].codes, alone.codes) and found[4].ordinal == 1
    assert "did you mean 'ring'" in found[0].error and [image.index for image in found] == [
        *range(5)
    ]
    calls = generator.stats.calls
    with pytest.raises(UnknownNameError, match="did you mean 'ring'"):
        generator([0, "rign"], on_error="raise")
    assert generator.stats.calls == calls
    assert generator("rign", on_error="return").kind == "UnknownNameError"
    with pytest.raises(OptionError, match="expected 'raise' or 'return'"):
        generator(0, on_error="ignore")


def test_names_of_classes_have_synonyms_or_do_not_exist(model):
    generator = ImageGenerator(model)
    conditions = ["hound", " Dog", "hound, dog", 2]
    assert [r.condition for r in generator.requests(conditions)] == [2] * 4
    assert [r.ordinal for r in generator.requests(conditions)] == [0, 1, 2, 3]
    unnamed = RasterModel(
        adapter=model.adapter, given=model.given, preset=model.preset, classes=model.classes
    )
    with pytest.raises(OptionError, match="configuration has no class names; expected 0"):
        ImageGenerator(unnamed)("ring")
    many = RasterModel(
        adapter=model.adapter,
        given=model.given,
        preset=model.preset,
        classes=99,
        labels={n: f"thing {n}" for n in range(99)},
    )
    with pytest.raises(
        UnknownNameError, match=r"did you mean 'thing 7.*as a number, expected 0 to 98"
    ) as info:
        ImageGenerator(many)("thing 7x")
    assert len(str(info.value)) < 150


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n": 0}, OptionError, "n=0; expected at least 1 image"),
        ({"known": 3}, OptionError, "belong together"),
        ({"start": torch.zeros(5, 5).long()}, OptionError, "belong together"),
        (
            {"start": torch.zeros(4, 5).long(), "known": 3},
            ShapeError,
            r"\(4, 5\); expected \(5, 5\)",
        ),
        ({"start": torch.full((5, 5), 24), "known": 3}, OptionError, "expected 0 to 23"),
        ({"start": torch.zeros(5, 5).long(), "known": 25}, OptionError, "expected 0 to 24 codes"),
        (
            {"start": torch.zeros(3, 8, 8), "known": 3},
            ShapeError,
            r"expected \(3, 10, 10\): resize",
        ),
        (
            {"start": torch.zeros(5, 5).long(), "known": torch.ones(4, 4)},
            ShapeError,
            r"the mask has shape \(4, 4\); expected \(5, 5\), or a multiple",
        ),
        (
            {"start": torch.zeros(5, 5).long(), "known": torch.ones(5, 5)},
            OptionError,
            "keeps every code",
        ),
    ],
)
def test_calls_that_make_no_sense_are_refused(model, options, error, message):
    with pytest.raises(error, match=message):
        ImageGenerator(model)(0, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"draft": "jacobi:window=26"},
            OptionError,
            "a window of 26 tokens is larger than the image",
        ),
        ({"guidance": -1.0}, OptionError, "scale"),
        ({"batch": 0}, OptionError, "batch=0; expected at least 1"),
        ({"temperature": 0.0}, OptionError, "temperature must be above 0"),
        ({"mode": "exct"}, UnknownNameError, "did you mean 'exact'"),
        ({"mode": "ar", "draft": "jacobi"}, OptionError, "leave out the draft or the mode"),
        ({"mode": "exact", "accept": "coupled"}, OptionError, "has a rule of its own"),
        ({"draft": "jakobi"}, UnknownNameError, "did you mean 'jacobi'"),
        ({"accept": "greedy"}, IncompatibleError, "do_sample"),
        ({"refiner": "zoo:x"}, OptionError, "a refiner is for next-scale models"),
        ({"grid": (3, 3)}, OptionError, "generates images of one size"),
        ({"device": "cuda:9"}, OptionError, "cannot be used"),
        ({"dtype": "int8"}, OptionError, "expected auto, fp32"),
    ],
)
def test_options_that_make_no_sense_are_refused(classes, options, error, message):
    with pytest.raises(error, match=message):
        ImageGenerator.from_pretrained(classes, **{"device": "cpu", **options})(0)


def test_a_rule_that_compares_codes_wants_a_codebook(classes, altered):
    path = altered(classes)
    for file in (path / "vq").iterdir():
        file.unlink()
    generator = ImageGenerator.from_pretrained(
        path, "jacobi:window=8", "lantern:delta=0.1", device="cpu"
    )
    with pytest.raises(IncompatibleError, match="this model has no codebook"):
        generator(0)
    image = ImageGenerator.from_pretrained(path, device="cpu", mode="relaxed")(0)
    with pytest.raises(IncompatibleError, match="its image tokenizer is a separate model"):
        image.pixels()


def test_a_codebook_of_another_size_is_refused(classes, altered, tmp_path):
    path = altered(classes)
    config = VQConfig.from_pretrained(path / "vq")
    config.codebook_size = 32
    VQModel(config).save_pretrained(path / "vq")
    with pytest.raises(IncompatibleError, match="it has 32 codes, the model 24"):
        ImageGenerator.from_pretrained(path, device="cpu")


def spoil_file(path):
    return path / "model.safetensors"


def spoil_shape(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_classes": 9}))
    return path


def spoil_layers(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    return path


def spoil_weights(path):
    (path / "model.safetensors").unlink()
    return path


def spoil_type(path):
    (path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return path


def spoil_config(path):
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (spoil_file, InputError, "is a file; expected a folder with config.json"),
        (spoil_shape, InputError, "is no LlamaGenForImageGeneration .* another shape of"),
        (spoil_layers, InputError, "is no LlamaGenForImageGeneration .* without model.layers.2"),
        (spoil_weights, InputError, "cannot be loaded"),
        (spoil_type, UnsupportedModelError, "no adapter for model_type 'gpt2'"),
        (spoil_config, InputError, "cannot be loaded"),
    ],
)
def test_a_checkpoint_of_another_layout_is_refused(classes, altered, spoil, error, message):
    path = spoil(altered(classes))
    with pytest.raises(error, match=message):
        ImageGenerator.from_pretrained(path, device="cpu")


def test_captions_without_an_encoder_that_fits_are_refused(captions, altered):
    path = altered(captions)
    config = T5Config.from_pretrained(path / "text_encoder")
    config.d_model = 8
    T5EncoderModel(config).save_pretrained(path / "text_encoder")
    with pytest.raises(IncompatibleError, match="its states have width 8, and the model reads"):
        ImageGenerator.from_pretrained(path, device="cpu")
    for file in (path / "text_encoder").iterdir():
        file.unlink()
    with pytest.raises(InputError, match="has no folder text_encoder"):
        ImageGenerator.from_pretrained(path, device="cpu")
    generator = ImageGenerator.from_pretrained(captions, device="cpu")
    with pytest.raises(OptionError, match="takes prompts, and 3 is none"):
        generator(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "jacobi"}, "draft='jacobi' is for models in raster order"),
        ({"mode": "exact"}, "mode='exact' is for models"),
        ({"accept": "coupled"}, "accept='coupled' is for models"),
        ({"guidance": 0.5}, "guidance=0.5; expected 1"),
        ({"refiner": "x"}, "together: drafted is the number"),
    ],
)
def test_next_scale_models_take_no_drafts(scales, options, message):
    with pytest.raises(OptionError, match=message):
        ImageGenerator.from_pretrained(scales, device="cpu", **options)
    with pytest.raises(OptionError, match="leave out the decoder"):
        ImageGenerator(NextScale.from_pretrained(scales, "cpu"), Decoder())


def test_a_next_scale_model_without_an_unconditional_input_is_not_guided(scales, altered):
    path = altered(scales)
    network = VarForImageGeneration.from_pretrained(path)
    network.config.unconditional = False
    VarForImageGeneration(network.config).save_pretrained(path)
    generator = ImageGenerator.from_pretrained(path, device="cpu")
    assert generator.settings["guidance"] == 1 and generator(0)
    guided_one = ImageGenerator.from_pretrained(path, device="cpu", guidance=2.0)
    with pytest.raises(OptionError, match="unconditional"):
        guided_one(0)


def test_a_captured_round_generates_the_same_images(model, taped):
    plain, captured = (
        ImageGenerator(model, Decoder(Jacobi(9), accept="coupled", compile=compiled), guidance=2.0)
        for compiled in (False, True)
    )
    [start] = plain([0])
    for options in ({}, {"start": start.codes, "known": 8}):
        images = [one([1, 3], likelihood=True, **options) for one in (plain, captured)]
        for first, second in zip(*images, strict=True):
            assert torch.equal(first.codes, second.codes)
            assert torch.equal(first.commits, second.commits)
            assert first.log_likelihood == pytest.approx(second.log_likelihood, rel=1e-5)
    assert taped
