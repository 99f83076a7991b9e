"""Adapter of InstructBLIP, whose Q-Former reads the image together with the question.

``generate`` of an InstructBLIP model (the outer model) merges the Q-Former's output into the
prompt's embeddings and calls ``generate`` of its language model (the inner model), where decoding
takes place. Transforms of the image need the outer model and the Q-Former's token ids, which
`mmdecode.generate` and `mmdecode.attach` pass on; then this adapter is used.

The transform ``features`` changes the Q-Former's output tokens, which the language model reads.
``tokens`` selects the patches that the Q-Former reads; the number of output tokens stays the same.
The class token of the image encoder is no patch and is left out, so selecting all patches differs
slightly from the unchanged model. If a question is rewritten, the Q-Former reads the new one too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmdecode.adapters.text import DecoderOnlyAdapter
from mmdecode.adapters.vision import encoding
from mmdecode.adapters.vision import transforms as image_transforms
from mmdecode.adapters.vision.base import VisionLanguageAdapter, placeholders
from mmdecode.engine.adapter import BranchSpec, Prompt
from mmdecode.engine.call import Call
from mmdecode.engine.hooks import of_this_thread
from mmdecode.engine.request import left_padded


class InstructBlipAdapter(VisionLanguageAdapter):
    """Runs the inner language model, with images encoded by the outer model.

    Args:
        model: The outer model, an ``InstructBlipForConditionalGeneration``.
    """

    summary = "the language model of InstructBLIP, and the transforms of its images"
    source = "Dai et al. 2023"
    model_types = ("instructblip",)
    raw_names: ClassVar[Sequence[str]] = (
        "pixel_values",
        "qformer_input_ids",
        "qformer_attention_mask",
    )
    salient_layer = -2  # as published for DAMRO

    def __init__(self, model: Any) -> None:
        super().__init__(model.language_model)
        self._whole = model
        self._marks = placeholders(model.config)

    @staticmethod
    def inner(model: Any) -> Any:
        """Returns the inner language model, which is decoded; ``None`` if it has no adapter."""
        language = model.language_model
        fits = language.config.model_type in DecoderOnlyAdapter.model_types
        return language if fits else None

    @property
    def name(self) -> str:
        """Returns the class name of the outer model."""
        return type(self._whole).__name__

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """Returns the embeddings that ``generate`` merged, or a transformed prompt."""
        if spec.transform == "tokens":
            image_transforms.refuse_missing(spec)
            return self._of_patches(call, **spec.transform_options)
        if spec.transform is not None:
            return image_transforms.prompt(self, call, spec)
        return DecoderOnlyAdapter.prompt(self, call, spec)

    def stack(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Concatenates the embeddings of all prompts, to be run in one pass."""
        return DecoderOnlyAdapter.stack(self, prompts)

    def with_images(self, call: Call, images: Mapping[str, Any]) -> Prompt:
        """Returns the caller's prompt with the Q-Former's output for other images."""
        features = encoding.encode(self, dict(images)).features
        return encoding.feature_prompt(self, call, call.request.prompt_mask, features, ())

    def from_processor(self, call: Call, inputs: Mapping[str, Any], same: bool) -> Prompt:
        """Builds a prompt from a processor's output; the Q-Former reads the new question."""
        raw = {name: inputs[name] for name in self.raw_names if name in inputs}
        ids = inputs["input_ids"]
        mask = left_padded(inputs.get("attention_mask", torch.ones_like(ids)))
        features = encoding.encode(self, raw).features
        embeds = encoding.merge_features(self, ids, self.spans("image", ids) & mask, features)
        return Prompt(ids=ids, mask=mask, inputs={"inputs_embeds": embeds})

    def encode(self, raw: Mapping[str, Tensor]) -> Any:
        """Computes the Q-Former's output, projected to the language model's embedding space.

        Images may have another size than in training.

        Returns:
            Output of the outer model's ``get_image_features``; ``pooler_output`` has it by row.
        """
        size = self._whole.config.vision_config.image_size
        return self._whole.get_image_features(
            **raw,
            interpolate_pos_encoding=raw["pixel_values"].shape[-2:] != (size, size),
            return_dict=True,
        )

    def _of_patches(
        self,
        call: Call,
        select: Callable[[Tensor, Tensor], Tensor],
        heads: encoding.Heads = "mean",
    ) -> Prompt:
        """Builds a prompt whose Q-Former reads only selected patches, and no class token."""
        parts = []
        for own in image_transforms.raw_images(self, call):
            if not own:
                continue
            plan = encoding.salient_plan(self, heads)

            def chosen(states: Tensor, plan: Any = plan) -> Tensor:
                (paid,) = encoding.salience(plan.chunks(), has_cls=True)
                patches = states[:, 1:]
                return patches[:, select(patches[0], paid[0])]

            with encoding.planned_tower(self, plan), self._read_by_qformer(chosen):
                parts.append(encoding.encode(self, own).features)
        return encoding.feature_prompt(self, call, call.request.prompt_mask, torch.cat(parts), ())

    def _read_by_qformer(self, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
        """Returns a context where ``change(states (R, 1 + n, H))`` edits the Q-Former's input."""

        def after(_: torch.nn.Module, args: Any, output: Any) -> Any:
            states = change(output.last_hidden_state)
            return type(output)(**{**output, "last_hidden_state": states})

        return self.tower().register_forward_hook(of_this_thread(after))
