"""The grammar of image tokens and the sampling pipeline, as logits processors of a decoder.

Both process all nodes of a draft at once (``at_nodes``), without synchronising with the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from mmdecode.engine.target_logits import Nodes
from mmdecode.image_ar.sampling import Sampling
from mmdecode.models.image_layout import Layout


class Grammar(LogitsProcessor):
    """Allows the image's codes at free positions, and the forced token alone at others.

    Args:
        layout: Layout of the image.
        prompt_length: Number of ids before the first generated one.
    """

    def __init__(self, layout: Layout, prompt_length: int = 0) -> None:
        self.layout, self.prompt_length = layout, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Masks one position per row: ``scores (B, V)`` after ``input_ids (B, P)``."""
        index = torch.full_like(input_ids[:, 0], input_ids.shape[1] - self.prompt_length)
        return self._mask(scores, index)

    def at_nodes(self, scores: Tensor, nodes: Nodes) -> Tensor:
        """Masks the root and all nodes, ``(B, N + 1, V)``."""
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
        """Warped scores, ``(B, V)``."""
        return self.sampling.warp(scores)

    def at_nodes(self, scores: Tensor, nodes: Nodes) -> Tensor:
        """Warped scores of the root and all nodes, ``(B, N + 1, V)``."""
        return self.sampling.warp(scores)
