"""VCD: contrasts the model's logits with its logits for a noised image.

The guided logits are ``(1 + alpha) z(image) - alpha z(noised image)``; then implausible tokens are
excluded, see `mmdecode.guide.linear`. The noised image is the result of ``step`` of 1000 steps of a
diffusion process on normalised pixels v: ``sqrt(abar) v + sqrt(1 - abar) epsilon``. Each image of a
request has its own noise, seeded by the request. After 500 steps an image is still easily
recognised.

Source: Leng et al. 2024, arXiv:2311.16922, equations 3 and 4; the noise schedule is from its
release.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import OptionError
from mmdecode.guide.linear import Linear, contrast

STEPS = 1000


class VCD(Linear):
    """Visual contrastive decoding, which subtracts logits for a noised image.

    Args:
        alpha: Strength of the contrast. The release runs InstructBLIP with 0.5.
        beta: Plausibility cut: excludes tokens with a main probability below ``beta * max p``. The
            release's script for POPE sets 0.2.
        step: Number of diffusion steps, 0 to 999; 0 hardly changes the image.

    The guide has no effect with ``alpha`` 0 and ``beta`` 0.
    """

    summary = "away from the model's scores for a noised image"
    source = "Leng et al. 2024"
    requires_inputs = ("image",)

    def __init__(self, alpha: float = 1.0, beta: float = 0.1, step: int = 500) -> None:
        super().__init__([noised_branch(step)], contrast(alpha), beta)


def noised_branch(step: int) -> BranchSpec:
    """Returns the branch that reads noised images.

    Raises:
        OptionError: The step is not in 0..999.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < STEPS:
        raise OptionError(f"step must be a whole number in 0..{STEPS - 1}, got {step}")
    return BranchSpec(
        name="noised",
        transform="pixels",
        transform_options={"change": partial(_randomly_noised, step)},
    )


@lru_cache(maxsize=1)
def schedule() -> tuple[Tensor, Tensor]:
    """Returns ``sqrt(abar)`` and ``sqrt(1 - abar)`` of each step, ``(1000,)`` each, float32."""
    low, high = 1e-5, 5e-3
    betas = torch.linspace(-6, 6, STEPS).sigmoid() * (high - low) + low
    kept = (1 - betas).cumprod(0)
    return kept.sqrt(), (1 - kept).sqrt()


def noised(values: Tensor, noise: Tensor, step: int) -> Tensor:
    """Returns normalised pixels after ``step`` diffusion steps; ``noise`` is standard normal."""
    signal, spread = schedule()
    return float(signal[step]) * values + float(spread[step]) * noise


def _randomly_noised(step: int, values: Tensor, draw: torch.Generator) -> Tensor:
    noise = torch.randn(values.shape, generator=draw).to(values.device)
    return noised(values.float(), noise, step)
