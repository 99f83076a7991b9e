"""FLASH: a drafter that reads an image as a few latents and drafts several tokens in one pass.

Learned queries A attend to the target's states H of an image, ``softmax(A H^T) H``. The resulting
latents replace the last rows of the image and keep their positions; the image's other rows are
dropped. One layer of attention and a wide linear layer compute the states of tokens t + 1 to t + K
from row t.

Source: Wang et al. 2025 (FLASH), arXiv:2505.12728, from the formulas: the released class cannot run
(ZihuaEvan/FlashSD, flash/model/llama_sar.py). Differs from it: heads share keys in groups, where it
sums over all groups for every head; attention has a residual; any number of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmdecode.models.feature_drafter import Attention, FeatureDrafter, Level, Rows
from mmdecode.models.image_rows import at_last_rows, members_of


class Head(Attention):
    """Attention, followed by a linear layer that computes ``k`` states for each row."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({"attention_bias": True, **config})
        width = config["hidden_size"]
        self.ar_proj = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, config["k"] * width)
        )


class FlashModel(FeatureDrafter):
    """FLASH's drafter: computes ``k`` states per row; the target's head reads each of them.

    ``k`` and ``compress_len`` (the number of queries A) are read from the configuration. With
    ``k = 1`` each row predicts the token at the same position as in EAGLE.
    """

    kind: ClassVar[str] = "flash"
    marker: ClassVar[str] = "layers.ar_proj."

    def __init__(self, config: Mapping[str, Any], own_embedding: bool = False) -> None:
        super().__init__(config, own_embedding)
        self.steps: int = config["k"]
        self.A = nn.Parameter(torch.randn(config.get("compress_len", 64), self.width) * 0.02)
        self.fc = nn.Linear(2 * self.width, self.width, bias=config.get("bias", True))
        self.layers = Head(config)

    def levels(self, num_layers: int) -> tuple[Level, ...]:
        """Returns the level of the target's states after the final norm."""
        return ("last",)

    def prepare(self, rows: Rows) -> Rows:
        """Replaces the last rows of each image by its latents, and drops its other rows."""
        assert rows.images is not None and rows.kept is not None
        images = rows.images * rows.kept
        members = members_of(images)
        if not members.shape[1]:
            return rows
        scores = torch.einsum("ch,blh->bcl", self.A, rows.features)[:, None]
        low = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(~members[:, :, None], low).softmax(-1)  # (B, I, C, L)
        latents = torch.einsum("bicl,blh->bich", weights, rows.features)
        embeds, stays = at_last_rows(latents, members, rows.embeds)
        kept = rows.kept & ((images == 0) | stays)
        return replace(rows, embeds=embeds, kept=kept, images=images * stays)

    def read(self, rows: Rows) -> Tensor:
        """Returns the layer's input: ``W [e; h]`` for text, and latents unchanged."""
        states = self.fc(torch.cat([rows.embeds, rows.features], -1))
        if rows.images is None:
            return states
        return torch.where((rows.images > 0)[..., None], rows.embeds, states)

    def forward(self, rows: Rows, mask: Tensor | None, past: Any) -> Tensor:
        """Computes states of the ``k`` tokens after each row's token, ``(B, Q, k * H)``."""
        states = self.read(rows)
        rotation = self.rotary(rows.positions, states.dtype)
        return self.layers.ar_proj(states + self.layers(states, rotation, mask, past))

    def logits(self, states: Tensor, adapter: Any) -> Tensor:
        """Computes logits of n states, ``(..., n * H)`` to ``(..., n, V)``; n = 1: ``(..., V)``."""
        if states.shape[-1] == self.width:
            return adapter.head(states)
        return adapter.head(states.unflatten(-1, (-1, self.width)))
