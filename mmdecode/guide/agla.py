"""AGLA-style: together with what the model says of the part of the image that matters.

``z(image) + alpha z(local image)``, cut to what is plausible; as published nothing is divided by
``1 + alpha``. The paper masks an image by what a second model (BLIP) finds related to the question.
Here the mask is ours: the image tokens that the image encoder itself attends to least are left out,
whatever is asked.

Source: An et al. 2024, arXiv:2406.12718.
"""

from __future__ import annotations

from mmdecode.guide.linear import Linear, not_negative
from mmdecode.guide.rbd import attended_branch


class AGLA(Linear):
    """Assembly of global and local attention, without a second model.

    Args:
        alpha: Weight of the local image.
        beta: Plausibility cut.
        keep: Share of the image tokens that stay; the paper's lies in 0.5..1, by the question.

    Neutral: ``alpha`` 0 and ``beta`` 0.
    """

    summary = "adds the scores for the most attended part of the image; the mask is ours"
    source = "An et al. 2024, in its style"
    requires_inputs = ("image",)

    def __init__(self, alpha: float = 2.0, beta: float = 0.5, keep: float = 0.5) -> None:
        super().__init__([attended_branch(keep)], [1.0, not_negative("alpha", alpha)], beta)
