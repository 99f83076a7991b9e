"""Logits processors for images: one masks tokens that cannot occur, one applies sampling settings.

Each processes all draft nodes at once (``at_nodes``), without synchronising with the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from mmdecode.engine.nodes import Nodes
from mmdecode.image_ar.sampling import Sampling
from mmdecode.models.image_layout import Layout


class Grammar(LogitsProcessor):
    """Masks all tokens but the image's codes or, where the layout forces a token, all but that.

    Args:
        layout: Layout of the image.
        prompt_length: Number of prompt tokens in ``input_ids``.
    """

    def __init__(self, layout: Layout, prompt_length: int = 0) -> None:
        self.layout, self.prompt_length = layout, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Masks one position per row: ``scores (B, V)`` after ``input_ids (B, P)``."""
        index = torch.full_like(input_ids[:, 0], input_ids.shape[1] - self.prompt_length)
        return self._mask(scores, index)

    def at_nodes(self, scores: Tensor, nodes: Nodes) -> Tensor:
        """Masks logits after the last committed token and each draft node, ``(B, N + 1, V)``."""
        return self._mask(scores, nodes.prefix_length - self.prompt_length)

    def _mask(self, scores: Tensor, index: Tensor) -> Tensor:
        allowed = self.layout.allowed(index, scores.shape[-1])
        return scores.masked_fill(~allowed, -torch.inf)


class Warp(LogitsProcessor):
    """Applies temperature, top-k and top-p of `Sampling`."""

    prefix_free = True

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns warped scores, ``(B, V)``."""
        return self.sampling.warp(scores)

    def at_nodes(self, scores: Tensor, nodes: Nodes) -> Tensor:
        """Returns warped scores after the last committed token and each node, ``(B, N + 1, V)``."""
        return self.sampling.warp(scores)
