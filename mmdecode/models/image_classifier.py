"""A classifier to evaluate generated images; it is trained independently of the image models.

``zoo:scene-classifier``, a shipped model, classifies the synthetic scenes that the shipped image
models generate; for other classes, give any folder that timm reads. Distances between sets of
images (`mmdecode.evaluation.images.samples`) use the features of its last layer but one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdecode.checkpoints import local_path
from mmdecode.errors import InputError, MissingExtraError

ZOO_CLASSIFIER = "zoo:scene-classifier"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Output of a classifier for images.

    Attributes:
        features: States before the last layer, ``(n, d)``.
        probabilities: Probabilities of the classes, ``(n, classes)``.
    """

    features: np.ndarray
    probabilities: np.ndarray


class Classifier:
    """A timm model that classifies images.

    Args:
        network: The timm model, which takes pixels from -1 to 1.
        classes: Class names, in the order of the model's outputs.
        side: Height and width in pixels that images are resized to, as in the model's training.
        name: Name of the classifier in reports.
    """

    def __init__(
        self, network: nn.Module, classes: Sequence[str], side: int, name: str = ""
    ) -> None:
        self.network, self.name = network.eval(), name
        self.classes, self.side = tuple(classes), side

    @classmethod
    def from_pretrained(cls, name: str | Path = ZOO_CLASSIFIER) -> Classifier:
        """Loads a classifier from a folder that timm saved.

        Args:
            name: A folder or ``zoo:NAME``.

        Raises:
            InputError: timm cannot read the folder.
            MissingExtraError: timm is not installed.
        """
        timm, path = import_timm(), local_path(name)
        try:
            network = timm.create_model(f"local-dir:{path}", pretrained=True)
        except (OSError, RuntimeError, AssertionError, KeyError) as error:
            raise InputError(
                f"no classifier can be read from {path}: {error}; expected config.json and "
                "model.safetensors as timm writes them"
            ) from error
        about: dict[str, Any] = network.pretrained_cfg
        names = about.get("label_names") or [str(i) for i in range(network.num_classes)]
        return cls(network, names, about["input_size"][-1], str(name))

    @torch.no_grad()
    def judge(self, pixels: Iterable[Tensor]) -> Judged:
        """Computes features and probabilities of images.

        Args:
            pixels: Batches of pixels from 0 to 1, ``(B, 3, H, W)`` each.
        """
        features, probabilities = [], []
        for batch in pixels:
            resized = batch
            if batch.shape[-2:] != (self.side, self.side):
                resized = F.interpolate(batch, (self.side, self.side), mode="area")
            network: Any = self.network
            hidden = network.forward_head(
                network.forward_features(2 * resized - 1), pre_logits=True
            )
            features.append(hidden.numpy())
            probabilities.append(network.get_classifier()(hidden).softmax(-1).numpy())
        return Judged(
            features=np.concatenate(features), probabilities=np.concatenate(probabilities)
        )


def import_timm() -> Any:
    """Imports the library timm.

    Raises:
        MissingExtraError: timm is not installed.
    """
    with MissingExtraError.instead("judging images by a classifier needs timm", extra="image"):
        import timm
    return timm
