"""Transforms of images, and images reconstructed from a processor's pixels and back."""

import colorsys

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from mmdecode.adapters.vision import pixels
from mmdecode.errors import IncompatibleError
from mmdecode.guide import transforms
from mmdecode.guide.transforms import TRANSFORMS


def random_image(*shape, seed=0):
    """Of whole eighths of bits, as processors are given."""
    shape = shape or (3, 96, 144)
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed)) / 255


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_keeps_size_and_range_and_hangs_on_its_draws_alone(name):
    values = random_image()
    found = TRANSFORMS[name](values, seeded(3))
    assert found.shape == values.shape
    assert found.amin() >= 0 and found.amax() <= 1 + 1e-6
    assert torch.equal(found, TRANSFORMS[name](values, seeded(3)))
    assert not torch.allclose(found, values, atol=1e-3)
    assert torch.equal(values, random_image())  # it was not changed in place
    if "flip" not in name:
        assert not torch.equal(found, TRANSFORMS[name](values, seeded(4)))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_frames_are_transformed_alike(name):
    frames = random_image(2, 3, 20, 20)
    found = TRANSFORMS[name](frames, seeded(1))
    for frame, own in zip(frames, found, strict=True):
        assert torch.allclose(TRANSFORMS[name](frame, seeded(1)), own, atol=1e-5)


@pytest.mark.parametrize("side", [1, 2, 3])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_tiny_image_can_be_transformed(name, side):
    for seed in range(5):
        assert TRANSFORMS[name](random_image(3, side, 1), seeded(seed)).isfinite().all()


def test_flips_are_flips():
    values = random_image()
    assert torch.equal(transforms.horizontal_flip(values, seeded())[:, :, 0], values[:, :, -1])
    assert torch.equal(transforms.vertical_flip(values, seeded())[:, 0], values[:, -1])


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_a_rotation_by_quarters_is_exact(degrees):
    values = random_image(3, 16, 16)
    expected = values.rot90(degrees // 90, dims=(-2, -1))
    assert torch.allclose(transforms.rotated(values, degrees), expected)


def test_a_rotation_keeps_shapes_as_they_are_on_a_wide_image():
    values = torch.zeros(3, 60, 120)
    values[:, 25:35, 55:65] = 1  # a square in the middle
    turned = transforms.rotated(values, 90)
    assert torch.equal(turned, values)
    corner = transforms.rotated(torch.ones(3, 60, 120), 45)[:, 0, 0]
    assert torch.equal(corner, torch.zeros(3))


@pytest.mark.parametrize("turns", [-0.5, -0.2, 0.0, 0.31, 0.5])
def test_hue_is_that_of_the_standard_library(turns):
    values = random_image(3, 4, 4).double()
    found = transforms.hue_shifted(values, turns)
    for row in range(4):
        for column in range(4):
            h, s, v = colorsys.rgb_to_hsv(*values[:, row, column].tolist())
            expected = colorsys.hsv_to_rgb((h + turns) % 1, s, v)
            assert found[:, row, column].tolist() == pytest.approx(list(expected), abs=1e-9)
    grey = torch.full((3, 2, 2), 0.4)
    assert torch.allclose(transforms.hue_shifted(grey, 0.3), grey)


def test_strengths_of_one_change_nothing_and_of_zero_all():
    values = random_image()
    for change in (transforms.brightened, transforms.contrasted, transforms.saturated):
        assert torch.allclose(change(values, 1.0), values, atol=1e-6)
    assert not transforms.brightened(values, 0.0).any()
    assert transforms.contrasted(values, 0.0).std() < 1e-6
    assert torch.allclose(*(transforms.saturated(values, 0.0)[c] for c in (0, 2)))


def test_a_blur_is_that_of_pillow_and_scales_with_the_image():
    values = random_image(3, 48, 48)
    image = pixels.to_image(values)
    expected = pixels.of_image(image.filter(ImageFilter.GaussianBlur(1.0)))
    found = transforms.blurred(values, 1.0, radius=5)
    assert (found - expected)[:, 8:-8, 8:-8].abs().max() < 0.03
    spot = torch.zeros(3, 336, 336)
    spot[:, 168, 168] = 1
    assert (transforms.blur(spot, seeded())[0, 168] > 0).sum() == 13
    small = torch.zeros(3, 168, 168)
    small[:, 84, 84] = 1
    assert (transforms.blur(small, seeded())[0, 84] > 0).sum() == 7


def test_a_crop_shows_a_part_at_full_size():
    ramp = (torch.arange(60) / 59).expand(3, 60, 60).contiguous()
    for seed in range(8):
        found = transforms.resized_crop(ramp, seeded(seed))
        span = float(found.amax() - found.amin())
        assert 0.2 < span <= 1 and (found[0, 0].diff() >= -1e-6).all()


# Out of pixels and back


def normalised(values, norm):
    mean, deviation = (torch.tensor(part)[:, None, None] for part in pixels.NORMS[norm])
    return (values - mean) / deviation


@pytest.mark.parametrize("norm", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_normalisation_is_found_from_the_pixels(norm, dtype):
    values = random_image(3, 32, 32)
    seen = []
    given = normalised(values, norm).to(dtype)
    found = pixels.edit_normalised(given, lambda p, draw: seen.append(p) or p, seed=0)
    assert torch.allclose(seen[0], values, atol=1e-5 if dtype == torch.float32 else 5e-3)
    assert torch.allclose(found, given.float(), atol=1e-5)


def test_pixels_of_no_known_normalisation_are_refused():
    for given in (torch.randn(3, 16, 16), normalised(random_image(3, 16, 16), 0) * 1.3):
        with pytest.raises(IncompatibleError, match="Answerer"):
            pixels.edit_normalised(given, lambda p, draw: p, seed=0)


@pytest.mark.parametrize("norm", range(3))
def test_normalisation_of_flat_dark_or_pale_images_is_found_in_half_precision(norm):
    pale = 0.8 + random_image(3, 16, 16).mul(0.2 * 255).floor() / 255
    for values in (torch.ones(3, 4, 4), torch.full((3, 4, 4), 128 / 255), pale, 1 - pale):
        given = normalised((values * 255).round() / 255, norm).bfloat16()
        mean, _ = pixels.normalisation(given)
        assert mean.flatten().tolist() == pytest.approx(list(pixels.NORMS[norm][0]))


def test_pil_images_and_tensors_convert_both_ways():
    image = Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3))
    assert pixels.of_image(image).shape == (3, 4, 5)
    back = pixels.to_image(pixels.of_image(image))
    assert back.tobytes() == image.tobytes()


def test_tiles_are_put_together_and_cut_again():
    whole = random_image(3, 8, 12)
    tiles = pixels.to_tiles(whole, 2, 3)
    assert torch.equal(tiles[1, 2], whole[:, 4:, 8:])
    assert torch.equal(pixels.of_tiles(tiles), whole)


def test_patches_are_in_the_order_of_the_processor():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096, do_resize=False
    )
    image = pixels.to_image(random_image(3, 16, 24))
    built = processor(image, return_tensors="pt")
    grid = built["image_grid_thw"][0].tolist()
    found = pixels.of_patches(built["pixel_values"], grid, merged=2, frames=2)
    assert found.shape == (2, 3, 16, 24)
    assert torch.allclose(found[1], normalised(pixels.of_image(image), 0), atol=1e-5)
    assert torch.equal(pixels.to_patches(found, grid, 2, 2), built["pixel_values"])
