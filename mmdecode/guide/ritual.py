"""RITUAL: adds the model's logits for a randomly transformed image.

The guided logits are ``z(image) + alpha z(transformed image)``; then implausible tokens are
excluded, see `mmdecode.guide.linear`. The paper does not divide by ``1 + alpha``, so where both
branches agree the guide samples at temperature ``1 / (1 + alpha)``. For a fair baseline, compare
with the control guide ``TemperatureMatched``, or set ``normalize``. Transforms keep an image's
size, but not its meaning: flips exchange left and right, and crops may cut objects off.

Source: Woo et al. 2024, arXiv:2405.17821.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import OptionError
from mmdecode.guide.linear import Linear, not_negative
from mmdecode.guide.transforms import TRANSFORMS


class RITUAL(Linear):
    """Adds the logits of a second branch whose images are randomly transformed.

    Args:
        alpha: Weight of the logits for the transformed image.
        beta: Plausibility cut: excludes tokens with a main probability below ``beta * max p``.
        normalize: Whether the weights are divided by their sum, ``1 + alpha``.
        transform: One of `mmdecode.guide.transforms.TRANSFORMS`; ``None``: a random one per image.

    The guide has no effect with ``alpha`` 0 and ``beta`` 0.
    """

    summary = "adds the model's scores for a transformed image"
    source = "Woo et al. 2024"
    requires_inputs = ("image",)

    def __init__(
        self,
        alpha: float = 3.0,
        beta: float = 0.1,
        normalize: bool = False,
        transform: str | None = None,
    ) -> None:
        total = 1 + not_negative("alpha", alpha)
        if transform is not None and transform not in TRANSFORMS:
            raise OptionError(f"transform must be one of {', '.join(TRANSFORMS)}, got {transform}")
        names = tuple(TRANSFORMS) if transform is None else (transform,)
        branch = BranchSpec(
            name="transformed",
            transform="pictures",
            transform_options={"change": partial(_randomly_transformed, names)},
        )
        divisor = total if normalize else 1.0
        super().__init__([branch], [1 / divisor, alpha / divisor], beta)


def _randomly_transformed(names: tuple[str, ...], image: Tensor, draw: torch.Generator) -> Tensor:
    name = names[int(torch.randint(len(names), (), generator=draw))]
    return TRANSFORMS[name](image, draw)
