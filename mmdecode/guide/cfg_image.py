"""Classifier-free guidance by the image: contrast with the model without it.

``log p(no image) + gamma (log p - log p(no image))``, on log-probabilities. A model that was never
trained without images has no unconditional branch, so one is chosen:

- ``no_image``: the prompt without image tokens
- ``mean``: an image that is the mean colour everywhere (zeros after normalisation)
- ``black``: a black image (zeros before normalisation)
- ``zero_features``: image tokens that are zero as the text model reads them

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
"""Unconditional branches: a transform and its options."""


class CFGImage(Linear):
    """Classifier-free guidance for answers and captions.

    Args:
        gamma: Strength; 0 is the unconditional branch alone. Without a cut, 3 and more is
            ungrammatical in the paper.
        without: The unconditional branch, one of `WITHOUT`.
        beta: Plausibility cut; the paper has none.

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
