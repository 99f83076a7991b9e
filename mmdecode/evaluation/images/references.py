"""Reference images for distances and for the check against memorisation.

References are either rendered scenes, the training domain of the zoo (the small models trained by
this project), or read from a folder. Generated images are decoded by the model's image tokenizer,
so references are encoded and decoded by it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmdecode.errors import IncompatibleError, InputError
from mmdecode.evaluation.images.features import nearest
from mmdecode.evaluation.images.report import Truth, small
from mmdecode.image_ar.completion import codes_of
from mmdecode.image_ar.loading import RasterModel
from mmdecode.models.image_classifier import Classifier

SCENES = "scenes"
UNSEEN = 2**35
"""First seed of scenes that no model was trained on."""
BATCH = 64


def truth_of(
    model: RasterModel,
    classifier: Classifier,
    real: str,
    training: Path | None = None,
    count: int = 1000,
) -> Truth:
    """Loads or renders reference images, and computes their features.

    Args:
        model: Model whose image tokenizer encodes and decodes the images.
        classifier: Classifier that computes the features.
        real: `SCENES`, or a folder of images that the model was not trained on.
        training: Folder of training images of the model; ``None``: with `SCENES` they are rendered,
            otherwise there are none.
        count: Largest number of reference images.

    Raises:
        InputError: A folder does not exist or holds fewer than 4 images.
        IncompatibleError: The model's tokenizer cannot encode images, or with `SCENES` its images
            do not have the size of scenes.
    """
    layout, device = model.adapter.layout, model.adapter.model.device
    blank = torch.zeros((1, layout.rows, layout.columns), dtype=torch.long, device=device)
    side = model.adapter.decode(blank).shape[2:]
    classes, trained = None, None
    if real == SCENES:
        from mmdecode.zoo.scene_images import CORPUS_IMAGES, CORPUS_SEED, class_of, image_scene

        seeds = range(UNSEEN, UNSEEN + count)
        classes = np.array([class_of(image_scene(seed)) for seed in seeds])
        batches = _scenes(seeds, side)
        trained = _scenes(range(CORPUS_SEED, CORPUS_SEED + CORPUS_IMAGES), side)
    else:
        batches = _folder(Path(real), side, count)
    if training is not None:
        trained = _folder(training, side, None)
    raw, decoded = [], []
    for batch in batches:
        codes = torch.stack([codes_of(model.adapter, image) for image in batch])
        raw.append(batch)
        decoded.append(model.adapter.decode(codes.to(device)).cpu())
    near = None
    if trained is not None:
        points = np.concatenate([small(part) for part in trained])
        near = points, nearest(np.concatenate([small(batch) for batch in decoded]), points)
    return Truth(
        unseen=classifier.judge(raw),
        decoded=classifier.judge(decoded),
        training=near,
        classes=classes,
    )


def _scenes(seeds: range, side: Sequence[int]) -> Iterator[Tensor]:
    """Yields rendered scenes in batches ``(B, 3, H, W)`` with values from 0 to 1."""
    from mmdecode.zoo.scene_images import rendered_images
    from mmdecode.zoo.scenes import SIDE

    if tuple(side) != (SIDE, SIDE):
        raise IncompatibleError.between(
            "--real scenes",
            "the model",
            f"scenes have {SIDE} x {SIDE} pixels, the model's images {side[0]} x {side[1]}",
            "give a folder of images, or --real none",
        )
    for start in range(0, len(seeds), BATCH):
        yield _as_pixels(rendered_images(seeds[start : start + BATCH]))


def _folder(folder: Path, side: Sequence[int], count: int | None) -> Iterator[Tensor]:
    """Yields center-cropped, resized images of a folder: ``(B, 3, H, W)`` with values 0 to 1."""
    from PIL import Image, ImageOps

    from mmdecode.runs.inputs import find_files
    from mmdecode.vlm.images import SUFFIXES, read_image

    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder; expected a folder of images, 'scenes' or 'none'"
        )
    files = find_files([str(folder)], SUFFIXES, "image")[:count]
    if len(files) < 4:
        raise InputError(f"{folder} holds {len(files)} images; distances need at least 4")
    height, width = side
    for start in range(0, len(files), BATCH):
        read = map(read_image, files[start : start + BATCH])
        fitted = (ImageOps.fit(one, (width, height), Image.Resampling.BOX) for one in read)
        yield _as_pixels(np.stack([np.asarray(one) for one in fitted]))


def _as_pixels(images: np.ndarray) -> Tensor:
    """Converts images ``(B, H, W, 3)`` uint8 to pixels ``(B, 3, H, W)`` from 0 to 1."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
