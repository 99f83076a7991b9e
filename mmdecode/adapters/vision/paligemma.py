"""Adapter of PaliGemma."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from mmdecode.adapters.vision.base import VisionLanguageAdapter


class PaliGemmaAdapter(VisionLanguageAdapter):
    """PaliGemma, whose positions begin at 1 and whose prompt attends in both directions."""

    summary = "PaliGemma, whose prompt is read in both directions"
    model_types = ("paligemma",)
    first_position: ClassVar = 1
    divides_images: ClassVar = False  # the model makes its mask in any case
    reads_forward: ClassVar = False

    def prompt_attention(self, images: Tensor, mask: Tensor) -> Tensor:
        """Returns a mask that lets each token attend to the whole prompt, ``(B, P, P)``."""
        return mask[:, :, None] & mask[:, None]
