"""Recipe of ``zoo:scene-classifier``: classifies a scene's large object, to evaluate image models.

The classifier is a narrow ResNet of timm, trained on rendered images of `mmdecode.zoo.scene_images`
from seeds that no image model of the zoo is trained on. Training images are blurred and noised at
random, since the images to be classified are decoded by an image tokenizer and less sharp.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdecode.models.image_classifier import Classifier, import_timm
from mmdecode.runs.files import marked_json, write_file, write_folder
from mmdecode.train.loop import BITS, FitOptions, fit
from mmdecode.zoo.scene_images import class_of, image_scene, rendered_images, to_pixels
from mmdecode.zoo.scenes import HELD_OUT, NOUNS, SIDE

OWN_SEEDS = 2**34
"""First seed of this recipe's training images; image models are trained on other seeds."""
ARCHITECTURE = "test_resnet"
WIDTHS: dict[str, Any] = {"channels": (32, 48, 64, 96), "stem_width": 16}
LEAST_WORN = 0.25  # share of images without degradation


@dataclass(frozen=True, kw_only=True)
class SceneClassifierOptions:
    """Settings of the recipe.

    Attributes:
        fit: Steps, learning rates and early stopping; ``condition_dropout`` has no effect.
        development: Number of held-out images that decide when training stops.
        test: Number of other held-out images on which accuracy is measured.
    """

    fit: FitOptions = field(
        default_factory=lambda: FitOptions(
            steps=2400, batch=64, peak_rate=3e-3, every=100, patience=8, condition_dropout=0.0
        )
    )
    development: int = 512
    test: int = 4000


@dataclass(frozen=True)
class SceneImages:
    """Rendered images of consecutive seeds, with their classes.

    Args:
        first: First seed.
        count: Number of images.
    """

    first: int
    count: int

    @property
    def seeds(self) -> range:
        """Seeds of the images."""
        return range(self.first, self.first + self.count)

    @cached_property
    def classes(self) -> Tensor:
        """Class of each image, ``(count,)``."""
        return torch.tensor([class_of(image_scene(seed)) for seed in self.seeds])

    def batches(self, size: int = 64) -> Iterator[Tensor]:
        """Yields batches of pixels from -1 to 1, ``(B, 3, SIDE, SIDE)``."""
        for start in range(0, self.count, size):
            yield to_pixels(rendered_images(self.seeds[start : start + size]))


def build() -> nn.Module:
    """Builds the untrained classifier."""
    torch.manual_seed(0)
    return import_timm().create_model(ARCHITECTURE, num_classes=len(NOUNS), **WIDTHS)


def worn(pixels: Tensor, dice: torch.Generator) -> Tensor:
    """Blurs images and adds noise, each by a random amount; a quarter of the amounts is 0."""
    count = len(pixels)
    padded = F.pad(pixels, (1, 1, 1, 1), mode="replicate")
    blurred = F.avg_pool2d(padded, 3, 1)
    blur, noise = ((torch.rand(count, 1, 1, 1, generator=dice) - LEAST_WORN) for _ in range(2))
    mixed = pixels.lerp(blurred, blur.clamp_min(0) / (1 - LEAST_WORN))
    return mixed + 0.2 * noise.clamp_min(0) * torch.randn(pixels.shape, generator=dice)


def loss_at(network: nn.Module, options: FitOptions, step: int) -> Tensor:
    """Computes the cross-entropy of blurred and noisy images; each step has images of its own."""
    dice = options.dice(step)
    own = SceneImages(OWN_SEEDS + step * options.batch, options.batch)
    return F.cross_entropy(network(worn(next(own.batches(own.count)), dice)), own.classes)


@torch.no_grad()
def bits(network: nn.Module, images: SceneImages) -> float:
    """Computes the mean cross-entropy of images in bits."""
    distributions = torch.cat([network(batch) for batch in images.batches()])
    return float(F.cross_entropy(distributions, images.classes)) * BITS


def measured(classifier: Classifier, images: SceneImages) -> dict[str, Any]:
    """Measures accuracy with its standard error, and finds the classes of lowest accuracy."""
    found = classifier.judge((batch + 1) / 2 for batch in images.batches())
    wanted = images.classes.numpy()
    right = found.probabilities.argmax(1) == wanted
    share = float(right.mean())
    present = sorted(set(wanted.tolist()))
    by_class = {NOUNS[index]: float(right[wanted == index].mean()) for index in present}
    worst = sorted(by_class, key=by_class.__getitem__)[:5]
    return {
        "pictures": images.count,
        "accuracy": round(share, 4),
        "standard_error": round(math.sqrt(share * (1 - share) / images.count), 4),
        "worst_classes": {noun: round(by_class[noun], 3) for noun in worst},
    }


def export(network: nn.Module, folder: Path) -> None:
    """Saves float16 weights and the configuration in timm's layout."""
    from timm.models import save_for_hf

    def fill(into: Path) -> None:
        save_for_hf(
            copy.deepcopy(network).half(),
            str(into),
            model_config={"label_names": list(NOUNS)},
            model_args=WIDTHS,
            safe_serialization=True,
            data_config={"input_size": (3, SIDE, SIDE), "mean": [0.5] * 3, "std": [0.5] * 3},
        )

    write_folder(folder, fill)


def run(options: SceneClassifierOptions, work: Path, out: Path) -> dict[str, Any]:
    """Trains the classifier, or resumes its training; returns its card.

    Args:
        options: Settings.
        work: Folder of the training state.
        out: Folder of weights, configuration and ``card.json``.
    """
    torch.set_num_threads(1)
    network = build()
    development = SceneImages(HELD_OUT, options.development)
    log = fit(
        network,
        loss_at=lambda step: loss_at(network, options.fit, step),
        held_out=lambda: bits(network, development),
        keep=lambda: export(network, out),
        options=options.fit,
        work=work,
    )
    classifier = Classifier.from_pretrained(out)
    test = measured(classifier, SceneImages(HELD_OUT + options.development, options.test))
    seen_scans = measured(classifier, SceneImages(2 * OWN_SEEDS, options.test))
    card = {
        "what": "names the large thing of a scene (28 nouns), to judge image models",
        "measured": f"accuracy {100 * test['accuracy']:.1f} % on {test['pictures']:,} held-out "
        "pictures",
        "parameters": sum(p.numel() for p in classifier.network.parameters()),
        "steps": int(log[-1]["step"]),
        "minutes": round(log[-1]["seconds"] / 60, 1),
        "held_out": test,
        "unseen_pictures_of_seen_scans": seen_scans,
        "recipe": asdict(options),
    }
    write_file(out / "card.json", marked_json(card))
    return {"folder": str(out)} | card
