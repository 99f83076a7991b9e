"""Adapter of LLaVA and LLaVA-NeXT."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.adapters.vision import encoding, pixels
from mmdecode.adapters.vision.base import VisionLanguageAdapter, images_by_tokens
from mmdecode.engine.hooks import of_this_thread

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LlavaAdapter(VisionLanguageAdapter):
    """LLaVA and LLaVA-NeXT, whose image features come from an inner layer of a CLIP encoder."""

    summary = "LLaVA and LLaVA-NeXT"
    source = "Liu et al. 2023, 2024"
    model_types = ("llava", "llava_next")

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        layer = model.config.vision_feature_layer
        # states are counted from the embeddings: state i is what layer i - 1 puts out
        last = layer if isinstance(layer, int) else layer[-1]
        self.salient_layer = last if last < 0 else last - 1

    def images_per_row(self, raw: Mapping[str, Tensor], images: Tensor) -> list[int]:
        """Returns the number of images per row, also if images have different numbers of tokens.

        Raises:
            IncompatibleError: The image tokens of the rows do not match the images.
        """
        runs = (images & ~pad(images, (1, -1))).sum(1).tolist()
        if sum(runs) == len(raw["pixel_values"]):
            return runs
        if "image_sizes" in raw and raw["pixel_values"].ndim == 4:
            config: Any = self.model.config
            tokens = (raw["image_sizes"] // config.vision_config.patch_size).prod(1)
            return images_by_tokens(tokens.tolist(), images)
        return super().images_per_row(raw, images)

    def image_indices(self, own: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
        """Returns the indices of images; for LLaVA-NeXT, of each image with its tiles."""
        if not own or own["pixel_values"].ndim == 4:
            return super().image_indices(own)
        tiles = self._tiles(own["image_sizes"])
        return [("pixel_values", (i, slice(count))) for i, count in enumerate(tiles)]

    def _tiles(self, sizes: Tensor) -> list[int]:
        """Returns the number of parts of each LLaVA-NeXT image: its tiles and the whole image."""
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        config: Any = self.model.config
        side = config.vision_config.image_size
        return [
            image_size_to_num_patches(size, config.image_grid_pinpoints, side)
            for size in sizes.tolist()
        ]

    def are_parts(self, images: int, runs: int) -> bool:
        """Returns False: an image of LLaVA-NeXT counts once, together with its tiles."""
        return False

    def edit_image(
        self, own: Mapping[str, Tensor], name: str, index: Any, edit: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Edits an image; for LLaVA-NeXT, the whole image and the joined tiles separately."""
        values = own[name][index]
        if values.ndim == 3:
            return edit(values)
        config: Any = self.model.config
        from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

        rows, columns = get_anyres_image_grid_shape(
            own["image_sizes"][index[0]].tolist(), config.image_grid_pinpoints, values.shape[-1]
        )
        tiles = values[1:].unflatten(0, (rows, columns))
        whole = pixels.to_tiles(edit(pixels.of_tiles(tiles)), rows, columns)
        return torch.cat([edit(values[0])[None], whole.flatten(0, 1)])

    def patches(self, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
        """Edits the input of the projector, which has no class token."""
        return self._whole.multi_modal_projector.register_forward_pre_hook(
            of_this_thread(lambda _, args: (change(args[0]), *args[1:]))
        )

    def salience(
        self, weights: Sequence[Tensor], raw: Mapping[str, Tensor], counts: Sequence[int]
    ) -> Tensor:
        """Returns attention per image token; for LLaVA-NeXT 0 at tiles, after the whole image."""
        found = torch.cat(encoding.salience(weights, self.has_cls()))
        first_stays = self.model.config.vision_feature_select_strategy == "full"
        if self.has_cls() and first_stays:
            found = pad(found, (1, 0))  # the class token is kept, but belongs to no patch
        elif not self.has_cls() and not first_stays:
            found = found[:, 1:]  # the first patch was dropped as if it were a class token
        if raw["pixel_values"].ndim == 4:
            return found.flatten()
        tiles = torch.tensor(self._tiles(raw["image_sizes"]), device=found.device)
        whole = found[tiles.cumsum(0) - tiles]
        return torch.cat(
            [pad(own, (0, count - len(own))) for own, count in zip(whole, counts, strict=True)]
        )
