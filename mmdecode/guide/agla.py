"""AGLA-style: adds the model's logits for the part of the image that matters.

``z(image) + alpha z(local image)``, with the plausibility cut; as published, nothing is divided by
``1 + alpha``. The paper masks what a second model (BLIP) finds unrelated to the question. Here the
mask is ours: the image tokens that the image encoder attends to least are left out, whatever the
question.

Source: An et al. 2024, arXiv:2406.12718.
"""

from __future__ import annotations

from mmdecode.guide.linear import Linear, not_negative
from mmdecode.guide.rbd import attended_branch


class AGLA(Linear):
    """Assembly of global and local attention, without a second model.

    Args:
        alpha: Weight of the local image.
        beta: Plausibility cut: excludes tokens with a main probability below ``beta * max p``.
        keep: Share of the image tokens that stay; in the paper 0.5..1, depending on the question.

    The guide has no effect with ``alpha`` 0 and ``beta`` 0.
    """

    summary = "adds the scores for the most attended part of the image; the mask is ours"
    source = "An et al. 2024, in its style"
    requires_inputs = ("image",)

    def __init__(self, alpha: float = 2.0, beta: float = 0.5, keep: float = 0.5) -> None:
        super().__init__([attended_branch(keep)], [1.0, not_negative("alpha", alpha)], beta)
