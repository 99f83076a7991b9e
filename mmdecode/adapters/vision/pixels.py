"""Pictures, channels of 0..1 as one would look at them, out of what processors make of images.

A processor scales and normalises an image, and may cut it into tiles or patches. Here that is done
backwards and forwards again, for guides that transform an image as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmdecode.errors import IncompatibleError

if TYPE_CHECKING:
    from PIL.Image import Image

Change = Callable[[Tensor, torch.Generator], Tensor]
"""Of pictures ``(..., 3, H, W)`` in 0..1; the shape stays."""

NORMS = (
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),  # CLIP
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # SigLIP
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet
)
"""Mean and deviation by channel that processors normalise with."""

_AMISS = 0.2  # share of values that no eight bits give; of another normalisation half and more


def of_image(image: Image) -> Tensor:
    """``(3, H, W)`` of an image in RGB."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def to_image(picture: Tensor) -> Image:
    """An image in RGB of ``(3, H, W)``."""
    from PIL import Image

    values = (picture.clamp(0, 1) * 255).round().byte()
    return Image.fromarray(values.permute(1, 2, 0).numpy())


def changed_image(image: Image, change: Change, draw: torch.Generator) -> Image:
    """An image, changed."""
    return to_image(change(of_image(image), draw))


def changed(normalised: Tensor, change: Change, seed: int) -> Tensor:
    """Normalised pictures ``(..., 3, H, W)``, changed and normalised again.

    Args:
        normalised: Of eight-bit images; the normalisation is told from that.
        change: What is done.
        seed: Of its draws, so that parts of one image can be changed alike.

    Raises:
        IncompatibleError: The normalisation is none of `NORMS`.
    """
    mean, deviation = normalisation(normalised)
    picture = normalised.float() * deviation + mean
    picture = change(picture, torch.Generator().manual_seed(seed))
    return (picture - mean) / deviation


def normalisation(normalised: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation ``(3, 1, 1)`` under which pictures were images of eight bits a channel.

    A value fits where an image's, normalised, would be rounded to it in the pixels' dtype. Where
    two normalisations fit equally well, the nearer one is taken; of a picture of one colour in
    bfloat16 that may be a wrong one, which shows the colour a little off.

    Raises:
        IncompatibleError: None of `NORMS` is.
    """
    values = normalised.float()
    _, exponent = torch.frexp(values)
    rounding = torch.finfo(normalised.dtype).eps / 4 * torch.exp2(exponent)
    there = values != 0  # what fills up a batch is not normalised
    found = []
    for norm in NORMS:
        mean, deviation = values.new_tensor(norm)[..., None, None]
        steps = (values * deviation + mean) * 255
        exact = (steps.round().clamp(0, 255) / 255 - mean) / deviation
        off = (exact - values).abs()[there]
        if len(off):
            amiss = float((off > rounding[there] + 1e-5).float().mean())
            found.append((amiss, float(off.mean()), mean, deviation))
    best = min(found, key=lambda one: one[:2], default=None)
    if best is None or best[0] > _AMISS:
        raise IncompatibleError.between(
            "a guide that transforms images",
            "these pixels",
            "they are no eight-bit images by a known normalisation (CLIP, SigLIP, ImageNet)",
            "use mmdecode.vlm.Answerer, which hands over the images themselves",
        )
    return best[2], best[3]


def of_tiles(tiles: Tensor) -> Tensor:
    """Tiles ``(R, C, 3, h, w)`` as one picture ``(3, R h, C w)``."""
    rows, columns, channels, high, wide = tiles.shape
    return tiles.permute(2, 0, 3, 1, 4).reshape(channels, rows * high, columns * wide)


def to_tiles(picture: Tensor, rows: int, columns: int) -> Tensor:
    """`of_tiles` backwards."""
    channels, high, wide = picture.shape
    cut = picture.reshape(channels, rows, high // rows, columns, wide // columns)
    return cut.permute(1, 3, 0, 2, 4)


def of_patches(patches: Tensor, grid: Sequence[int], merged: int, frames: int) -> Tensor:
    """Patches of Qwen-VL as pictures ``(T F, 3, H, W)``.

    Args:
        patches: ``(T R C, 3 F p p)``; squares of ``merged`` by ``merged`` follow one another.
        grid: T, R and C: patches in time, height and width.
        merged: Patches on a side that become one token.
        frames: F, frames that one patch covers.
    """
    time, rows, columns = grid
    side = round((patches.shape[1] / (3 * frames)) ** 0.5)
    shape = (time, rows // merged, columns // merged, merged, merged, 3, frames, side, side)
    cut = patches.reshape(shape).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
    return cut.reshape(time * frames, 3, rows * side, columns * side)


def to_patches(pictures: Tensor, grid: Sequence[int], merged: int, frames: int) -> Tensor:
    """`of_patches` backwards."""
    time, rows, columns = grid
    side = pictures.shape[-1] // columns
    shape = (time, frames, 3, rows // merged, merged, side, columns // merged, merged, side)
    cut = pictures.reshape(shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(time * rows * columns, -1)


def refuse_parts(model: Any) -> None:
    """Says that parts of an image cannot be put together.

    Raises:
        IncompatibleError: Always.
    """
    raise IncompatibleError.between(
        "a guide that transforms images",
        f"the pixels of {type(model).__name__}",
        "an image was cut into parts, and how is not told",
        "use mmdecode.vlm.Answerer, which hands over the images themselves",
    )
