import json
from dataclasses import replace

import pytest
import torch

from mmdecode.image_ar.loading import labels_of
from mmdecode.image_ar.next_scale import Collaborative, Drawing, NextScale
from mmdecode.models.multiscale_vq import MultiScaleVQ
from mmdecode.train import loop as fitting
from mmdecode.train.loop import BITS, FitOptions
from mmdecode.train.zoo import var_scenes
from mmdecode.train.zoo.var_scenes import (
    TOKENIZER,
    ModelShape,
    TokenizerLearner,
    VarScenesOptions,
    code_losses,
    encoded,
    lay_codebook,
    mean_losses,
    measure_tokenizer,
    run,
    seeds_of,
    train_transformer,
)
from mmdecode.zoo.scene_images import (
    class_of,
    image_scene,
    labelled_images,
    rendered_images,
    to_pixels,
)
from mmdecode.zoo.scenes import HELD_OUT, NOUNS
from tests.support.commands import invoke

QUICK = FitOptions(steps=4, batch=3, every=2)
OPTIONS = VarScenesOptions(
    channels=8,
    channel_multipliers=(1, 1, 1, 1),
    codebook_size=24,
    codebook_dim=4,
    plain=QUICK,
    coded=QUICK,
    fitting=QUICK,
    models={
        "var-scenes": ModelShape(width=16, layers=2, heads=2, shared_adaln=True),
        "var-scenes-small": ModelShape(width=8, layers=1, heads=1, shared_adaln=False),
    },
    held_out=6,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("var")
    return folder, run(OPTIONS, folder / "work", folder / "out")


def test_a_run_ends_in_models_that_draw_alone_and_together(made):
    folder, _ = made
    out = folder / "out"
    alone = NextScale.from_pretrained(out / "var-scenes", "cpu").generate([0, 27])
    assert alone.images.shape == (2, 3, 64, 64)
    assert alone.codes.shape == (2, 155)
    model = NextScale.from_pretrained(out / "var-scenes", "cpu").stages[0].model
    assert labels_of(model.config, len(NOUNS)) == dict(enumerate(NOUNS))
    pair = Collaborative.from_names(out / "var-scenes", out / "var-scenes-small", 4, "cpu")
    assert pair.generate([0, 27]).passes == 7


def test_cards_say_what_was_measured(made):
    folder, result = made
    for name in (TOKENIZER, *OPTIONS.models):
        card = json.loads((folder / "out" / name / "card.json").read_text())
        assert result[name].items() <= card.items()
        assert card["images"] == OPTIONS.held_out
        page = (folder / "out" / name / "README.md").read_text()
        assert page.startswith(f"# zoo:{name}\n")
        assert card["measured"] in page
        config = json.loads((folder / "out" / name / "config.json").read_text())
        assert config["dtype"] == "float32"
        assert json.loads((folder / "out" / name / "recipe.json").read_text())["held_out"] == 6
    measured = result["var-scenes"]["bits_per_code_by_scale"]
    assert len(measured) == 7
    total = sum(bits * side * side for bits, side in zip(measured, OPTIONS.patch_nums, strict=True))
    assert total / 155 == pytest.approx(result["var-scenes"]["bits_per_code"], abs=2e-3)
    assert result["weights_mb"] < 0.3


def test_the_shipped_sizes_fit_the_zoo():
    """All three together within 5 MB in half precision."""
    options = VarScenesOptions()
    models = [options.tokenizer(), *map(options.transformer, options.models.values())]
    assert 2 * sum(p.numel() for model in models for p in model.parameters()) < 5e6
    assert models[0].config.side == 64
    assert models[1].config.num_hidden_layers >= 8


def test_a_run_stopped_in_every_part_equals_an_uninterrupted_one(made, tmp_path, monkeypatch):
    write = fitting.write_state
    for stage in ("plain", "coded", "var-scenes", "var-scenes-small"):

        def write_and_stop(path, state, stage=stage):
            write(path, state)
            if path.parent.name == stage and state["step"] == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(fitting, "write_state", write_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run(OPTIONS, tmp_path / "work", tmp_path / "out")
    monkeypatch.setattr(fitting, "write_state", write)
    folder, result = made
    again = run(OPTIONS, tmp_path / "work", tmp_path / "out")
    assert {**again, "folder": ""} == {**result, "folder": ""}
    for name in (TOKENIZER, *OPTIONS.models):
        weights = (tmp_path / "out" / name / "model.safetensors").read_bytes()
        assert weights == (folder / "out" / name / "model.safetensors").read_bytes()


def test_the_large_thing_is_the_class_and_all_classes_occur():
    classes = [class_of(image_scene(seed)) for seed in range(600)]
    assert set(classes) == set(range(len(NOUNS)))
    scene = image_scene(3)
    largest = max(scene.things, key=lambda thing: thing.size)
    assert NOUNS[class_of(scene)] == largest.name


def test_images_of_steps_parts_and_tests_differ():
    options = VarScenesOptions()
    used = [seeds_of(step, options.fitting, part) for step in (0, 1) for part in (0, 1, 2, 3)]
    used += [options.development(), options.test()]
    seeds = [seed for some in used for seed in some]
    assert len(set(seeds)) == len(seeds)
    training = [seed for some in used[:-2] for seed in some]
    assert max(training) < HELD_OUT <= min(options.development())
    assert seeds_of(10**6, options.fitting, 3)[-1] < HELD_OUT


@torch.no_grad()
def test_a_codebook_laid_over_latents_is_used_and_near(made):
    pixels = to_pixels(rendered_images(range(40, 60)))
    tokenizer = OPTIONS.tokenizer()
    latents = tokenizer.encode(pixels)
    before = (tokenizer.quantize(latents).running[:, -1] - latents).square().mean()
    lay_codebook(tokenizer, latents, torch.Generator().manual_seed(0))
    after = (tokenizer.quantize(latents).running[:, -1] - latents).square().mean()
    assert after < before / 4
    assert measure_tokenizer(tokenizer, pixels)["codes_used"] > 0.5


def test_codes_that_nothing_uses_move_to_where_they_are_wanted():
    learner = TokenizerLearner(OPTIONS.tokenizer())
    pixels, dice = to_pixels(rendered_images(range(60, 64))), torch.Generator().manual_seed(0)
    codebook = learner.tokenizer.codebook.weight
    codebook.data[5] = 100.0
    learner.share[5] = 0
    learner.coded_loss(pixels, dice, renew=False)
    assert codebook[5].eq(100).all()
    learner.coded_loss(pixels, dice, renew=True)
    assert codebook[5].abs().max() < 10


def test_the_loss_reaches_every_weight_of_the_tokenizer():
    learner = TokenizerLearner(OPTIONS.tokenizer())
    pixels = to_pixels(rendered_images(range(70, 73)))
    learner.coded_loss(pixels, torch.Generator(), renew=False).backward()
    for name, parameter in learner.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0 or name.endswith(("k.bias", "k.weight")), name


def test_bits_are_those_of_each_codes_own_distribution(made):
    folder, _ = made
    maker = NextScale.from_pretrained(folder / "out" / "var-scenes", "cpu")
    model, tokenizer = maker.stages[0].model, maker.tokenizer
    classes, codes = encoded(tokenizer, *labelled_images(range(HELD_OUT, HELD_OUT + 3)))
    distribution = maker.score(classes, codes, drawing=Drawing()).log_softmax(-1)
    expected = -distribution.gather(2, codes[..., None])[..., 0]
    with torch.no_grad():
        found = code_losses(model, tokenizer, classes, codes)
    torch.testing.assert_close(found, expected)
    mean = mean_losses(model, tokenizer, classes, codes)
    torch.testing.assert_close(mean, expected.mean(0) * BITS)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_the_classes_is_left_out(made, tmp_path, monkeypatch, share):
    folder, _ = made
    tokenizer = MultiScaleVQ.from_pretrained(folder / "out" / TOKENIZER)
    seen = []

    def noted(model, tokenizer, classes, codes):
        if torch.is_grad_enabled():
            seen.append(classes)
        return code_losses(model, tokenizer, classes, codes)

    monkeypatch.setattr(var_scenes, "code_losses", noted)
    options = replace(OPTIONS, fitting=replace(QUICK, condition_dropout=share))
    out = tmp_path / "out"
    train_transformer("var-scenes-small", options, tokenizer, tmp_path / "work", out)
    assert torch.cat(seen).eq(len(NOUNS)).float().mean() == share
    assert len(seen) == QUICK.steps
    assert not torch.equal(seen[0], seen[1]) or share == 1


@pytest.mark.parametrize(("device", "batch"), [("cpu", 16), ("cuda", 64)])
def test_the_command_runs_the_recipe(tmp_path, monkeypatch, device, batch):
    asked = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(var_scenes, "run", lambda *given: asked.append(given) or {"folder": ""})
    command = ["train", "zoo", "var-scenes", "--work", str(tmp_path), "--device", device, "--json"]
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    [(options, *folders)] = asked
    assert folders == [tmp_path, tmp_path / "models"]
    assert (options.device, options.fitting.batch) == (device, batch)


def test_a_recipe_of_the_cpu_alone_refuses_another_device(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    command = ["train", "zoo", "joined-words", "--work", str(tmp_path), "--device", "cuda"]
    result = invoke(*command)
    assert "--device cuda for joined-words, which is trained on the CPU" in str(result.exception)


def test_steps_do_not_depend_on_who_renders(made, tmp_path):
    tokenizer = NextScale.from_pretrained(made[0] / "out" / "var-scenes", "cpu").tokenizer
    losses = []
    for workers in (0, 2):
        options = replace(OPTIONS, workers=workers)
        work = tmp_path / str(workers)
        train_transformer("var-scenes-small", options, tokenizer, work, work / "out")
        losses.append((work / "log.jsonl").read_text().split("seconds")[0])
    assert losses[0] == losses[1]
