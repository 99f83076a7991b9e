"""Adapter of Janus and Janus-Pro for generating images, with a separate image vocabulary.

The models' ``generate(generation_mode="image")`` is a separate loop that accepts no other decoding
function. So the adapter runs the language model itself, embeds image tokens with
``prepare_embeddings_for_image_generation``, and computes their logits with ``generation_head``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmdecode.adapters.images.base import Preset, PromptedAdapter, named_id, to_unit
from mmdecode.engine.adapter import Mask
from mmdecode.errors import OptionError, UnsupportedModelError
from mmdecode.models.image_layout import Layout

if TYPE_CHECKING:
    from transformers import JanusForConditionalGeneration


class JanusImagesAdapter(PromptedAdapter):
    """Janus, whose unconditional prompt has unmasked padding tokens in place of the text.

    Raises:
        OptionError: The generation config lacks a special token, such as the one that opens an
            image.
        UnsupportedModelError: The number of image tokens does not fit the image tokenizer's grid.
    """

    summary = "Janus and Janus-Pro, generating image tokens"
    source = "Wu et al. 2024; Chen et al. 2025"
    image_types = ("janus",)
    preset = Preset(guidance=5.0)

    def __init__(self, model: JanusForConditionalGeneration) -> None:
        super().__init__(model)
        self._inner = model.model
        config: Any = model.config
        side, tokens = config.vq_config.num_patches, config.vision_config.num_image_tokens
        if side**2 != tokens:
            raise UnsupportedModelError(
                f"this {self.name} generates {tokens} tokens, its image tokenizer decodes {side} x "
                f"{side}; expected equal numbers: correct the model's configuration"
            )
        self.vocab = config.vq_config.num_embeddings
        self.layout = Layout(side, side, torch.arange(self.vocab, device=model.device))
        generation_config: Any = model.generation_config
        own = getattr(generation_config, "generation_kwargs", None) or {}
        self._opens = named_id(
            model, "boi_token_id", own.get("boi_token_id"), "generation_config.generation_kwargs"
        )
        self._begins = named_id(
            model, "bos_token_id", generation_config.bos_token_id, "generation_config"
        )
        self._pad = named_id(
            model, "pad_token_id", generation_config.pad_token_id, "generation_config"
        )

    def text(self, prompt: str, tokenizer: Any) -> str:
        """Returns the prompt followed by the token that opens an image."""
        return f"{prompt}{tokenizer.boi_token}"

    def check(self, ids: Tensor) -> None:
        """Checks that every prompt ends with the token that opens an image.

        Raises:
            OptionError: A prompt does not.
        """
        if not bool((ids[:, -1] == self._opens).all()):
            raise OptionError(
                f"a prompt does not end with token {self._opens}, which opens an image; make it "
                "with processor(..., generation_mode='image')"
            )

    def without_text(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids in which padding tokens replace the text, and the unchanged mask."""
        kept = (ids == self._begins) | (ids == self._opens)
        return torch.where(kept, ids, self._pad), mask

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the states of image tokens after the final norm."""
        embeds = self.model.prepare_embeddings_for_image_generation(tokens)
        return self._run(mask, positions, past, inputs_embeds=embeds)

    def head(self, hidden: Tensor) -> Tensor:
        """Computes logits of image tokens."""
        return self._inner.generation_head(hidden)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Same as `head`: the language model has no other output matrix."""
        return self.head(hidden)

    def codebook(self) -> Tensor:
        """Returns the embeddings of the codes, normalised to length 1."""
        return normalize(self._inner.vqmodel.quantize.embedding.weight.detach(), dim=-1)

    def pixels(self, codes: Tensor) -> Tensor:
        """Decodes codes to pixels with the model's own image tokenizer."""
        return to_unit(self._inner.vqmodel.decode(codes.flatten(1)))
