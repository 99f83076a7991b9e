"""AGLA-style: adds the model's logits for the most relevant part of the image.

The logits are ``z(image) + alpha z(local image)``, without a division by ``1 + alpha``, as in the
paper. Then tokens that are implausible under the main branch are excluded, see
`mmdecode.guide.linear`. The local image differs from the paper, which masks the parts that a second
model (BLIP) finds unrelated to the question: here the image tokens that the image encoder attends
to least are left out, independently of the question.

Source: An et al. 2024, arXiv:2406.12718.
"""

from __future__ import annotations

from mmdecode.guide.linear import Linear, not_negative
from mmdecode.guide.rbd import attended_branch


class AGLA(Linear):
    """Assembly of global and local attention, without a second model.

    Args:
        alpha: Weight of the logits for the local image.
        beta: Plausibility cut: excludes tokens with a main probability below ``beta * max p``.
        keep: Share of the image tokens that are kept; in the paper 0.5 to 1, by the question.

    The guide has no effect with ``alpha`` 0 and ``beta`` 0.
    """

    summary = "adds the scores for the most attended part of the image; the mask is ours"
    source = "An et al. 2024, in its style"
    requires_inputs = ("image",)

    def __init__(self, alpha: float = 2.0, beta: float = 0.5, keep: float = 0.5) -> None:
        super().__init__([attended_branch(keep)], [1.0, not_negative("alpha", alpha)], beta)
