"""Vision-language models of transformers: images are read with the prompt, never again.

The prompt runs through the whole model, which merges image features into the embeddings and builds
its own mask where directions are mixed (PaliGemma's prefix, Gemma3's images). Every later block
runs through the text stack alone, with the engine's mask and positions.

Image inputs are whatever ``generate`` hands over: encoder outputs since transformers 5.23, pixels
before.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from mmdecode.adapters.attention import refuse_attention
from mmdecode.adapters.decoder_only import DecoderOnlyAdapter
from mmdecode.engine.contracts import BranchSpec, Context, Mask, Prompt
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

    model_types: tuple[str, ...] = (
        "llava",
        "llava_next",
        "idefics3",
        "smolvlm",
        "internvl",
        "gemma3",
        "janus",
        "emu3",
    )
    no_views: ClassVar = ("its adapter offers no views of images yet", "use a prompt instead")
    first_position: ClassVar = 0
    """Position of the first token."""
    by_token: ClassVar[Mapping[str, int]] = {"token_type_ids": 0}
    """Inputs with a value per prompt token in their last axis, and the value of plain text."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._body = model.get_decoder()
        refuse_attention(self._body)
        self._whole = model.base_model
        # scaling the logits is up to the model around the text model, and most leave it out
        code = inspect.unwrap(type(model).forward).__code__
        if "final_logit_softcapping" not in (*code.co_names, *code.co_consts):
            self._cap = None
        self._scale = 1.0
        self._takes = set(inspect.signature(self._whole.forward).parameters) - _ENGINE

    def prompt(self, ctx: Context, spec: BranchSpec) -> Prompt:
        """The caller's prompt with its images; its last token or a foreign prompt without."""
        if ctx.model_inputs.get("inputs_embeds") is not None:
            raise IncompatibleError.between(
                "inputs_embeds",
                type(self.model).__name__,
                "its adapter merges images and ids itself",
                "leave inputs_embeds out",
            )
        prompt = super().prompt(ctx, spec)
        if isinstance(spec.prompt, str) and spec.prompt == "same":
            return replace(prompt, inputs=self.inputs(ctx))
        return prompt

    def inputs(self, ctx: Context) -> dict[str, Any]:
        """What the whole model reads beside ids: image features or pixels, token types.

        Raises:
            IncompatibleError: The images were encoded for another model and no pixels are at hand.
        """
        given = dict(ctx.model_inputs)
        if ctx.adapter is not None and origin(ctx.adapter.model) is not origin(self.model):
            encoded = given.pop(_ENCODED, None)
            given |= ctx.mm_inputs
            if encoded and "pixel_values" not in given:
                raise IncompatibleError.between(
                    type(self.model).__name__,
                    f"the images of {type(ctx.adapter.model).__name__}",
                    "generate has encoded them for that model, and a second model needs pixels",
                    "call mmdecode.generate, or generate inside mmdecode.attach(model)",
                )
        return {k: v for k, v in given.items() if k in self._takes and not _absent(v)}

    def stack(self, prompts: Sequence[Prompt]) -> Prompt:
        """Rows of all prompts, branch by branch; one of them may see images."""
        stacked = super().stack(prompts)
        seeing = [index for index, prompt in enumerate(prompts) if prompt.inputs]
        if not seeing:
            return stacked
        if len(seeing) > 1:
            raise IncompatibleError.between(
                f"{len(seeing)} branches with images",
                type(self.model).__name__,
                "its adapter reads the images of one branch",
                "give the other branches prompts of their own",
            )
        inputs = dict(prompts[seeing[0]].inputs)
        first = sum(len(prompt.ids) for prompt in prompts[: seeing[0]])
        for name in self.by_token.keys() & inputs.keys():
            rows = inputs[name]
            shape = (len(stacked.ids), *rows.shape[1:-1], stacked.ids.shape[1])
            inputs[name] = rows.new_full(shape, self.by_token[name])
            inputs[name][first : first + len(rows), ..., -rows.shape[-1] :] = rows
        return replace(stacked, inputs=inputs)

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Through the whole model where there is more than text."""
        if not prompt.inputs:
            return self.forward(prompt.ids, mask, positions, past)
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


class PaliGemmaAdapter(VisionLanguageAdapter):
    """PaliGemma counts positions from one, and its prompt is read in both directions."""

    model_types = ("paligemma",)
    first_position: ClassVar = 1
    by_token: ClassVar[Mapping[str, int]] = {"token_type_ids": 1}  # 0 is the prefix


class ChameleonAdapter(VisionLanguageAdapter):
    """Chameleon's own forward pass forbids image tokens, and so does this head."""

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

    model_types = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    by_token: ClassVar[Mapping[str, int]] = {"distances": 0}

    def inputs(self, ctx: Context) -> dict[str, Any]:
        """Beside the images, ``distances (B, 3, P)``: three positions minus that of the token."""
        inputs = super().inputs(ctx)
        inputs.pop("mm_token_type_ids", None)  # positions are given
        if not inputs:
            return inputs
        places = ctx.model_inputs.get("position_ids")
        if places is None or places.ndim != 3:
            raise IncompatibleError.between(
                type(self.model).__name__,
                "the call's position_ids",
                "images need positions in time, height and width, which generate of a Qwen-VL "
                "model prepares",
                "use it with a target of its own family",
            )
        text = (ctx.prompt_mask.long().cumsum(-1) - 1).clamp_min(0)
        inputs["distances"] = places[-3:].transpose(0, 1) - text[:, None]
        return inputs

    def open(self, cache: RaggedCache, prompt: Prompt) -> Any:
        """The ragged cache beside each row's distances."""
        distances = prompt.inputs.get("distances")
        if distances is None:
            distances = prompt.ids.new_zeros(len(prompt.ids), 3, 1)
        return QwenVLPast(cache, distances[..., -1:])

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Through the whole model where there is more than text."""
        inputs = dict(prompt.inputs)
        if not inputs:
            return self.forward(prompt.ids, mask, positions, past)
        places = (positions[:, None] + inputs.pop("distances")).transpose(0, 1)
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


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)
