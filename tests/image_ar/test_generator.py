"""`ImageGenerator`: seeds, batches, modes, what is given, and what is refused."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers import T5Config, T5EncoderModel

import mmdecode as mm
from mmdecode.draft.jacobi import Jacobi
from mmdecode.engine.decoder import Decoder
from mmdecode.errors import (
    IncompatibleError,
    InputError,
    OptionError,
    ShapeError,
    UnknownNameError,
    UnsupportedModelError,
)
from mmdecode.image_ar import ImageGenerator, Sampling, painters
from mmdecode.image_ar.completion import completion_of, kept_cells, partly_known
from mmdecode.image_ar.loading import RasterModel, load
from mmdecode.image_ar.modes import MODES
from mmdecode.image_ar.next_scale import NextScale
from mmdecode.image_ar.sampling import guided
from mmdecode.models.var import VarForImageGeneration
from mmdecode.models.vq import VQConfig, VQModel
from tests.conformance.tiny_images import image_model

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


def test_a_seed_gives_one_picture_in_any_batch_and_under_any_exact_drafting(draw):
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


def test_a_picture_is_that_of_the_front_door(model, draw):
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
    monkeypatch.setattr(painters, "_name", lambda condition: b"row")
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
    assert generator.law == ("heuristic" if mode == "relaxed" else "exact")
    assert {image.law for image in images} == {generator.law}
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


def test_progress_counts_every_token_of_every_pass(model):
    counted = []
    generator = ImageGenerator(model, window("coupled"), batch=3)
    images = generator([0, 1], 2, on_tokens=counted.append)
    assert sum(counted) == 4 * generator.tokens and counted[0] == 3
    assert generator.stats.tokens == sum(counted)
    commits = torch.stack([image.commits.flatten() for image in images[:3]])
    assert counted[:4] == [int((commits == number).sum()) for number in range(4)]


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
            laws = [
                network.code_logits(condition, codes)
                for condition in (label, network.unconditional(label))
            ]
        law = (guided(*laws, scale) / 0.7).log_softmax(-1)
        found = law.gather(2, codes[..., None]).sum()
        assert image.log_likelihood == pytest.approx(float(found), rel=1e-4)


def test_a_guide_of_the_decoder_is_the_guidance(model, draw):
    generator = ImageGenerator(model, Decoder(guide="guidance:scale=2.0"))
    images = generator([0, 3], likelihood=True)
    assert torch.equal(torch.stack([image.codes for image in images]), draw([0, 3]))
    again = ImageGenerator(model, guidance=2.0)([0, 3], likelihood=True)
    for one, other in zip(images, again, strict=True):
        assert one.log_likelihood == other.log_likelihood
    assert generator.settings["guidance"] == 2.0
    with pytest.raises(IncompatibleError, match="both want to set the law"):
        ImageGenerator(model, Decoder(guide="guidance:scale=2.0"), guidance=3.0)


# A part is given


def test_the_first_codes_are_continued_as_the_model_would_have(draw):
    [whole] = draw([2])
    for decoder in (None, window("coupled"), window("coupled", 3)):
        for known in (1, 10, 24):
            assert torch.equal(draw([2], decoder, start=whole, known=known)[0], whole)


@pytest.mark.parametrize("accept", ["auto", "rejection", "lantern:delta=0.3", "cool:delta=2"])
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
        assert torch.equal(image.commits == -1, known)
    plain = ImageGenerator(model, guidance=2.0)
    for image in plain([1, 3], 3, start=start.codes, known=known):
        # 13 free places, of which the two before runs decide the run's pass with their own
        assert image.passes <= 14


def test_windows_put_given_codes_in_their_places(model):
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


def test_what_is_continued_is_told_from_what_is_filled_in(model):
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
        generator(["a red ring beside a blue star", "star"])
    requests = generator.requests(["a red ring beside a blue star", "star"])
    failed, drawn = generator.images(requests)
    assert "shorten it" in failed.error and failed.kind == "OptionError" and not drawn.error
    with pytest.raises(InputError, match="shorten it"):
        failed.pixels()


def test_a_next_scale_model_is_drawn_through_the_same_door(scales):
    generator = ImageGenerator.from_pretrained(
        scales, device="cpu", guidance=2.5, batch=2, mode="ar"
    )
    counted = []
    images = generator(["ring", 3], 2, on_tokens=counted.append, likelihood=True)
    stock = NextScale.from_pretrained(scales, "cpu")
    drawing = generator._painter.drawing
    assert drawing.guidance == 1.5 and generator.settings["guidance"] == 2.5
    found = stock.generate([0, 0, 3, 3], drawing=drawing, seed=0)
    for image, codes, pixels in zip(images, found.codes, found.images, strict=True):
        assert torch.equal(image.codes, codes)
        torch.testing.assert_close(image.pixels(), pixels)
        assert image.passes == 4 and image.image.size == (8, 8)
        assert image.commits.tolist() == [0] + [1] * 4 + [2] * 9 + [3] * 16
        law = stock.score([image.condition], image.codes[None], drawing=drawing).log_softmax(-1)
        value = -F.nll_loss(law[0], image.codes, reduction="sum")
        assert image.log_likelihood == pytest.approx(float(value), rel=1e-4)
    assert sum(counted) == 4 * generator.tokens == 4 * 30
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[:4] = False
    [filled] = generator([1], start=images[0].pixels(), known=mask)
    assert filled.completion == "laid over"
    both = ImageGenerator.from_pretrained(
        scales, device="cpu", guidance=2.5, refiner=scales, drafted=2
    )
    assert both.law == "hybrid of two models"
    assert torch.equal(both(["ring"])[0].codes, images[0].codes)


def test_families_of_transformers_are_loaded_with_their_processor(tmp_path, monkeypatch):
    network = image_model("janus")
    monkeypatch.setattr(network.generation_config, "_from_model_config", False)
    network.save_pretrained(tmp_path)
    asked = {}
    processor = SimpleNamespace(tokenizer="words")
    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lambda path: processor)
    model = load(str(tmp_path), "cpu")
    assert model.classes == 0
    assert model.given(["one"]) == {"prompt": ["one"], "tokenizer": processor}
    monkeypatch.setattr(
        model.adapter, "_read", lambda *given: asked.update(given=given) or (None, None)
    )
    with pytest.raises(OptionError, match="nothing to draw"):
        ImageGenerator(model)(["one"])
    assert asked["given"][:3] == ("prompt", ["one"], processor)


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


def told(guidance, sampling):
    return {"guidance": guidance, "sampling": asdict(sampling)}


def test_a_checkpoint_says_how_it_is_sampled(classes, altered):
    path = altered(classes)
    said = {"guidance_scale": 1.5, "temperature": 0.8, "top_k": 7}
    (path / "generation_config.json").write_text(json.dumps(said))
    settings = ImageGenerator.from_pretrained(path, device="cpu").settings
    assert settings == told(1.5, Sampling(temperature=0.8, top_k=7))
    given = ImageGenerator.from_pretrained(path, device="cpu", guidance=3.0, top_k=0, top_p=0.5)
    assert given.settings == told(3.0, Sampling(temperature=0.8, top_p=0.5))
    plain = ImageGenerator.from_pretrained(classes, device="cpu").settings
    assert plain == told(4.0, Sampling(top_k=2000))


# What is refused


@pytest.mark.parametrize(
    ("conditions", "error", "message"),
    [
        (4, OptionError, "class 4 does not exist; expected 0 to 3"),
        ([0, -1], OptionError, "class -1 does not exist"),
        ("rign", UnknownNameError, "no class named 'rign'; did you mean 'ring'?"),
        ([], OptionError, "nothing to draw"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is(model, conditions, error, message):
    generator = ImageGenerator(model)
    with pytest.raises(error, match=message.replace("?", r"\?")):
        generator(conditions)
    assert generator.stats.calls == 0


def test_names_of_classes_have_synonyms_or_do_not_exist(model):
    generator = ImageGenerator(model)
    conditions = ["hound", " Dog", "hound, dog", 2]
    assert [r.condition for r in generator.requests(conditions)] == [2] * 4
    assert [r.ordinal for r in generator.requests(conditions)] == [0, 1, 2, 3]
    unnamed = RasterModel(
        adapter=model.adapter, given=model.given, preset=model.preset, classes=model.classes
    )
    with pytest.raises(OptionError, match="whose names its configuration does not say; expected 0"):
        ImageGenerator(unnamed)("ring")
    many = RasterModel(
        adapter=model.adapter,
        given=model.given,
        preset=model.preset,
        classes=99,
        labels={n: f"thing {n}" for n in range(99)},
    )
    with pytest.raises(
        UnknownNameError, match=r"did you mean 'thing 7.*or expected 0 to 98"
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
        ({"grid": (3, 3)}, OptionError, "draws images of one size"),
        ({"device": "cuda:9"}, OptionError, "cannot be used"),
        ({"dtype": "int8"}, OptionError, "expected float32"),
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
    [image] = ImageGenerator.from_pretrained(path, device="cpu", mode="relaxed")(0)
    with pytest.raises(IncompatibleError, match="its tokenizer is a model of its own"):
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
    with pytest.raises(IncompatibleError, match="its states have 8 numbers, the model reads 12"):
        ImageGenerator.from_pretrained(path, device="cpu")
    for file in (path / "text_encoder").iterdir():
        file.unlink()
    with pytest.raises(InputError, match="holds no text_encoder"):
        ImageGenerator.from_pretrained(path, device="cpu")
    generator = ImageGenerator.from_pretrained(captions, device="cpu")
    with pytest.raises(OptionError, match="draws of prompts, and 3 is none"):
        generator(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "jacobi"}, "draft='jacobi' is for models that write in raster order"),
        ({"mode": "exact"}, "mode='exact' is for models"),
        ({"accept": "coupled"}, "accept='coupled' is for models"),
        ({"guidance": 0.5}, "guidance=0.5; expected 1"),
        ({"refiner": "x"}, "give both: drafted is the number"),
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


def test_a_captured_round_draws_the_same_pictures(model, taped):
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
