"""Adapter of Idefics3 and SmolVLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmdecode.adapters.vision.base import VisionLanguageAdapter
from mmdecode.engine.adapter import Prompt
from mmdecode.engine.call import Call


class IdeficsAdapter(VisionLanguageAdapter):
    """Idefics3 and SmolVLM, whose pixels are grouped by row and padded with empty images."""

    summary = "Idefics3 and SmolVLM"
    model_types = ("idefics3", "smolvlm")
    raw_names: ClassVar[Sequence[str]] = ("pixel_values", "pixel_attention_mask")

    def span_sizes(self, kind: str, prompt: Prompt) -> list[int] | None:
        """Returns ``None``: features are grouped by row, so images are not known separately."""
        return None

    def split(self, raw: Mapping[str, Tensor], ids: Tensor) -> list[dict[str, Tensor]]:
        """Splits the image inputs by row; each tensor has one entry per row."""
        has = self.spans("image", ids).any(1).tolist()
        return [
            {name: value[row : row + 1] for name, value in raw.items()} if has[row] else {}
            for row in range(len(ids))
        ]

    def raw_inputs(self, call: Call) -> dict[str, Any]:
        """Returns the images that the caller passed beside ``generate``, one entry per row."""
        given, count = call.request.inputs, call.request.num_return_sequences
        found = {name: given[name] for name in self.raw_names if given.get(name) is not None}
        return {name: value.repeat_interleave(count, 0) for name, value in found.items()}

    def image_indices(self, own: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
        """Returns the indices of images that are not empty, without the padding of each."""
        values, mask = own.get("pixel_values"), own.get("pixel_attention_mask")
        if values is None:
            return []
        indices: list[tuple[Any, ...]] = [(0, i) for i, one in enumerate(values[0]) if one.any()]
        if mask is not None:
            indices = [
                (*index, ..., *(slice(int(mask[index].any(axis).sum())) for axis in (1, 0)))
                for index in indices
            ]
        return [("pixel_values", index) for index in indices]

    def are_parts(self, images: int, runs: int) -> bool:
        """Returns True for several images: they may be tiles of one, which cannot be seen here."""
        return images > 1

    def valid_pixels(self, values: Tensor) -> Tensor:
        """Replaces an image of zeros by tiny values, since the model would take it for padding."""
        return values if values.any() else torch.full_like(values, 1e-6)
