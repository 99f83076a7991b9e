"""Adapter of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mmdecode.adapters.vision import encoding, pixels
from mmdecode.adapters.vision.base import VisionLanguageAdapter, images_by_tokens
from mmdecode.engine.adapter import Mask, Prompt
from mmdecode.engine.call import Call
from mmdecode.errors import IncompatibleError

if TYPE_CHECKING:
    from mmdecode.engine.cache import RaggedCache


class QwenVLAdapter(VisionLanguageAdapter):
    """Qwen-VL, whose positions have three dimensions: time, height and width.

    After the prompt, each of the three positions is the token's index plus a constant offset. The
    adapter keeps the offsets of each row, because the model itself keeps them in ``rope_deltas``,
    which the next prompt overwrites.
    """

    summary = "Qwen2-VL, Qwen2.5-VL and Qwen3-VL, with positions in three dimensions"
    model_types = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    by_token: ClassVar[Sequence[str]] = ()
    raw_names: ClassVar[Sequence[str]] = (
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "video_grid_thw",
        "second_per_grid_ts",
    )

    def model_inputs(self, call: Call) -> dict[str, Any]:
        """Returns the images, and ``offsets (B, 3, P)``: positions minus the token's index."""
        inputs = super().model_inputs(call)
        inputs.pop("mm_token_type_ids", None)  # positions are given
        if not inputs and call.plan.past is not None:
            self._refuse_unknown_positions(call)
        return inputs | self.position_inputs(call) if inputs else inputs

    def _refuse_unknown_positions(self, call: Call) -> None:
        if bool(self.spans("image", call.request.prompt_ids).any()):
            raise IncompatibleError.between(
                "past_key_values",
                self.name,
                "positions after an image depend on its size, and the images were not passed",
                "pass the images of earlier turns too; they are not read again",
            )

    def position_inputs(self, call: Call) -> dict[str, Any]:
        """Returns the offsets of the positions that ``generate`` prepared."""
        positions = call.request.model_kwargs.get("position_ids")
        if positions is None or positions.ndim != 3:
            raise IncompatibleError.between(
                self.name,
                "the call's position_ids",
                "images need positions in time, height and width, which only generate of a Qwen-VL "
                "model prepares",
                "use this model with a target of its own family",
            )
        return {"offsets": _offsets(positions[-3:], call.request.prompt_mask)}

    def from_processor(self, call: Call, inputs: Mapping[str, Any], same: bool) -> Prompt:
        """Builds a prompt from a processor's output, and computes its positions."""
        prompt = super().from_processor(call, inputs, same)
        given = dict(prompt.inputs)
        kinds = given.pop("mm_token_type_ids", None)
        if not given:
            return replace(prompt, inputs={})
        known = inspect.signature(self._whole.get_rope_index).parameters
        options = {k: v for k, v in inputs.items() if k in known and k in self.raw_names}
        if "mm_token_type_ids" in known:
            options["mm_token_type_ids"] = (
                self.spans("image", prompt.ids).int() if kinds is None else kinds
            )
        positions, _ = self._whole.get_rope_index(
            input_ids=prompt.ids, attention_mask=prompt.mask.long(), **options
        )
        given["offsets"] = _offsets(positions, prompt.mask)
        return replace(prompt, inputs=given)

    def split(self, raw: Mapping[str, Tensor], ids: Tensor) -> list[dict[str, Tensor]]:
        """Splits images by row: an image of t*h*w patches has t*h*w / merge_size**2 tokens."""
        rows: list[dict[str, Tensor]] = [{} for _ in ids]
        config: Any = self.model.config
        merged: int = config.vision_config.spatial_merge_size
        kinds = (
            ("pixel_values", "image_grid_thw", config.image_token_id),
            ("pixel_values_videos", "video_grid_thw", config.video_token_id),
        )
        for name, described, mark in kinds:
            if name not in raw:
                continue
            cells = raw[described].prod(1)
            counts = images_by_tokens((cells // merged**2).tolist(), ids == mark)
            patches = [int(part.sum()) for part in cells.split(counts)]
            for row, own in enumerate(raw[name].split(patches)):
                if len(own):
                    rows[row][name] = own
                    rows[row][described] = raw[described].split(counts)[row]
        return rows

    def span_sizes(self, kind: str, prompt: Prompt) -> list[int] | None:
        """Returns the number of tokens of each image: t*h*w / merge_size**2 for its grid."""
        grids = prompt.inputs.get("image_grid_thw")
        if grids is None:
            return super().span_sizes(kind, prompt)
        config: Any = self.model.config
        return (grids.prod(1) // config.vision_config.spatial_merge_size**2).tolist()

    def image_indices(self, own: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
        """Returns the index range of the patches of each image and each video."""
        found: list[tuple[str, Any]] = []
        for name, described in (
            ("pixel_values", "image_grid_thw"),
            ("pixel_values_videos", "video_grid_thw"),
        ):
            ends = own[described].prod(1).cumsum(0).tolist() if name in own else []
            found += [(name, slice(a, b)) for a, b in itertools.pairwise([0, *ends])]
        return found

    def are_parts(self, images: int, runs: int) -> bool:
        """Returns False: images are never cut into parts."""
        return False

    def edit_image(
        self, own: Mapping[str, Tensor], name: str, index: Any, edit: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Edits the image that the patches form; all frames of a video get the same edit."""
        described = "image_grid_thw" if name == "pixel_values" else "video_grid_thw"
        starts = own[described].prod(1).cumsum(0) - own[described].prod(1)
        grid = own[described][starts.tolist().index(index.start)].tolist()
        vision: Any = self.tower().config
        cut = (grid, vision.spatial_merge_size, vision.temporal_patch_size)
        return pixels.to_patches(edit(pixels.of_patches(own[name][index], *cut)), *cut)

    def encode(self, raw: Mapping[str, Tensor]) -> Any:
        """Computes the image features; raises an error for videos."""
        if "pixel_values_videos" in raw:
            raise IncompatibleError.between(
                "a guide that changes the features of images",
                "a video",
                "image and video tokens are not distinguished yet",
                "use a guide that changes pixels, or give the frames as images",
            )
        return super().encode(raw)

    def salience(
        self, weights: Sequence[Tensor], raw: Mapping[str, Tensor], counts: Sequence[int]
    ) -> Tensor:
        """Returns the mean attention to the patches of each token, which are adjacent."""
        found = torch.cat([s.flatten() for s in encoding.salience(weights, has_cls=False)])
        return found.reshape(sum(counts), -1).mean(1)

    def open(self, cache: RaggedCache, prompt: Prompt) -> Any:
        """Returns the cache along with the position offsets of each row."""
        offsets = prompt.inputs.get("offsets")
        if offsets is None:
            offsets = prompt.ids.new_zeros(len(prompt.ids), 3, 1)
        return QwenVLPast(cache, offsets[..., -1:])

    def join(self, pasts: Sequence[Any], cache: RaggedCache) -> Any:
        """Returns the joined cache along with the position offsets of all rows."""
        return QwenVLPast(cache, torch.cat([past.offsets for past in pasts]))

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the states of the prompt, by the whole model if there are images."""
        inputs = dict(prompt.inputs)
        if not inputs:
            return self.forward(prompt.ids, mask, positions, past)
        offsets = inputs.pop("offsets", 0)  # a selection of image tokens has none
        positions = (positions[:, None] + offsets).expand(-1, 3, -1).transpose(0, 1)
        return super().prefill(replace(prompt, inputs=inputs), mask, positions, past.cache)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the states of the text model after its final norm."""
        positions = (positions[:, None] + past.offsets).transpose(0, 1)
        return super().forward(tokens, mask, positions, past.cache)


class QwenVLPast:
    """A key-value cache, and each row's three positions minus the token index, ``(R, 3, 1)``."""

    def __init__(self, cache: RaggedCache, offsets: Tensor) -> None:
        self.cache, self.offsets = cache, offsets

    def reorder_cache(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``, in that order."""
        self.cache.reorder_cache(rows)
        self.offsets = self.offsets[rows]


def _offsets(positions: Tensor, mask: Tensor) -> Tensor:
    """Returns positions ``(3, B, P)`` minus the index of the token, ``(B, 3, P)``."""
    text = (mask.long().cumsum(-1) - 1).clamp_min(0)
    return positions.transpose(0, 1) - text[:, None]
