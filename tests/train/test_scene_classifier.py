import json

import numpy as np
import pytest
import torch

pytest.importorskip("timm")

from mmdecode.checkpoints import ZOO
from mmdecode.errors import InputError
from mmdecode.models.image_classifier import ZOO_CLASSIFIER, Classifier
from mmdecode.train.loop import FitOptions
from mmdecode.train.zoo.scene_classifier import (
    OWN_SEEDS,
    SceneClassifierOptions,
    SceneImages,
    build,
    loss_at,
    measured,
    run,
    worn,
)
from mmdecode.zoo.scene_images import to_pixels
from mmdecode.zoo.scenes import HELD_OUT, NOUNS

TINY = FitOptions(steps=2, batch=4, every=1, condition_dropout=0.0)


@pytest.fixture(scope="module")
def classifier():
    return Classifier.from_pretrained(ZOO_CLASSIFIER)


def test_the_card_says_how_good_it_is(classifier):
    card = json.loads((ZOO / "scene-classifier" / "card.json").read_text())
    held_out = SceneImages(HELD_OUT + 512, 300)
    found = measured(classifier, held_out)
    assert found["accuracy"] == pytest.approx(card["held_out"]["accuracy"], abs=0.025)
    assert sum(p.numel() for p in classifier.network.parameters()) == card["parameters"] < 1e6
    assert (ZOO / "scene-classifier" / "model.safetensors").stat().st_size < 1.5e6
    assert classifier.classes == NOUNS


def test_probabilities_are_those_of_the_whole_network(classifier):
    pixels = next(SceneImages(HELD_OUT, 3).batches())
    found = classifier.judge([(pixels + 1) / 2])
    with torch.no_grad():
        whole = classifier.network(pixels).softmax(-1)
    np.testing.assert_allclose(found.probabilities, whole, atol=1e-5)
    assert found.features.shape == (3, 96)


def test_images_of_another_size_are_resized(classifier):
    pixels = (next(SceneImages(HELD_OUT, 3).batches()) + 1) / 2
    large = pixels.repeat_interleave(2, 2).repeat_interleave(2, 3)
    first, second = (classifier.judge([batch]).features for batch in (pixels, large))
    np.testing.assert_allclose(first, second, atol=1e-4)


def test_a_folder_that_holds_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="no classifier"):
        Classifier.from_pretrained(tmp_path)


def test_some_images_stay_as_they_are_and_others_are_blurred():
    pixels = to_pixels(np.random.default_rng(0).integers(0, 255, (200, 8, 8, 3), dtype=np.uint8))
    changed = (worn(pixels, torch.Generator().manual_seed(0)) - pixels).abs().amax((1, 2, 3))
    assert 2 < int((changed < 1e-5).sum()) < 30  # a quarter of a quarter
    assert worn(pixels * 0, torch.Generator().manual_seed(0)).abs().max() < 1


def test_a_step_has_images_of_its_own_and_the_loss_falls():
    torch.manual_seed(0)
    network = build().train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    first = float(loss_at(network, TINY, 7).detach())
    assert float(loss_at(network, TINY, 8).detach()) != first
    for _ in range(15):
        loss = loss_at(network, TINY, 7)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < first / 2
    assert HELD_OUT > 2 * OWN_SEEDS + 10**6


def test_the_recipe_leaves_a_folder_that_loads(tmp_path):
    options = SceneClassifierOptions(fit=TINY, development=8, test=8)
    result = run(options, tmp_path / "work", tmp_path / "out")
    again = run(options, tmp_path / "work", tmp_path / "out")
    assert again["held_out"] == result["held_out"]
    loaded = Classifier.from_pretrained(tmp_path / "out")
    assert len(loaded.classes) == len(NOUNS)
    assert json.loads((tmp_path / "out" / "card.json").read_text())["steps"] == 2
