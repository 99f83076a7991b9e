"""Diffusion noise: the schedule by its formula, and the reference's own numbers."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmdecode.guide.vcd import STEPS, VCD, noised, schedule

STORED = load_file(Path(__file__).parents[1] / "data" / "golden" / "vcd" / "noise.safetensors")


def test_the_schedule_is_the_references():
    signal, spread = schedule()
    assert torch.allclose(signal, STORED["schedule.sqrt_alpha_bar"], atol=1e-6, rtol=0)
    assert torch.allclose(spread, STORED["schedule.sqrt_one_minus_alpha_bar"], atol=1e-6, rtol=0)
    assert (signal.diff() < 0).all()
    # by the formula, in double precision
    kept = 1.0
    for step in range(501):
        u = -6 + 12 * step / 999
        kept *= 1 - ((0.005 - 1e-5) / (1 + math.exp(-u)) + 1e-5)
    assert signal[500].item() == pytest.approx(math.sqrt(kept), abs=1e-5)
    assert signal[500].item() == pytest.approx(0.8630, abs=1e-4)


@pytest.mark.parametrize("step", [0, 1, 100, 300, 500, 700, 900, 999])
def test_noised_pixels_are_the_references(step):
    found = noised(STORED["noise.pixel_values"], STORED["noise.epsilon"], step)
    assert torch.allclose(found, STORED[f"noise.T{step}"], atol=1e-6, rtol=0)


def change(step, values, seed=0):
    (branch,) = VCD(step=step).branches
    return branch.transform_options["change"](values, torch.Generator().manual_seed(seed))


def test_noise_has_the_variance_of_its_step_and_the_seed_of_its_image():
    zeros = torch.zeros(3, 64, 64)
    for step in (100, 500, STEPS - 1):
        spread = float(schedule()[1][step])
        assert change(step, zeros).std().item() == pytest.approx(spread, rel=0.02)
    assert torch.equal(change(500, zeros, seed=1), change(500, zeros, seed=1))
    assert not torch.equal(change(500, zeros, seed=1), change(500, zeros, seed=2))


def test_step_zero_leaves_an_image_nearly_as_it_is():
    image = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(5))
    assert (change(0, image) - image).std() / image.std() < 0.005


def test_pixels_in_half_precision_are_noised_in_single():
    values = torch.full((3, 8, 8), 0.5, dtype=torch.float16)
    assert torch.equal(change(500, values), change(500, values.float()))
