"""ViSpec: a drafter that reads an image as a few summary vectors and one global vector.

Learned queries attend to the embeddings of an image. All their outputs but the last are the
summaries, which replace the last rows of the image in the drafter's input; its other rows are
dropped. The last output is the global vector, which is mixed into the feature of every text token
after the image, up to the next image.

Source: Kang et al. 2025 (ViSpec), arXiv:2509.15235, section 3; checked against KangJialiang/ViSpec.
Differs from it: rows of a batch may have different images, at any positions, also next to each
other. An image with fewer tokens than summaries gets the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mmdecode.models.eagle import EagleModel
from mmdecode.models.feature_drafter import FeatureDrafter, Rows
from mmdecode.models.image_rows import at_last_rows, members_of


class Adaptor(nn.Module):
    """Cross-attention from learned queries to an image, without residual, norm or positions."""

    def __init__(self, config: Mapping[str, Any], queries: int) -> None:
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        self.dim = config.get("head_dim") or width // heads
        bias = bool(config.get("qkv_bias") or config.get("attention_bias"))
        self.q = nn.Parameter(torch.randn(queries, heads, self.dim) * self.dim**-0.5)
        self.k_proj = nn.Linear(width, heads * self.dim, bias=bias)
        self.v_proj = nn.Linear(width, heads * self.dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.dim, width, bias=bool(config.get("attention_bias")))

    def forward(self, embeds: Tensor, members: Tensor) -> Tensor:
        """Computes the output of each query on each image, ``(B, I, queries, H)``.

        Args:
            embeds: Embeddings of the input, ``(B, L, H)``.
            members: Mask of the tokens of each of I images, bool ``(B, I, L)``.
        """
        key, value = (
            part(embeds).unflatten(-1, (-1, self.dim)) for part in (self.k_proj, self.v_proj)
        )
        scores = torch.einsum("qhd,blhd->bhql", self.q, key) * self.dim**-0.5
        low = torch.finfo(scores.dtype).min
        weights = scores[:, None].masked_fill(~members[:, :, None, None], low).softmax(-1)
        return self.o_proj(torch.einsum("bihql,blhd->biqhd", weights, value).flatten(-2))


class ViSpecModel(EagleModel):
    """ViSpec's drafter: EAGLE with `Adaptor` for images and ``W_g [h; g]`` as the feature of text.

    Here h is EAGLE's feature and g the global vector of the latest image; ``num_queries`` in the
    configuration includes the query of g. ``W_g`` is initialised to the identity on h and zero on
    g, so that training can start from EAGLE's weights. Positions are 1-D token indices, also if the
    target has positions in time, height and width (M-RoPE).
    """

    kind: ClassVar[str] = "vispec"
    marker: ClassVar[str] = "imadpt."

    def __init__(self, config: Mapping[str, Any], own_embedding: bool = False) -> None:
        super().__init__(config, own_embedding)
        self.rotary.sections = None
        self.imadpt = Adaptor(config, config.get("num_queries", 2))
        self.img_fc = nn.Linear(2 * self.width, self.width, bias=config.get("bias", True))
        with torch.no_grad():
            self.img_fc.weight.copy_(torch.eye(self.width, 2 * self.width))
            if self.img_fc.bias is not None:
                self.img_fc.bias.zero_()

    @classmethod
    def from_weights(
        cls, config: Mapping[str, Any], weights: Mapping[str, Tensor], name: str | Path
    ) -> FeatureDrafter:
        """Builds the drafter's module from a checkpoint.

        Args:
            config: Configuration of the checkpoint; its ``num_queries`` is replaced by the number
                of queries in the weights.
            weights: Tensors by name.
            name: Name or path of the checkpoint, for error messages.
        """
        if "imadpt.q" in weights:
            config = {**config, "num_queries": len(weights["imadpt.q"])}
        return super().from_weights(config, weights, name)

    def prepare(self, rows: Rows) -> Rows:
        """Replaces the last rows of each image by its summaries, and drops its other rows."""
        assert rows.images is not None and rows.kept is not None
        images = rows.images * rows.kept
        members = members_of(images)
        if not members.shape[1]:
            return rows
        made = self.imadpt(rows.embeds, members)
        embeds, stays = at_last_rows(made[:, :, :-1], members, rows.embeds)
        vectors = pad(made[:, :, -1], (0, 0, 1, 0))  # before the first image: zeros
        latest = images.cummax(1).values[..., None].expand(-1, -1, self.width)
        return replace(
            rows,
            embeds=embeds,
            kept=rows.kept & ((images == 0) | stays),
            images=images * stays,
            carried=vectors.gather(1, latest),
        )

    def read(self, rows: Rows) -> Tensor:
        """Returns the layers' input: ``W [e; W_g [h; g]]`` for text, and summaries unchanged."""
        vector = rows.carried
        if vector is None or not vector.shape[1]:
            vector = rows.features.new_zeros(())
        features = self.img_fc(torch.cat([rows.features, vector.expand_as(rows.features)], -1))
        states = self.fc(torch.cat([rows.embeds, features], -1))
        if rows.images is None:
            return states
        return torch.where((rows.images > 0)[..., None], rows.embeds, states)
