"""Reconstructs whole images from a processor's pixels, and converts them back to pixels.

A processor scales and normalises an image, and may cut it into tiles or patches. Guides that
transform whole images need the inverse: images ``(..., 3, H, W)`` with channels in 0..1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mmdecode.errors import IncompatibleError

if TYPE_CHECKING:
    from PIL.Image import Image

Change = Callable[[Tensor, torch.Generator], Tensor]
"""Function of images ``(..., 3, H, W)`` in 0..1 and a generator; returns the same shape."""

NORMS = (
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),  # CLIP
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # SigLIP
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet
)
"""Mean and standard deviation of each channel, with which processors normalise images."""

_MAX_OFF_GRID = 0.2
"""Maximum share of pixels that are no 8-bit values; half or more with a wrong normalisation."""


def of_image(image: Image) -> Tensor:
    """Converts an RGB image to a tensor in 0..1, ``(3, H, W)``."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def to_image(channels: Tensor) -> Image:
    """Converts a tensor in 0..1, ``(3, H, W)``, to an RGB image; the inverse of `of_image`."""
    from PIL import Image

    values = (channels.clamp(0, 1) * 255).round().byte()
    return Image.fromarray(values.permute(1, 2, 0).numpy())


def edit_image(image: Image, change: Change, draw: torch.Generator) -> Image:
    """Applies a change to a PIL image."""
    return to_image(change(of_image(image), draw))


def edit_normalised(normalised: Tensor, change: Change, seed: int) -> Tensor:
    """Applies a change to normalised images: undoes the normalisation, changes, normalises again.

    Args:
        normalised: Normalised images ``(..., 3, H, W)`` with 8 bits per channel before, so that the
            normalisation can be inferred.
        change: The change of the images.
        seed: Seed of its random generator; the same for parts of one image that must be changed in
            the same way.

    Raises:
        IncompatibleError: The normalisation is none of `NORMS`.
    """
    mean, deviation = normalisation(normalised)
    images = normalised.float() * deviation + mean
    images = change(images, torch.Generator().manual_seed(seed))
    return (images - mean) / deviation


def normalisation(normalised: Tensor) -> tuple[Tensor, Tensor]:
    """Infers mean and standard deviation, ``(3, 1, 1)`` each, of normalised 8-bit images.

    A value fits a normalisation if some 8-bit value, normalised, would be rounded to it in the
    pixels' dtype. If two normalisations fit equally well, the one with the smaller mean error is
    chosen. For an image of a single colour in bfloat16 that may be the wrong one; the colour is
    then slightly off.

    Raises:
        IncompatibleError: None of `NORMS` fits.
    """
    values = normalised.float()
    _, exponent = torch.frexp(values)
    rounding = torch.finfo(normalised.dtype).eps / 4 * torch.exp2(exponent)
    present = values != 0  # padding of a batch is not normalised
    found = []
    for norm in NORMS:
        mean, deviation = values.new_tensor(norm)[..., None, None]
        steps = (values * deviation + mean) * 255
        exact = (steps.round().clamp(0, 255) / 255 - mean) / deviation
        off = (exact - values).abs()[present]
        if len(off):
            off_grid = float((off > rounding[present] + 1e-5).float().mean())
            found.append((off_grid, float(off.mean()), mean, deviation))
    best = min(found, key=lambda one: one[:2], default=None)
    if best is None or best[0] > _MAX_OFF_GRID:
        raise IncompatibleError.between(
            "a guide that transforms images",
            "these pixels",
            "they are no eight-bit images under a known normalisation (CLIP, SigLIP, ImageNet)",
            "use mmdecode.vlm.Answerer, which passes the images themselves",
        )
    return best[2], best[3]


def of_tiles(tiles: Tensor) -> Tensor:
    """Joins tiles ``(R, C, 3, h, w)`` into one image ``(3, R h, C w)``."""
    rows, columns, channels, high, wide = tiles.shape
    return tiles.permute(2, 0, 3, 1, 4).reshape(channels, rows * high, columns * wide)


def to_tiles(image: Tensor, rows: int, columns: int) -> Tensor:
    """Cuts an image into tiles; the inverse of `of_tiles`."""
    channels, high, wide = image.shape
    cut = image.reshape(channels, rows, high // rows, columns, wide // columns)
    return cut.permute(1, 3, 0, 2, 4)


def of_patches(patches: Tensor, grid: Sequence[int], merged: int, frames: int) -> Tensor:
    """Joins patches of Qwen-VL into images ``(T F, 3, H, W)``.

    Args:
        patches: Patches of p x p pixels, ``(T R C, 3 F p p)``; the ``merged * merged`` patches of
            one token are adjacent.
        grid: T, R and C: numbers of patches in time, height and width.
        merged: Side, in patches, of the square that becomes one token.
        frames: F, the number of frames that one patch covers.
    """
    time, rows, columns = grid
    side = round((patches.shape[1] / (3 * frames)) ** 0.5)
    shape = (time, rows // merged, columns // merged, merged, merged, 3, frames, side, side)
    cut = patches.reshape(shape).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
    return cut.reshape(time * frames, 3, rows * side, columns * side)


def to_patches(images: Tensor, grid: Sequence[int], merged: int, frames: int) -> Tensor:
    """Cuts images into patches; the inverse of `of_patches`."""
    time, rows, columns = grid
    side = images.shape[-1] // columns
    shape = (time, frames, 3, rows // merged, merged, side, columns // merged, merged, side)
    cut = images.reshape(shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(time * rows * columns, -1)


def refuse_parts(model: str) -> None:
    """Raises an error for images that were cut into parts in an unknown way.

    Raises:
        IncompatibleError: Always.
    """
    raise IncompatibleError.between(
        "a guide that transforms images",
        f"the pixels of {model}",
        "an image was cut into parts in an unknown way",
        "use mmdecode.vlm.Answerer, which passes the images themselves",
    )
