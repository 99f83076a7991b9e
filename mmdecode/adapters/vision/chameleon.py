"""Adapter of Chameleon for generating text; `mmdecode.adapters.images.chameleon` is for images."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmdecode.adapters.vision.base import VisionLanguageAdapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ChameleonAdapter(VisionLanguageAdapter):
    """Chameleon, generating text; image tokens are excluded, as in the model's forward pass."""

    summary = "Chameleon, generating text"
    model_types = ("chameleon",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._images = torch.tensor(self._whole.vocabulary_mapping.image_tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Computes logits, and sets those of image tokens to the lowest finite value."""
        logits = super().head(hidden)
        if self._images.device != logits.device:
            self._images = self._images.to(logits.device)
        return logits.index_fill(-1, self._images, torch.finfo(logits.dtype).min)
