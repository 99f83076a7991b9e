"""Vision-language models of transformers: images are read with the prompt, never again.

The prompt runs through the whole model, which merges image features into the embeddings and builds
its own mask where directions are mixed (PaliGemma's prefix, Gemma3's images). Every later block
runs through the text stack alone, with the engine's mask and positions.

Image inputs are whatever ``generate`` hands over: encoder outputs since transformers 5.23, pixels
before.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode._compat import caps_logits
from mmdecode.adapters.attention import refuse_attention
from mmdecode.adapters.text import DecoderOnlyAdapter
from mmdecode.adapters.vision import pixels as pictures
from mmdecode.adapters.vision import transforms as image_transforms
from mmdecode.engine.adapter import BranchSpec, Mask, Prompt
from mmdecode.engine.call import Call
from mmdecode.engine.hooks import of_this_thread
from mmdecode.engine.request import left_padded
from mmdecode.engine.views import origin
from mmdecode.errors import IncompatibleError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mmdecode.engine.cache import RaggedCache

_ENGINE = frozenset(
    ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache")
)
"""Inputs of a forward pass that the engine sets itself."""

_ENCODED = "mm_encoder_outputs"


class VisionLanguageAdapter(DecoderOnlyAdapter):
    """Models whose image features stand at placeholder tokens of the prompt."""

    summary = "models that read images at placeholder tokens: InternVL, Janus, Emu3"
    model_types: tuple[str, ...] = (
        "internvl",
        "janus",
        "emu3",
    )
    inputs = frozenset({"image"})
    raw_names: ClassVar[Sequence[str]] = ("pixel_values", "image_sizes")
    """What the caller hands over for images."""
    salient_layer: int = -1
    """Layer of the image encoder whose attention says which patches matter."""
    first_position: ClassVar = 0
    """Position of the first token."""
    by_token: ClassVar[Sequence[str]] = ("token_type_ids",)
    """Inputs with a value per prompt token in their last axis."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._body = model.get_decoder()
        refuse_attention(self._body)
        self._whole = model.base_model
        kind: Any = type(model)
        if self._cap is not None and not caps_logits(kind):  # most leave out what their text does
            self._cap = None
        self._scale = 1.0
        self._marks = placeholders(model.config)
        self._takes = set(inspect.signature(self._whole.forward).parameters) - _ENGINE

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """The caller's prompt with its images; its last token or a foreign prompt without."""
        if call.request.model_kwargs.get("inputs_embeds") is not None:
            raise IncompatibleError.between(
                "inputs_embeds",
                self.name,
                "its adapter merges images and ids itself",
                "leave inputs_embeds out",
            )
        if spec.transform is not None:
            return image_transforms.prompt(self, call, spec)
        prompt = super().prompt(call, spec)
        if isinstance(spec.prompt, str) and spec.prompt == "same":
            return replace(prompt, inputs=self.model_inputs(call))
        return prompt

    def model_inputs(self, call: Call) -> dict[str, Any]:
        """What the whole model reads beside ids: image features or pixels, token types.

        Raises:
            IncompatibleError: The images were encoded for another model and no pixels are at hand.
        """
        given = dict(call.request.model_kwargs)
        if call.plan.adapter is not None and origin(call.plan.adapter.model) is not origin(
            self.model
        ):
            encoded = given.pop(_ENCODED, None)
            given |= call.request.inputs
            if encoded and "pixel_values" not in given:
                raise IncompatibleError.between(
                    self.name,
                    f"the images of {type(call.plan.adapter.model).__name__}",
                    "generate has encoded them for that model, and a second model needs pixels",
                    "call mmdecode.generate, or generate inside mmdecode.attach(model)",
                )
        return {k: v for k, v in given.items() if k in self._takes and not _absent(v)}

    def whole(self, call: Call, images: Mapping[str, Any]) -> Prompt:
        """The caller's prompt with other images of the same layout."""
        inputs = self.model_inputs(call)
        for name in (_ENCODED, *self.raw_names):
            inputs.pop(name, None)
        inputs |= {name: value for name, value in images.items() if name in self._takes}
        return Prompt(ids=call.request.prompt_ids, mask=call.request.prompt_mask, inputs=inputs)

    def built(self, call: Call, inputs: Mapping[str, Any], same: bool) -> Prompt:
        """A prompt of a processor's output; ``same``: its images are those of the call."""
        given = {k: v for k, v in inputs.items() if k in self._takes and not _absent(v)}
        encoded = call.request.model_kwargs.get(_ENCODED)
        if same and not _absent(encoded):
            given = {k: v for k, v in given.items() if k not in self.raw_names}
            given[_ENCODED] = encoded
        mask = inputs.get("attention_mask")
        ids = inputs["input_ids"]
        mask = torch.ones_like(ids).bool() if mask is None else left_padded(mask)
        return Prompt(ids=ids, mask=mask, inputs=given)

    def stack(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Prompts that follow one another and are laid out alike become one; the others stay.

        The main prompt is another than its branches where generate has encoded its images before.
        """
        groups: list[list[Prompt]] = []
        for prompt in prompts:
            if groups and _alike(groups[-1][-1], prompt):
                groups[-1].append(prompt)
            else:
                groups.append([prompt])
        return [
            group[0] if len(group) == 1 else Prompt.stacked(group, _joined(group))
            for group in groups
        ]

    def spans(self, kind: str, ids: Tensor) -> Tensor:
        """Placeholders of images and videos."""
        marks = torch.tensor(self._marks, device=ids.device)
        return torch.isin(ids, marks)

    def span_sizes(self, kind: str, prompt: Prompt) -> list[int] | None:
        """Tokens of each image of a prompt, row by row; ``None``: not known."""
        encoded = (prompt.inputs.get(_ENCODED) or {}).get("image")
        features = getattr(encoded, "pooler_output", None)
        if features is not None:
            return [len(own) for own in features]
        values = prompt.inputs.get("pixel_values")
        if values is None or values.ndim != 4 or "image_sizes" in prompt.inputs:
            return None
        return [int(self.spans("image", prompt.ids).sum()) // len(values)] * len(values)

    def split(self, raw: Mapping[str, Tensor], ids: Tensor) -> list[dict[str, Tensor]]:
        """Each row's own of what the caller handed over; ``ids (rows, P)`` tell which."""
        counts = self.per_row(raw, self.spans("image", ids))
        parts = {name: value.split(counts) for name, value in raw.items()}
        return [
            {name: value[row] for name, value in parts.items()} if count else {}
            for row, count in enumerate(counts)
        ]

    def contents(self, raw: Mapping[str, Any], ids: Tensor) -> list[list[Tensor]]:
        """The images of each row, to name it by; of what cannot be shared out, none."""
        found = {name: raw[name] for name in self.raw_names if isinstance(raw.get(name), Tensor)}
        try:
            rows = self.split(found, ids) if found else [{} for _ in ids]
        except IncompatibleError:
            return [[] for _ in ids]
        return [[own[name][place] for name, place in self.images(own)] for own in rows]

    def per_row(self, raw: Mapping[str, Tensor], images: Tensor) -> list[int]:
        """How many images each row has: each stands for as many tokens as another.

        Raises:
            IncompatibleError: Placeholders and images do not match.
        """
        tokens, count = images.sum(1).tolist(), len(raw["pixel_values"])
        each, rest = divmod(sum(tokens), max(count, 1))
        if rest or not each or any(own % each for own in tokens):
            raise IncompatibleError(
                f"{count} images and rows of {', '.join(map(str, tokens))} image tokens, which "
                "cannot be shared out; expected the processor's output for these prompts"
            )
        return [own // each for own in tokens]

    def images(self, own: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
        """Where each image lies among a row's own: a tensor's name and an index into it.

        Without what fills it up to the size of others in its batch.
        """
        sizes = own.get("image_sizes")
        if sizes is not None:
            areas = [(..., slice(high), slice(wide)) for high, wide in sizes.tolist()]
            return [("pixel_values", (i, *area)) for i, area in enumerate(areas)]
        return [
            (name, i) for name in image_transforms.PIXELS for i in range(len(own.get(name, ())))
        ]

    def image(self, values: Tensor) -> Tensor:
        """Pixels as the model may be given them."""
        return values

    def are_parts(self, images: int, runs: int) -> bool:
        """Whether a row's images are parts of larger ones; ``runs`` of image tokens it has."""
        return images > runs

    def repaint(
        self, own: Mapping[str, Tensor], name: str, place: Any, paint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """An image's pixels with a change made to the picture that they are of.

        Args:
            own: What a row has, as `split` gives it.
            name: With ``place`` one entry of `images`.
            place: See ``name``.
            paint: ``(..., 3, H, W)`` of normalised pixels to the same.
        """
        return paint(own[name][place])

    def encode(self, raw: Mapping[str, Tensor]) -> Any:
        """The model's own output: features by image or row as ``pooler_output``."""
        return self._whole.get_image_features(**raw, return_dict=True)

    def tower(self) -> torch.nn.Module:
        """The image encoder."""
        for name in ("vision_tower", "vision_model", "visual"):
            if hasattr(self._whole, name):
                return getattr(self._whole, name)
        raise IncompatibleError.between(
            "a guide that looks into the image encoder",
            self.name,
            "its adapter knows of none",
            "use a guide that changes pixels or the prompt",
        )

    def tower_sites(self) -> list[torch.nn.Module]:
        """The encoder's self-attention, by layer."""
        return [
            module
            for name, module in self.tower().named_modules()
            if name.rpartition(".")[2] in ("self_attn", "attn", "attention") and name.count(".") > 1
        ]

    def salience(
        self, weights: Sequence[Tensor], raw: Mapping[str, Tensor], counts: Sequence[int]
    ) -> Tensor:
        """Attention paid to each image token, ``(n,)``.

        Args:
            weights: Of one layer of the encoder, by chunk, ``(R, heads, Q, K)``.
            raw: What was encoded.
            counts: Image tokens by image, or by row.
        """
        found = torch.cat(image_transforms.salience(weights, self.has_cls()))
        return image_transforms.pooled(found, sum(counts) // len(found)).flatten()

    def patches(self, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
        """Lets ``change(states (R, n, H)) -> states`` of patches hold for what is projected.

        Raises:
            IncompatibleError: Patches do not go from the encoder to a projector as they are.
        """
        raise IncompatibleError.between(
            "a guide that changes what enters the projector",
            self.name,
            "its adapter knows of no projector that takes patches one by one",
            "use a guide that changes the encoder's attention, or pixels",
        )

    def has_cls(self) -> bool:
        """Whether the encoder's first token stands for the whole image."""
        names = (name for name, _ in self.tower().named_parameters())
        return any("class_embedding" in name or "cls_token" in name for name in names)

    def places(self, call: Call) -> dict[str, Any]:
        """Inputs that keep the positions of the caller's prompt."""
        return {}

    def sees(self, images: Tensor, mask: Tensor) -> Tensor | None:
        """What prompt tokens see of one another, where that is not all before them."""
        return None

    def masks_itself(self, prompt: Prompt) -> bool:
        """As text, and always through the whole model, which is told of padding."""
        whole = bool(prompt.inputs) and "inputs_embeds" not in prompt.inputs
        return whole or super().masks_itself(prompt)

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Through the whole model where there is more than text."""
        if not prompt.inputs:
            return self.forward(prompt.ids, mask, positions, past)
        if "inputs_embeds" in prompt.inputs:
            places = positions + self.first_position
            embeds, stack = prompt.inputs["inputs_embeds"], prompt.inputs.get("stack", {})
            return self._run(mask, places, past, inputs_embeds=embeds, **stack)
        return self._whole(
            input_ids=prompt.ids,
            attention_mask=prompt.mask.long(),
            position_ids=positions + self.first_position,
            past_key_values=past,
            use_cache=True,
            **prompt.inputs,
        ).last_hidden_state

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States of the text stack after its final norm."""
        return super().forward(tokens, mask, positions + self.first_position, past)


class LlavaAdapter(VisionLanguageAdapter):
    """LLaVA and LLaVA-NeXT, whose features come from the second last layer of a CLIP encoder."""

    summary = "LLaVA and LLaVA-NeXT"
    source = "Liu et al. 2023, 2024"
    model_types = ("llava", "llava_next")

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        layer = model.config.vision_feature_layer
        # states are counted from the embeddings: state i is what layer i - 1 puts out
        last = layer if isinstance(layer, int) else layer[-1]
        self.salient_layer = last if last < 0 else last - 1

    def per_row(self, raw: Mapping[str, Tensor], images: Tensor) -> list[int]:
        """As of any; where images differ in tokens, by what is between them, or by their sizes.

        Raises:
            IncompatibleError: Placeholders and images do not match.
        """
        runs = (images & ~pad(images, (1, -1))).sum(1).tolist()
        if sum(runs) == len(raw["pixel_values"]):
            return runs
        if "image_sizes" in raw and raw["pixel_values"].ndim == 4:
            config: Any = self.model.config
            tokens = (raw["image_sizes"] // config.vision_config.patch_size).prod(1)
            return shared_out(tokens.tolist(), images)
        return super().per_row(raw, images)

    def images(self, own: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
        """As of any; of LLaVA-NeXT, whole images with their tiles."""
        if not own or own["pixel_values"].ndim == 4:
            return super().images(own)
        tiles = self._tiles(own["image_sizes"])
        return [("pixel_values", (i, slice(count))) for i, count in enumerate(tiles)]

    def _tiles(self, sizes: Tensor) -> list[int]:
        """How many pictures each image of LLaVA-NeXT is, the whole one counted."""
        from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

        config: Any = self.model.config
        side = config.vision_config.image_size
        return [
            image_size_to_num_patches(size, config.image_grid_pinpoints, side)
            for size in sizes.tolist()
        ]

    def are_parts(self, images: int, runs: int) -> bool:
        """Tiles are of one image, which may stand right beside another."""
        return False

    def repaint(
        self, own: Mapping[str, Tensor], name: str, place: Any, paint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """As of any; of LLaVA-NeXT, the whole image and that of its tiles, changed alike."""
        values = own[name][place]
        if values.ndim == 3:
            return paint(values)
        config: Any = self.model.config
        from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

        rows, columns = get_anyres_image_grid_shape(
            own["image_sizes"][place[0]].tolist(), config.image_grid_pinpoints, values.shape[-1]
        )
        tiles = values[1:].unflatten(0, (rows, columns))
        whole = pictures.to_tiles(paint(pictures.of_tiles(tiles)), rows, columns)
        return torch.cat([paint(values[0])[None], whole.flatten(0, 1)])

    def patches(self, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
        """As of any; the class token was dropped before."""
        return self._whole.multi_modal_projector.register_forward_pre_hook(
            of_this_thread(lambda _, args: (change(args[0]), *args[1:]))
        )

    def salience(
        self, weights: Sequence[Tensor], raw: Mapping[str, Tensor], counts: Sequence[int]
    ) -> Tensor:
        """As of any; of LLaVA-NeXT, attention within the whole image, which comes before tiles."""
        found = torch.cat(image_transforms.salience(weights, self.has_cls()))
        first_stays = self.model.config.vision_feature_select_strategy == "full"
        if self.has_cls() and first_stays:
            found = pad(found, (1, 0))  # a class token is no part of an image
        elif not self.has_cls() and not first_stays:
            found = found[:, 1:]  # a patch was dropped as if it were one
        if raw["pixel_values"].ndim == 4:
            return found.flatten()
        tiles = torch.tensor(self._tiles(raw["image_sizes"]), device=found.device)
        whole = found[tiles.cumsum(0) - tiles]
        return torch.cat(
            [pad(own, (0, count - len(own))) for own, count in zip(whole, counts, strict=True)]
        )


class IdeficsAdapter(VisionLanguageAdapter):
    """Idefics3 and SmolVLM, whose pixels come by row, with empty images behind those of a row."""

    summary = "Idefics3 and SmolVLM"
    model_types = ("idefics3", "smolvlm")
    raw_names: ClassVar[Sequence[str]] = ("pixel_values", "pixel_attention_mask")

    def span_sizes(self, kind: str, prompt: Prompt) -> list[int] | None:
        """Not known: features come by row."""
        return None

    def split(self, raw: Mapping[str, Tensor], ids: Tensor) -> list[dict[str, Tensor]]:
        """One entry a row."""
        has = self.spans("image", ids).any(1).tolist()
        return [
            {name: value[row : row + 1] for name, value in raw.items()} if has[row] else {}
            for row in range(len(ids))
        ]

    def images(self, own: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
        """Those that are not empty, each where its mask is set, which begins at the corner."""
        values, seen = own.get("pixel_values"), own.get("pixel_attention_mask")
        if values is None:
            return []
        places: list[tuple[Any, ...]] = [(0, i) for i, own in enumerate(values[0]) if own.any()]
        if seen is not None:
            places = [
                (*place, ..., *(slice(int(seen[place].any(axis).sum())) for axis in (1, 0)))
                for place in places
            ]
        return [("pixel_values", place) for place in places]

    def are_parts(self, images: int, runs: int) -> bool:
        """Several may be tiles of one, which only the text between them tells."""
        return images > 1

    def image(self, values: Tensor) -> Tensor:
        """A blank image must not look like an empty one."""
        return values if values.any() else torch.full_like(values, 1e-6)


class Gemma3Adapter(VisionLanguageAdapter):
    """Gemma3, whose images are read in both directions."""

    summary = "Gemma3, whose images are read in both directions"
    model_types = ("gemma3",)

    def sees(self, images: Tensor, mask: Tensor) -> Tensor:
        """All before, and the whole image that a token belongs to."""
        run = (images & ~pad(images, (1, -1))).cumsum(1).masked_fill(~images, 0)
        together = (run[:, :, None] == run[:, None]) & images[:, :, None]
        return torch.ones_like(together).tril() | together


class PaliGemmaAdapter(VisionLanguageAdapter):
    """PaliGemma counts positions from one, and its prompt is read in both directions."""

    summary = "PaliGemma, whose prompt is read in both directions"
    model_types = ("paligemma",)
    first_position: ClassVar = 1

    def sees(self, images: Tensor, mask: Tensor) -> Tensor:
        """Everything."""
        return mask[:, :, None] & mask[:, None]


class ChameleonAdapter(VisionLanguageAdapter):
    """Chameleon's own forward pass forbids image tokens, and so does this head."""

    summary = "Chameleon, writing text"
    model_types = ("chameleon",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._images = torch.tensor(self._whole.vocabulary_mapping.image_tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of text; those of image tokens are as low as can be."""
        logits = super().head(hidden)
        if self._images.device != logits.device:
            self._images = self._images.to(logits.device)
        return logits.index_fill(-1, self._images, torch.finfo(logits.dtype).min)


class QwenVLAdapter(VisionLanguageAdapter):
    """Qwen-VL: positions of images in time, height and width.

    Behind the prompt the three advance together, each at its own distance from the number of
    tokens; that distance is kept per row, because the model's own ``rope_deltas`` is state that the
    next prompt overwrites.
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
        """Beside the images, ``distances (B, 3, P)``: three positions minus that of the token."""
        inputs = super().model_inputs(call)
        inputs.pop("mm_token_type_ids", None)  # positions are given
        return inputs | self.places(call) if inputs else inputs

    def places(self, call: Call) -> dict[str, Any]:
        """Distances, from the positions that generate prepared."""
        places = call.request.model_kwargs.get("position_ids")
        if places is None or places.ndim != 3:
            raise IncompatibleError.between(
                self.name,
                "the call's position_ids",
                "images need positions in time, height and width, which generate of a Qwen-VL "
                "model prepares",
                "use it with a target of its own family",
            )
        return {"distances": _distances(places[-3:], call.request.prompt_mask)}

    def built(self, call: Call, inputs: Mapping[str, Any], same: bool) -> Prompt:
        """With positions of its own."""
        prompt = super().built(call, inputs, same)
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
        places, _ = self._whole.get_rope_index(
            input_ids=prompt.ids, attention_mask=prompt.mask.long(), **options
        )
        given["distances"] = _distances(places, prompt.mask)
        return replace(prompt, inputs=given)

    def split(self, raw: Mapping[str, Tensor], ids: Tensor) -> list[dict[str, Tensor]]:
        """By the grids, of which each stands for its cells over the square of what is merged."""
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
            counts = shared_out((cells // merged**2).tolist(), ids == mark)
            patches = [int(part.sum()) for part in cells.split(counts)]
            for row, own in enumerate(raw[name].split(patches)):
                if len(own):
                    rows[row][name] = own
                    rows[row][described] = raw[described].split(counts)[row]
        return rows

    def span_sizes(self, kind: str, prompt: Prompt) -> list[int] | None:
        """As of any; cells of the grids over the square of what is merged."""
        grids = prompt.inputs.get("image_grid_thw")
        if grids is None:
            return super().span_sizes(kind, prompt)
        config: Any = self.model.config
        return (grids.prod(1) // config.vision_config.spatial_merge_size**2).tolist()

    def images(self, own: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
        """Patches of each image, and of each video."""
        found: list[tuple[str, Any]] = []
        for name, described in (
            ("pixel_values", "image_grid_thw"),
            ("pixel_values_videos", "video_grid_thw"),
        ):
            ends = own[described].prod(1).cumsum(0).tolist() if name in own else []
            found += [(name, slice(a, b)) for a, b in itertools.pairwise([0, *ends])]
        return found

    def are_parts(self, images: int, runs: int) -> bool:
        """Each is in one piece."""
        return False

    def repaint(
        self, own: Mapping[str, Tensor], name: str, place: Any, paint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Patches put together and taken apart; the frames of a video are changed alike."""
        described = "image_grid_thw" if name == "pixel_values" else "video_grid_thw"
        starts = own[described].prod(1).cumsum(0) - own[described].prod(1)
        grid = own[described][starts.tolist().index(place.start)].tolist()
        vision: Any = self.tower().config
        cut = (grid, vision.spatial_merge_size, vision.temporal_patch_size)
        return pictures.to_patches(paint(pictures.of_patches(own[name][place], *cut)), *cut)

    def encode(self, raw: Mapping[str, Tensor]) -> Any:
        """As of any; not of videos."""
        if "pixel_values_videos" in raw:
            raise IncompatibleError.between(
                "a guide that changes the features of images",
                "a video",
                "their tokens are not told apart yet",
                "use a guide that changes pixels, or give the frames as images",
            )
        return super().encode(raw)

    def salience(
        self, weights: Sequence[Tensor], raw: Mapping[str, Tensor], counts: Sequence[int]
    ) -> Tensor:
        """Attention that merged patches get on average; they follow one another."""
        found = torch.cat([s.flatten() for s in image_transforms.salience(weights, has_cls=False)])
        return found.reshape(sum(counts), -1).mean(1)

    def open(self, cache: RaggedCache, prompt: Prompt) -> Any:
        """The ragged cache beside each row's distances."""
        distances = prompt.inputs.get("distances")
        if distances is None:
            distances = prompt.ids.new_zeros(len(prompt.ids), 3, 1)
        return QwenVLPast(cache, distances[..., -1:])

    def join(self, pasts: Sequence[Any], cache: RaggedCache) -> Any:
        """The joined cache beside all rows' distances."""
        return QwenVLPast(cache, torch.cat([past.distances for past in pasts]))

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Through the whole model where there is more than text."""
        inputs = dict(prompt.inputs)
        if not inputs:
            return self.forward(prompt.ids, mask, positions, past)
        distances = inputs.pop("distances", 0)  # of chosen image tokens there are none
        places = (positions[:, None] + distances).expand(-1, 3, -1).transpose(0, 1)
        return super().prefill(replace(prompt, inputs=inputs), mask, places, past.cache)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States of the text stack after its final norm."""
        places = (positions[:, None] + past.distances).transpose(0, 1)
        return super().forward(tokens, mask, places, past.cache)


class QwenVLPast:
    """A cache, and how far each row's positions are from its tokens, ``(R, 3, 1)``."""

    def __init__(self, cache: RaggedCache, distances: Tensor) -> None:
        self.cache, self.distances = cache, distances

    def reorder_cache(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``, in that order."""
        self.cache.reorder_cache(rows)
        self.distances = self.distances[rows]


def placeholders(config: Any) -> list[int]:
    """Ids that stand for parts of an image or video."""
    names = ("image_token_id", "image_token_index", "video_token_id")
    marks = (getattr(config, name, None) for name in names)
    return sorted({mark for mark in marks if mark is not None})


def _alike(one: Prompt, other: Prompt) -> bool:
    """Whether two prompts have the same places for images, and inputs that can be joined by row."""

    def join(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.ndim > 0 and a.shape == b.shape
        return isinstance(a, (int, float, str, type(None))) and type(a) is type(b) and a == b

    return (
        one.ids.shape == other.ids.shape
        and one.inputs.keys() == other.inputs.keys()
        and one.prompt_attention is None is other.prompt_attention
        and all(join(value, other.inputs[name]) for name, value in one.inputs.items())
    )


def _joined(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Inputs of prompts that are laid out alike: tensors row after row, the rest as it is."""
    return {
        name: torch.cat([prompt.inputs[name] for prompt in prompts])
        if isinstance(value, Tensor)
        else value
        for name, value in prompts[0].inputs.items()
    }


def shared_out(tokens: Sequence[int], images: Tensor) -> list[int]:
    """How many images each row has, each of so many ``tokens``; ``images (B, P)`` are these."""
    counts, first = [], 0
    for wanted in images.sum(1).tolist():
        last = first
        while wanted > 0 and last < len(tokens):
            wanted -= tokens[last]
            last += 1
        counts.append(last - first)
        first = last
    return counts


def _distances(places: Tensor, mask: Tensor) -> Tensor:
    """Positions ``(3, B, P)`` minus that of the token, ``(B, 3, P)``."""
    text = (mask.long().cumsum(-1) - 1).clamp_min(0)
    return places.transpose(0, 1) - text[:, None]


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)
