"""Classifier-free guidance by the image: contrasts the model with itself without the image.

The guided logits are ``log p(no image) + gamma (log p - log p(no image))``. Vision-language models
are usually not trained for an input "without image", so there are several ways to replace it:

- ``no_image``: the prompt without image tokens
- ``mean``: an image of one colour, the mean colour (zeros after normalisation)
- ``black``: a black image (zeros before normalisation)
- ``zero_features``: image tokens whose embeddings in the text model are zero

Source: Kornblith et al. 2023, arXiv:2307.16686 (captions); Ho and Salimans 2022, arXiv:2207.12598.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import OptionError
from mmdecode.guide.linear import Linear, not_negative


def _zeros(values: Tensor, draw: torch.Generator) -> Tensor:
    return torch.zeros_like(values)


WITHOUT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "no_image": ("no_image", {}),
    "mean": ("pixels", {"change": _zeros}),
    "black": ("pictures", {"change": _zeros}),
    "zero_features": ("features", {"change": _zeros}),
}
"""For each way to leave the image out, the name of a transform and its options."""


class CFGImage(Linear):
    """Classifier-free guidance by the image, for answers and captions.

    Args:
        gamma: Guidance scale; with 0 the image is ignored. According to the paper, outputs become
            ungrammatical from 3 on, without a plausibility cut.
        without: How the image is left out, one of `WITHOUT`.
        beta: Plausibility cut: excludes tokens with a main probability below ``beta * max p``; the
            paper has none.

    The guide has no effect with ``gamma`` 1 and ``beta`` 0.
    """

    summary = "classifier-free guidance: away from the model without the image"
    source = "Kornblith et al. 2023; Ho and Salimans 2022"
    requires_inputs = ("image",)

    def __init__(self, gamma: float = 1.5, without: str = "no_image", beta: float = 0.0) -> None:
        if without not in WITHOUT:
            raise OptionError(f"without must be one of {', '.join(WITHOUT)}, got {without!r}")
        transform, options = WITHOUT[without]
        branch = BranchSpec(name="unconditional", transform=transform, transform_options=options)
        not_negative("gamma", gamma)
        super().__init__([branch], [gamma, 1 - gamma], beta, log_space=True)
