"""Recipe of ``zoo:scene-classifier``: names the large thing of a scene, to judge image models.

A narrow ResNet of timm over the renderer's pictures of `mmdecode.zoo.scene_images`, drawn
from seeds that no image model of the zoo learns from. Pictures are worn at random, blurred and with
noise, since what it will judge came through a tokenizer.
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
from mmdecode.zoo.scene_images import class_of, draw_picture, pictures, to_pixels
from mmdecode.zoo.scenes import HELD_OUT, NOUNS, SIDE

OWN_SEEDS = 2**34
"""Pictures from here on are this recipe's; image models learn from others."""
ARCHITECTURE = "test_resnet"
WIDTHS: dict[str, Any] = {"channels": (32, 48, 64, 96), "stem_width": 16}
LEAST_WORN = 0.25  # share of pictures that stay as they are


@dataclass(frozen=True, kw_only=True)
class SceneClassifierOptions:
    """Settings of the recipe.

    Attributes:
        fit: How it is trained; there is no condition to be left out.
        development: Held-out pictures that decide when to stop.
        test: Others, that are reported.
    """

    fit: FitOptions = field(
        default_factory=lambda: FitOptions(
            steps=2400, batch=64, peak_rate=3e-3, every=100, patience=8, condition_dropout=0.0
        )
    )
    development: int = 512
    test: int = 4000


@dataclass(frozen=True)
class Pictures:
    """Pictures of consecutive seeds.

    Args:
        first: Seed.
        count: How many.
    """

    first: int
    count: int

    @property
    def seeds(self) -> range:
        """Theirs."""
        return range(self.first, self.first + self.count)

    @cached_property
    def classes(self) -> Tensor:
        """``(count,)``."""
        return torch.tensor([class_of(draw_picture(seed)) for seed in self.seeds])

    def batches(self, size: int = 64) -> Iterator[Tensor]:
        """Pixels from -1 to 1, ``(B, 3, SIDE, SIDE)``."""
        for start in range(0, self.count, size):
            yield to_pixels(pictures(self.seeds[start : start + size]))


def build() -> nn.Module:
    """The untrained classifier."""
    torch.manual_seed(0)
    return import_timm().create_model(ARCHITECTURE, num_classes=len(NOUNS), **WIDTHS)


def worn(pixels: Tensor, dice: torch.Generator) -> Tensor:
    """Pictures blurred and with noise, each by its own amount, some not at all."""
    count = len(pixels)
    padded = F.pad(pixels, (1, 1, 1, 1), mode="replicate")
    blurred = F.avg_pool2d(padded, 3, 1)
    blur, noise = ((torch.rand(count, 1, 1, 1, generator=dice) - LEAST_WORN) for _ in range(2))
    mixed = pixels.lerp(blurred, blur.clamp_min(0) / (1 - LEAST_WORN))
    return mixed + 0.2 * noise.clamp_min(0) * torch.randn(pixels.shape, generator=dice)


def loss_at(network: nn.Module, options: FitOptions, step: int) -> Tensor:
    """Cross-entropy of a step's pictures, which are drawn once."""
    dice = options.dice(step)
    own = Pictures(OWN_SEEDS + step * options.batch, options.batch)
    return F.cross_entropy(network(worn(next(own.batches(own.count)), dice)), own.classes)


@torch.no_grad()
def bits(network: nn.Module, pictures: Pictures) -> float:
    """Cross-entropy in bits."""
    distributions = torch.cat([network(batch) for batch in pictures.batches()])
    return float(F.cross_entropy(distributions, pictures.classes)) * BITS


def measured(classifier: Classifier, pictures: Pictures) -> dict[str, Any]:
    """Accuracy with its standard error, and the classes it tells worst."""
    found = classifier.judge((batch + 1) / 2 for batch in pictures.batches())
    wanted = pictures.classes.numpy()
    right = found.probabilities.argmax(1) == wanted
    share = float(right.mean())
    shown = sorted(set(wanted.tolist()))
    by_class = {NOUNS[place]: float(right[wanted == place].mean()) for place in shown}
    worst = sorted(by_class, key=by_class.__getitem__)[:5]
    return {
        "pictures": pictures.count,
        "accuracy": round(share, 4),
        "standard_error": round(math.sqrt(share * (1 - share) / pictures.count), 4),
        "worst_classes": {noun: round(by_class[noun], 3) for noun in worst},
    }


def export(network: nn.Module, folder: Path) -> None:
    """Half-precision weights and the configuration, as timm reads them."""
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
    """The whole recipe; resumable. ``out`` receives weights, configuration and card."""
    torch.set_num_threads(1)
    network = build()
    development = Pictures(HELD_OUT, options.development)
    log = fit(
        network,
        loss_at=lambda step: loss_at(network, options.fit, step),
        held_out=lambda: bits(network, development),
        keep=lambda: export(network, out),
        options=options.fit,
        work=work,
    )
    classifier = Classifier.from_pretrained(out)
    test = measured(classifier, Pictures(HELD_OUT + options.development, options.test))
    seen_scans = measured(classifier, Pictures(2 * OWN_SEEDS, options.test))
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
