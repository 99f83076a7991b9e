"""Adapter of Gemma3 with images."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.adapters.vision.base import VisionLanguageAdapter


class Gemma3Adapter(VisionLanguageAdapter):
    """Gemma3, whose image tokens attend to one another in both directions."""

    summary = "Gemma3, whose images are read in both directions"
    model_types = ("gemma3",)
    divides_images: ClassVar = False  # the model makes its mask in any case

    def prompt_attention(self, images: Tensor, mask: Tensor) -> Tensor:
        """Returns a causal mask with full attention within each image, ``(B, P, P)``."""
        run = (images & ~pad(images, (1, -1))).cumsum(1).masked_fill(~images, 0)
        together = (run[:, :, None] == run[:, None]) & images[:, :, None]
        return torch.ones_like(together).tril() | together
