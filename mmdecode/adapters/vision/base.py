"""Base of adapters of vision-language models, which read images in the prompt.

The prompt is run through the whole model, which merges image features into the embeddings and
builds its own mask if attention is partly bidirectional (PaliGemma's prefix, Gemma3's images). All
later tokens are run through the text model alone, with the engine's mask and positions.

The image inputs are the ones that ``generate`` passes on: outputs of the image encoder since
transformers 5.23, pixels before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mmdecode._compat import caps_logits
from mmdecode.adapters.attention import refuse_attention
from mmdecode.adapters.text import DecoderOnlyAdapter
from mmdecode.adapters.vision import encoding
from mmdecode.adapters.vision import transforms as image_transforms
from mmdecode.engine.adapter import BranchSpec, Mask, Prompt
from mmdecode.engine.call import Call
from mmdecode.engine.request import left_padded
from mmdecode.engine.views import origin
from mmdecode.errors import IncompatibleError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_ENGINE = frozenset(
    ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache")
)
"""Inputs of a forward pass that the engine sets itself."""

_ENCODED = encoding.ENCODED


class VisionLanguageAdapter(DecoderOnlyAdapter):
    """Models whose image features replace placeholder tokens (image tokens) of the prompt.

    Subclasses override methods for model families that differ.
    """

    summary = "models that read images at placeholder tokens: InternVL, Janus, Emu3"
    model_types: tuple[str, ...] = (
        "internvl",
        "janus",
        "emu3",
    )
    inputs = frozenset({"image"})
    raw_names: ClassVar[Sequence[str]] = ("pixel_values", "image_sizes")
    """Names of the image inputs that a caller passes."""
    salient_layer: int = -1
    """Layer of the image encoder whose attention ranks the patches."""
    first_position: ClassVar = 0
    """Position of the first prompt token."""
    by_token: ClassVar[Sequence[str]] = ("token_type_ids",)
    """Names of inputs with one value per prompt token in their last axis."""
    divides_images: ClassVar = True
    """Whether rows with images are read correctly one by one, and gain by it."""
    reads_forward: ClassVar = True
    """Whether no token of a prompt attends to one after it and its image."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._body = model.get_decoder()
        refuse_attention(self._body)
        self._whole = model.base_model
        kind: Any = type(model)
        if self._cap is not None and not caps_logits(kind):
            self._cap = None  # most do not cap logits, even if their text model does
        self._scale = 1.0
        self._marks = placeholders(model.config)
        self._takes = set(inspect.signature(self._whole.forward).parameters) - _ENGINE

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """Returns the prompt of a branch; only the caller's own prompt has its images."""
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
        """Returns inputs of the whole model other than ids: image features or pixels, token types.

        Raises:
            IncompatibleError: The images were encoded for another model and no pixels are given.
        """
        given = dict(call.request.model_kwargs)
        if _absent(given.get(_ENCODED)) and not _pixels(given) and _pixels(call.request.inputs):
            given |= self.raw_inputs(call)
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

    def raw_inputs(self, call: Call) -> dict[str, Any]:
        """Returns the images that the caller passed beside ``generate``, for all rows."""
        if call.request.num_return_sequences > 1:
            return image_transforms.join_rows(image_transforms.raw_images(self, call))
        given = call.request.inputs
        return {name: given[name] for name in self.raw_names if given.get(name) is not None}

    def with_images(self, call: Call, images: Mapping[str, Any]) -> Prompt:
        """Returns the caller's prompt with other images that have the same numbers of tokens."""
        inputs = self.model_inputs(call)
        for name in (_ENCODED, *self.raw_names):
            inputs.pop(name, None)
        inputs |= {name: value for name, value in images.items() if name in self._takes}
        return Prompt(ids=call.request.prompt_ids, mask=call.request.prompt_mask, inputs=inputs)

    def from_processor(self, call: Call, inputs: Mapping[str, Any], same: bool) -> Prompt:
        """Builds a prompt from a processor's output.

        Args:
            call: The generation call.
            inputs: The processor's output.
            same: Whether its images are those of the call; their features are then reused.
        """
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
        """Merges neighbouring prompts that have the same shape and inputs, to be run in one pass.

        If ``generate`` has encoded the images, the main prompt has other inputs than branches.
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
        """Returns True at placeholders of images and videos, ``(B, P)``."""
        marks = torch.tensor(self._marks, device=ids.device)
        return torch.isin(ids, marks)

    def span_sizes(self, kind: str, prompt: Prompt) -> list[int] | None:
        """Returns the number of tokens of each image, row by row; ``None``: not known."""
        encoded = (prompt.inputs.get(_ENCODED) or {}).get("image")
        features = getattr(encoded, "pooler_output", None)
        if features is not None:
            return [len(own) for own in features]
        values = prompt.inputs.get("pixel_values")
        if values is None or values.ndim != 4 or "image_sizes" in prompt.inputs:
            return None
        return [int(self.spans("image", prompt.ids).sum()) // len(values)] * len(values)

    def split(self, raw: Mapping[str, Tensor], ids: Tensor) -> list[dict[str, Tensor]]:
        """Splits the caller's image inputs by row, using the placeholders in ``ids (rows, P)``."""
        counts = self.images_per_row(raw, self.spans("image", ids))
        parts = {name: value.split(counts) for name, value in raw.items()}
        return [
            {name: value[row] for name, value in parts.items()} if count else {}
            for row, count in enumerate(counts)
        ]

    def contents(self, raw: Mapping[str, Any], ids: Tensor) -> list[list[Tensor]]:
        """Returns the images of each row; no images if they cannot be split by row."""
        found = {name: raw[name] for name in self.raw_names if isinstance(raw.get(name), Tensor)}
        try:
            rows = self.split(found, ids) if found else [{} for _ in ids]
        except IncompatibleError:
            return [[] for _ in ids]
        return [[own[name][index] for name, index in self.image_indices(own)] for own in rows]

    def images_per_row(self, raw: Mapping[str, Tensor], images: Tensor) -> list[int]:
        """Returns the number of images per row; all images must have the same number of tokens.

        Raises:
            IncompatibleError: The placeholders of the rows do not match the images.
        """
        tokens, count = images.sum(1).tolist(), len(raw["pixel_values"])
        each, rest = divmod(sum(tokens), max(count, 1))
        if rest or not each or any(own % each for own in tokens):
            raise IncompatibleError(
                f"{count} images cannot be assigned to rows of {', '.join(map(str, tokens))} image "
                "tokens; expected the processor's output for these prompts"
            )
        return [own // each for own in tokens]

    def image_indices(self, own: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
        """Returns tensor name and index of each image of a row, without padding.

        Args:
            own: The row's image inputs, as `split` returns them.
        """
        sizes = own.get("image_sizes")
        if sizes is not None:
            areas = [(..., slice(high), slice(wide)) for high, wide in sizes.tolist()]
            return [("pixel_values", (i, *area)) for i, area in enumerate(areas)]
        return [
            (name, i) for name in image_transforms.PIXELS for i in range(len(own.get(name, ())))
        ]

    def valid_pixels(self, values: Tensor) -> Tensor:
        """Returns pixels ``values``; subclasses change values that the model would misread."""
        return values

    def are_parts(self, images: int, runs: int) -> bool:
        """Returns whether the images of a row are parts that were cut from fewer images.

        Args:
            images: Number of the row's images, as `image_indices` counts them.
            runs: Number of runs of consecutive image tokens in the row's prompt.
        """
        return images > runs

    def edit_image(
        self, own: Mapping[str, Tensor], name: str, index: Any, edit: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Returns the pixels of an image after an edit of the whole image.

        Args:
            own: The row's image inputs, as `split` returns them.
            name: Name of the tensor, as `image_indices` returns it.
            index: Index into it, as `image_indices` returns it.
            edit: Function of normalised pixels ``(..., 3, H, W)`` that keeps the shape.
        """
        return edit(own[name][index])

    def encode(self, raw: Mapping[str, Tensor]) -> Any:
        """Computes the model's image features; ``pooler_output`` has them by image or by row."""
        return self._whole.get_image_features(**raw, return_dict=True)

    def tower(self) -> torch.nn.Module:
        """Returns the image encoder."""
        for name in ("vision_tower", "vision_model", "visual"):
            if hasattr(self._whole, name):
                return getattr(self._whole, name)
        raise IncompatibleError.between(
            "a guide that reads the image encoder",
            self.name,
            "its adapter knows no image encoder",
            "use a guide that changes pixels or the prompt",
        )

    def tower_sites(self) -> list[torch.nn.Module]:
        """Returns the self-attention modules of the image encoder, by layer."""
        return [
            module
            for name, module in self.tower().named_modules()
            if name.rpartition(".")[2] in ("self_attn", "attn", "attention") and name.count(".") > 1
        ]

    def salience(
        self, weights: Sequence[Tensor], raw: Mapping[str, Tensor], counts: Sequence[int]
    ) -> Tensor:
        """Returns the attention that the image encoder pays to each image token, ``(n,)``.

        Args:
            weights: Attention weights of one encoder layer, in chunks ``(R, heads, Q, K)``.
            raw: The image inputs that were encoded.
            counts: Number of image tokens of each image, or of each row.
        """
        found = torch.cat(encoding.salience(weights, self.has_cls()))
        return encoding.pooled(found, sum(counts) // len(found)).flatten()

    def patches(self, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
        """Returns a context in which ``change(states (R, n, H))`` edits the projector's input.

        Raises:
            IncompatibleError: The adapter knows no projector that maps each patch separately.
        """
        raise IncompatibleError.between(
            "a guide that changes what enters the projector",
            self.name,
            "its adapter knows no projector that maps each patch separately",
            "use a guide that changes the encoder's attention, or pixels",
        )

    def has_cls(self) -> bool:
        """Whether the encoder's first token is a class token."""
        names = (name for name, _ in self.tower().named_parameters())
        return any("class_embedding" in name or "cls_token" in name for name in names)

    def position_inputs(self, call: Call) -> dict[str, Any]:
        """Returns inputs with the positions of the caller's prompt, if the family has any."""
        return {}

    def prompt_attention(self, images: Tensor, mask: Tensor) -> Tensor | None:
        """Returns which prompt tokens each token attends to, ``(B, P, P)`` bool; ``None``: causal.

        Args:
            images: True at image tokens, ``(B, P)``.
            mask: True at tokens that are not padding, ``(B, P)``.
        """
        return None

    def masks_itself(self, prompt: Prompt) -> bool:
        """Whether no mask is needed; the whole model builds its own, since it gets the padding."""
        whole = bool(prompt.inputs) and "inputs_embeds" not in prompt.inputs
        return whole or super().masks_itself(prompt)

    def piece(self, prompt: Prompt, rows: Tensor | None, columns: slice) -> Prompt | None:
        """Same as for text; with images, whole rows, which keep theirs."""
        names = prompt.inputs.keys()
        if not names - {"inputs_embeds"}:
            return super().piece(prompt, rows, columns)
        padding = prompt.mask[:, : columns.start]
        cut = columns.stop < prompt.ids.shape[1] or bool(
            (padding if rows is None else padding[rows]).any()
        )
        if cut or not self.divides_images:
            return None
        kept = range(len(prompt.ids)) if rows is None else rows.tolist()
        return self.prefix(prompt, kept, columns)

    def prefix(self, prompt: Prompt, rows: Sequence[int], columns: slice) -> Prompt | None:
        """First tokens of some rows with their images; ``None``: they attend to later tokens."""
        if not self.reads_forward or "inputs_embeds" in prompt.inputs:
            return None
        if not prompt.inputs:
            return super().prefix(prompt, rows, columns)
        inputs = encoding.inputs_of_rows(self, prompt, rows, columns)
        index = torch.tensor(rows, device=prompt.ids.device)
        return None if inputs is None else prompt.narrowed(index, columns, inputs)

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the states of the prompt, by the whole model if images must still be encoded."""
        if not prompt.inputs:
            return self.forward(prompt.ids, mask, positions, past)
        if "inputs_embeds" in prompt.inputs:
            positions = positions + self.first_position
            embeds, stack = prompt.inputs["inputs_embeds"], prompt.inputs.get("stack", {})
            return self._run(mask, positions, past, inputs_embeds=embeds, **stack)
        return self._whole(
            input_ids=prompt.ids,
            attention_mask=prompt.mask.long(),
            position_ids=positions + self.first_position,
            past_key_values=past,
            use_cache=True,
            **prompt.inputs,
        ).last_hidden_state

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the states of the text model after its final norm."""
        return super().forward(tokens, mask, positions + self.first_position, past)


def placeholders(config: Any) -> list[int]:
    """Returns the placeholder ids of images and videos."""
    names = ("image_token_id", "image_token_index", "video_token_id")
    marks = (getattr(config, name, None) for name in names)
    return sorted({mark for mark in marks if mark is not None})


def _alike(one: Prompt, other: Prompt) -> bool:
    """Whether two prompts have the same shape, and inputs that can be concatenated by row."""

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
    """Joins inputs of prompts of the same shape: tensors by row, other values stay."""
    return {
        name: torch.cat([prompt.inputs[name] for prompt in prompts])
        if isinstance(value, Tensor)
        else value
        for name, value in prompts[0].inputs.items()
    }


def images_by_tokens(tokens: Sequence[int], images: Tensor) -> list[int]:
    """Returns the number of images per row, given the number of tokens of each image.

    Args:
        tokens: Number of tokens of each image, in order.
        images: True at image tokens of the prompts, ``(B, P)``.
    """
    counts, first = [], 0
    for wanted in images.sum(1).tolist():
        last = first
        while wanted > 0 and last < len(tokens):
            wanted -= tokens[last]
            last += 1
        counts.append(last - first)
        first = last
    return counts


def _pixels(inputs: Mapping[str, Any]) -> bool:
    return any(inputs.get(name) is not None for name in image_transforms.PIXELS)


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)
