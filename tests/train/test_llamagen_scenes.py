import hashlib
import json
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer, T5EncoderModel

from mmdecode.checkpoints import ZOO
from mmdecode.image_ar.loading import load
from mmdecode.image_ar.sampling import Sampling
from mmdecode.models.llamagen import LlamaGenForImageGeneration, left_padded
from mmdecode.models.vq import VQModel
from mmdecode.runs.files import MAKER
from mmdecode.train.loop import BITS, FitOptions, fit
from mmdecode.train.zoo import image_codes, image_tokenizer, llamagen_scenes
from mmdecode.train.zoo.image_codes import Setting, bits_per_code, draw, reach
from mmdecode.train.zoo.image_tokenizer import Codebook, TokenizerOptions
from mmdecode.train.zoo.llamagen_scenes import (
    NAMES,
    SLOTS,
    Learner,
    LlamaGenScenesOptions,
    Plan,
    build_text_tokenizer,
    caption,
    encode,
    run,
)
from mmdecode.zoo.scene_images import image_scene, rendered_images, to_pixels
from mmdecode.zoo.scenes import COLOURS, HELD_OUT, NOUNS

pytestmark = pytest.mark.filterwarnings("ignore:.*scalar.*")
FIT = FitOptions(steps=4, batch=4, every=2, matrix_rate=0.01)
TINY = Plan(width=24, layers=2, heads=2, inner=32, fit=FIT)
OPTIONS = LlamaGenScenesOptions(
    tokenizer=TokenizerOptions(
        steps=6, plain_steps=2, batch=4, codebook_size=32, channels=8, norm_groups=2
    ),
    num_images=20,
    development=6,
    test=6,
    plans={"class": TINY, "small": replace(TINY, layers=1), "caption": TINY},
    text_width=24,
    text_layers=1,
    num_sampled=4,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The whole recipe once."""
    folder = tmp_path_factory.mktemp("llamagen")
    cards = run(OPTIONS, folder / "work", folder / "out", shard=12)
    return folder, cards


@pytest.mark.slow
def test_the_recipe_makes_three_folders_that_load(made):
    folder, cards = made
    for part, name in NAMES.items():
        model = LlamaGenForImageGeneration.from_pretrained(folder / "out" / name)
        assert model.dtype == torch.float32
        assert model.config.caption_slots == (SLOTS if part == "caption" else 0)
        card = json.loads((folder / "out" / name / "card.json").read_text())
        assert card == {"made_by": MAKER} | cards[name]
        assert card["parameters"] == model.num_parameters()
        assert card["decoding"]["guidance"] == OPTIONS.setting.scale
        readme = (folder / "out" / name / "README.md").read_text()
        assert f"zoo:{name}" in readme and str(card["bits_per_code"]) in readme
        assert (folder / "out" / name / "vq").exists() == (part == "class")
        assert (folder / "out" / name / model.config.tokenizer).exists() == (part != "small")
        assert part == "small" or f"`{model.config.tokenizer}` holds" in readme
    vq = VQModel.from_pretrained(folder / "out" / NAMES["class"] / "vq")
    assert vq.config.codebook_size == 32
    assert len(list((folder / "work" / "corpus").glob("*.npz"))) == 2


def test_the_saved_caption_model_reads_text_as_in_training(made):
    folder = made[0] / "out" / NAMES["caption"]
    learner = Learner("caption", OPTIONS, 16).eval()
    best = torch.load(made[0] / "work" / "caption" / "best.pt", weights_only=True)
    learner.load_state_dict(best)
    texts = ["There is a red cup.", "I see a blue star and a striped green digit nine."]
    features, mask = learner.reader(texts)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer(texts, padding="max_length", return_tensors="pt")
    encoder = T5EncoderModel.from_pretrained(folder / "text_encoder")
    with torch.no_grad():
        again = encoder(
            input_ids=given.input_ids, attention_mask=given.attention_mask
        ).last_hidden_state
    again, seen = left_padded(again, given.attention_mask)
    assert torch.equal(seen, mask)
    assert mask.sum(1).tolist() == [len(tokenizer(text).input_ids) for text in texts]
    torch.testing.assert_close(again, features, atol=5e-3, rtol=5e-3)  # halves


def test_a_finished_recipe_only_measures_its_best_models_again(made, monkeypatch):
    folder, cards = made
    encoded = []
    state_file = folder / "work" / "class" / "state.pt"
    state = torch.load(state_file, weights_only=True)
    state["modules"]["transformer.lm_head.weight"].zero_()  # the last model is not the best one
    torch.save(state, state_file)
    monkeypatch.setattr(Learner, "loss", lambda *args: pytest.fail("trains again"))

    def watched(model, seeds, **how):
        encoded.extend(seeds)
        return encode(model, seeds, **how)

    monkeypatch.setattr(llamagen_scenes, "encode", watched)
    assert run(OPTIONS, folder / "work", folder / "out", shard=12) == cards
    assert min(encoded) >= HELD_OUT


def test_captions_say_what_is_there_in_words_the_tokenizer_knows():
    tokenizer = build_text_tokenizer()
    longest, colours, named = 0, set(), set()
    for seed in range(300):
        scene = image_scene(seed)
        text = caption(scene, random.Random(seed))
        ids = tokenizer(text).input_ids
        longest = max(longest, len(ids))
        assert tokenizer.unk_token_id not in ids
        assert ids[-1] == tokenizer.eos_token_id
        assert scene.things[-1].name in text
        for name in NOUNS:
            if f" {name}" in text:
                assert any(name in thing.name for thing in scene.things), text
                named.add(name)
        for colour in COLOURS:
            if f" {colour} " in text:
                assert any(thing.colour == colour for thing in scene.things), text
                colours.add(colour)
    assert longest <= SLOTS
    assert colours == set(COLOURS) and named == set(NOUNS)


# The tokenizer's training


def test_a_code_that_nothing_chooses_moves_to_a_latent():
    options = replace(OPTIONS.tokenizer, codebook_size=4, codebook_dim=2)
    model = options.build()
    codebook = Codebook(model, decay=0.5)
    latents = F.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]]), dim=-1)
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        codebook.begin(latents.repeat(8, 1), dice)
    chosen = torch.zeros(4, dtype=torch.long)
    for _ in range(12):
        codebook.follow(latents[:1].expand(4, 2), chosen, dice)
    torch.testing.assert_close(model.codes[0], latents[0])
    # the others had no latent for long and moved to the only one there is
    torch.testing.assert_close(model.codes, latents[:1].expand(4, 2), atol=1e-4, rtol=0)


def test_the_tokenizer_goes_on_where_it_was(tmp_path):
    options = OPTIONS.tokenizer

    class Stop(Exception):
        pass

    def until(seeds):
        if seeds[0] == 4 * options.batch:
            raise Stop
        return rendered_images(seeds)

    with pytest.raises(Stop):
        image_tokenizer.train(options, until, tmp_path / "a", tmp_path / "x", save_every_s=0)
    for work in ("a", "b"):
        image_tokenizer.train(options, rendered_images, tmp_path / work, tmp_path / f"{work}-out")
    first, second = (VQModel.from_pretrained(tmp_path / f"{work}-out") for work in "ab")
    for name, value in first.state_dict().items():
        torch.testing.assert_close(value, second.state_dict()[name], msg=name)


def test_neighbours_of_a_code_change_an_image_less_than_others():
    model = replace(OPTIONS.tokenizer, codebook_size=256).build()
    found = image_tokenizer.measure(model, to_pixels(rendered_images(range(8))))
    curve = found["interchange_mse"]
    assert curve["1"] < curve["32"] < curve["random"] * 1.5
    assert 0 < found["codes_used"] <= 1
    assert found["code_entropy_bits"] <= 8


# Fitting


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Linear(1, 1)

    def loss(self, step):
        x = torch.randn(8, 1, generator=torch.Generator().manual_seed(step))
        return (self.weight(x) - 2 * x).square().mean()


def test_fitting_stops_where_held_out_images_no_longer_gain_and_keeps_the_best(tmp_path):
    values, kept = iter([3.0, 2.0, 2.5, 2.1, 2.2, 1.0]), []
    options = FitOptions(steps=60, every=10, patience=3)
    log = fit(Line(), Line().loss, lambda: next(values), lambda: kept.append(1), options, tmp_path)
    assert [row["step"] for row in log] == [10, 20, 30, 40, 50]
    assert len(kept) == 2


def test_fitting_goes_on_where_it_was(tmp_path):
    options = FitOptions(steps=40, every=10, patience=9)
    lines = {}
    for name, stops in (("at once", (40,)), ("in two", (20, 40))):
        for stop in stops:
            line = lines[name] = Line()

            def loss(step, line=line, stop=stop):
                if step == stop < 40:
                    raise KeyboardInterrupt
                return line.loss(step)

            try:
                fit(line, loss, lambda: 1.0, lambda: None, options, tmp_path / name)
            except KeyboardInterrupt:
                assert name == "in two"
    torch.testing.assert_close(lines["at once"].weight.weight, lines["in two"].weight.weight)


def test_the_rate_rises_holds_and_falls():
    options = FitOptions(steps=3000)
    rates = [options.share_at(step) for step in range(3000)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[100] == rates[1000] == 1
    assert rates[2000] == pytest.approx(0.53)
    assert rates[-1] == pytest.approx(0.03, abs=0.001)


# What is measured


@pytest.fixture(scope="module")
def loud():
    """A caption model whose distributions are far from even."""
    model = Learner("caption", OPTIONS, 16).transformer.eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(15)
        model.model.embed_tokens.weight.mul_(20)
    return model


def test_sampled_images_follow_the_reported_distribution(loud):
    features = torch.randn(12, SLOTS, 24, generator=torch.Generator().manual_seed(1))
    lengths = torch.arange(2, 26, 2)[:, None]
    features, mask = left_padded(features, torch.arange(SLOTS) < lengths)
    setting = Setting(scale=1.7, sampling=Sampling(temperature=1.3, top_k=12))
    sampled = draw(loud, features, setting, torch.Generator().manual_seed(2), mask)
    both = torch.cat([features, loud.unconditional(features)])
    with torch.no_grad():
        logits = loud.code_logits(both, sampled.codes.repeat(2, 1), mask.repeat(2, 1))
    distribution = setting.target_logits(logits)
    torch.testing.assert_close(
        image_codes.entropy_of(distribution), sampled.entropy, atol=1e-3, rtol=1e-3
    )
    assert distribution.gather(-1, sampled.codes[..., None]).min() > -20
    own = -distribution.gather(-1, sampled.codes[..., None]).mean() * BITS
    assert float(own) == pytest.approx(float(sampled.entropy.mean()), rel=0.1)
    moving = reach(loud, features, sampled.codes, setting, torch.Generator().manual_seed(0), mask)
    assert moving["1"] > 0.02
    assert set(moving) == {"1", "2", "3", "15", "16", "17", "32"}


def test_a_setting_is_guidance_and_then_the_pipeline():
    given, nothing = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    distribution = Setting(scale=3.0, sampling=Sampling(temperature=0.5)).target_logits(
        torch.cat([given, nothing])
    )
    expected = ((nothing + 3 * (given - nothing)) / 0.5).log_softmax(-1)
    torch.testing.assert_close(distribution, expected)
    torch.testing.assert_close(
        Setting().target_logits(torch.cat([given, nothing])), given.log_softmax(-1)
    )


def test_a_code_that_is_resampled_unchanged_moves_no_distribution(loud):
    features = torch.randn(3, SLOTS, 24, generator=torch.Generator().manual_seed(1))
    greedy, dice = Setting(sampling=Sampling(top_k=1)), torch.Generator().manual_seed(0)
    sampled = draw(loud, features, greedy, dice)
    assert max(reach(loud, features, sampled.codes, greedy, dice).values()) < 1e-4


def test_entropy_of_positions_knows_positions_and_nothing_else():
    codes = torch.tensor([[0, 1, 5], [0, 2, 5], [0, 1, 5], [0, 2, 7]])
    expected = (0 + 1 + (0.75 * np.log2(4 / 3) + 0.25 * 2)) / 3
    assert image_codes.position_entropy(codes) == pytest.approx(expected)


def test_bits_per_code_are_those_of_the_distributions(loud):
    features = torch.randn(5, SLOTS, 24, generator=torch.Generator().manual_seed(1))
    codes = torch.randint(32, (5, 256), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        distribution = loud.code_logits(features, codes).log_softmax(-1)
    expected = -float(distribution.gather(-1, codes[..., None]).mean()) * BITS
    assert bits_per_code(loud, features, codes, batch=2) == pytest.approx(expected, rel=1e-4)


# What ships


@pytest.fixture(scope="module")
def test_images():
    """Some of those that the cards report on, in codes."""
    folder = ZOO / NAMES["class"] / "vq"
    first = HELD_OUT + LlamaGenScenesOptions().development
    vq = VQModel.from_pretrained(folder).eval()
    return vq, encode(vq, range(first, first + 48))


SHIPPED = [part for part, name in NAMES.items() if (ZOO / name).exists()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("part", SHIPPED)
def test_a_shipped_model_is_as_good_as_its_card_says(part, test_images):
    folder = ZOO / NAMES[part]
    _, corpus = test_images
    card = json.loads((folder / "card.json").read_text())
    learner = Learner(part, LlamaGenScenesOptions(), 16).eval()
    learner.transformer = LlamaGenForImageGeneration.from_pretrained(folder).eval()
    if learner.reader is not None:
        learner.reader.encoder = T5EncoderModel.from_pretrained(folder / "text_encoder").eval()
        assert (
            learner.reader.tokenizer.get_vocab()
            == AutoTokenizer.from_pretrained(folder).get_vocab()
        )
    assert learner.bits(corpus) == pytest.approx(card["bits_per_code"], abs=0.3)  # of 48
    assert card["guided"]["law_entropy_bits"] >= 2
    assert card["bits_per_code"] <= card["position_entropy_bits"] - 1
    assert learner.transformer.num_parameters() == card["parameters"]
    plan = LlamaGenScenesOptions().plans[part]
    assert learner.transformer.config.hidden_size == plan.width
    assert learner.transformer.config.num_hidden_layers == plan.layers


@pytest.mark.slow
def test_the_shipped_tokenizer_is_as_good_as_its_card_says(test_images):
    vq, corpus = test_images
    card = json.loads((ZOO / NAMES["class"] / "card.json").read_text())["tokenizer"]
    found = image_tokenizer.measure(vq, to_pixels(rendered_images(corpus.seeds.tolist())))
    assert found["psnr_db"] == pytest.approx(card["psnr_db"], abs=0.8)
    assert card["codes_used"] > 0.6
    assert card["interchange_mse"]["1"] < card["interchange_mse"]["random"] / 10


def test_no_weights_ship_twice():
    held = {}
    for file in ZOO.rglob("*.safetensors"):
        held.setdefault(hashlib.sha256(file.read_bytes()).digest(), []).append(file)
    assert [files for files in held.values() if len(files) > 1] == []
    sizes = [file.stat().st_size for file in ZOO.rglob("*") if file.is_file()]
    assert sum(sizes) <= 44e6


def test_shipped_models_share_a_tokenizer_also_where_one_is_saved_again(tmp_path):
    one, other = (load(f"zoo:{NAMES[part]}", "cpu") for part in ("class", "caption"))
    for name, value in one.adapter.vq.state_dict().items():
        assert torch.equal(value, other.adapter.vq.state_dict()[name]), name
    codes = torch.arange(256).reshape(1, 16, 16)
    assert torch.equal(one.adapter.pixels(codes), other.adapter.pixels(codes))
    for name in ("llamagen-scenes", "llamagen-scenes-caption"):
        shutil.copytree(ZOO / name, tmp_path / name)
    again = LlamaGenForImageGeneration.from_pretrained(tmp_path / "llamagen-scenes-caption")
    again.save_pretrained(tmp_path / "llamagen-scenes-caption")
    assert load(str(tmp_path / "llamagen-scenes-caption"), "cpu").adapter.vq is not None
    # without the folder that it names, a model generates codes and no pixels, as without any
    shutil.rmtree(tmp_path / "llamagen-scenes")
    assert load(str(tmp_path / "llamagen-scenes-caption"), "cpu").adapter.vq is None


def test_shipped_image_models_are_small():
    folders = [folder for folder in ZOO.glob("llamagen-*") if folder.is_dir()]
    sizes = [f.stat().st_size for folder in folders for f in folder.rglob("*") if f.is_file()]
    assert sum(sizes) <= 16 * 2**20
