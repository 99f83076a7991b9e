"""Random transforms of images that keep their size.

An image is ``(..., 3, H, W)`` with values in 0..1; images along the leading dimensions are all
transformed in the same way. The ranges of random parameters are from RITUAL (Woo et al. 2024,
arXiv:2405.17821), which has images of 336 x 336 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, interpolate, pad

SIDE = 336
"""Side in pixels of an image for which the kernel of `blur` has 13 pixels."""


def horizontal_flip(image: Tensor, draw: torch.Generator) -> Tensor:
    """Mirrors left and right."""
    return image.flip(-1)


def vertical_flip(image: Tensor, draw: torch.Generator) -> Tensor:
    """Mirrors top and bottom."""
    return image.flip(-2)


def rotation(image: Tensor, draw: torch.Generator) -> Tensor:
    """Rotates by a random angle about the centre; areas outside of the image are black."""
    return rotated(image, _uniform(draw, -180, 180))


def colour_jitter(image: Tensor, draw: torch.Generator) -> Tensor:
    """Scales brightness, contrast and saturation by 0 to 2, rotates the hue; in random order."""
    changes = (brightened, contrasted, saturated, hue_shifted)
    amounts = [_uniform(draw, 0, 2) for _ in range(3)] + [_uniform(draw, -0.5, 0.5)]
    for index in torch.randperm(4, generator=draw).tolist():
        image = changes[index](image, amounts[index])
    return image


def blur(image: Tensor, draw: torch.Generator) -> Tensor:
    """Blurs with a Gaussian of 13 pixels and sigma 1.5 to 2, scaled by the image's size."""
    scale = min(image.shape[-2:]) / SIDE
    radius = max(1, round(6 * scale))
    return blurred(image, _uniform(draw, 1.5, 2.0) * scale, radius)


def resized_crop(image: Tensor, draw: torch.Generator) -> Tensor:
    """Crops 8 % to 100 % of the area, with aspect ratio 3:4 to 4:3, and resizes to full size."""
    high, wide = image.shape[-2:]
    for _ in range(10):
        area = high * wide * _uniform(draw, 0.08, 1.0)
        ratio = math.exp(_uniform(draw, math.log(3 / 4), math.log(4 / 3)))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= wide and 0 < height <= high:
            top = int(torch.randint(high - height + 1, (), generator=draw))
            left = int(torch.randint(wide - width + 1, (), generator=draw))
            return resized(image[..., top : top + height, left : left + width], high, wide)
    return image


TRANSFORMS: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "horizontal_flip": horizontal_flip,
    "vertical_flip": vertical_flip,
    "rotation": rotation,
    "colour_jitter": colour_jitter,
    "blur": blur,
    "resized_crop": resized_crop,
}


def rotated(image: Tensor, degrees: float) -> Tensor:
    """Rotates anticlockwise about the centre, with nearest-neighbour sampling."""
    flat, (high, wide) = _flat(image), image.shape[-2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = flat.new_tensor([[cos, -sin * high / wide, 0], [sin * wide / high, cos, 0]])
    grid = affine_grid(turn.expand(len(flat), 2, 3), list(flat.shape), align_corners=False)
    return grid_sample(flat, grid, mode="nearest", align_corners=False).view_as(image)


def brightened(image: Tensor, factor: float) -> Tensor:
    """Multiplies the values by a factor and clamps them to 0..1."""
    return (image * factor).clamp(0, 1)


def contrasted(image: Tensor, factor: float) -> Tensor:
    """Scales the difference from the mean grey value by a factor; 0 gives plain grey."""
    return _mixed(image, grey(image).mean((-1, -2), keepdim=True), factor)


def saturated(image: Tensor, factor: float) -> Tensor:
    """Scales the difference from each pixel's grey value by a factor; 0 removes colour."""
    return _mixed(image, grey(image), factor)


def grey(image: Tensor) -> Tensor:
    """Computes grey values by the luma weights of ITU-R 601, ``(..., 1, H, W)``."""
    weights = image.new_tensor([0.2989, 0.587, 0.114])[:, None, None]
    return (image * weights).sum(-3, keepdim=True)


def hue_shifted(image: Tensor, turns: float) -> Tensor:
    """Rotates the hue by a fraction of the colour circle; saturation and value (HSV) stay."""
    value, spread = image.amax(-3), image.amax(-3) - image.amin(-3)
    red, green, blue = image.unbind(-3)
    safe = torch.where(spread > 0, spread, 1)
    sector = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sector = (sector + 6 * turns) % 6
    channels = []
    for offset in (5, 3, 1):
        phase = (offset + sector) % 6
        channels.append(value - spread * torch.minimum(phase, 4 - phase).clamp(0, 1))
    return torch.stack(channels, -3)


def blurred(image: Tensor, sigma: float, radius: int) -> Tensor:
    """Applies a Gaussian blur over ``2 radius + 1`` pixels, mirrored at the image's edges."""
    flat = _flat(image)
    radius = min(radius, *(side - 1 for side in image.shape[-2:]))
    offsets = torch.arange(-radius, radius + 1, device=flat.device, dtype=flat.dtype)
    kernel = (-0.5 * (offsets / sigma) ** 2).exp()
    kernel = (kernel / kernel.sum()).expand(flat.shape[1], 1, 1, -1)
    flat = pad(flat, (radius, radius, radius, radius), mode="reflect")
    flat = conv2d(flat, kernel, groups=flat.shape[1])
    flat = conv2d(flat, kernel.transpose(2, 3), groups=flat.shape[1])
    return flat.view_as(image)


def resized(image: Tensor, high: int, wide: int) -> Tensor:
    """Resizes an image, bilinearly with antialiasing."""
    flat = interpolate(_flat(image), (high, wide), mode="bilinear", antialias=True)
    return flat.reshape(*image.shape[:-2], high, wide)


def _mixed(image: Tensor, other: Tensor, factor: float) -> Tensor:
    return (factor * image + (1 - factor) * other).clamp(0, 1)


def _flat(image: Tensor) -> Tensor:
    return image.reshape(-1, *image.shape[-3:])


def _uniform(draw: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand((), generator=draw))
