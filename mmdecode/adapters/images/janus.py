"""Janus and Janus-Pro, generating images: these tokens have their own vocabulary and head.

Their ``generate(generation_mode="image")`` is a loop of its own that takes no callable, so the
language model is driven by public parts: it embeds text itself, image tokens are embedded by
``prepare_embeddings_for_image_generation``, and ``generation_head`` gives their logits.
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
    """Janus. The unconditional prompt is the prompt with text replaced by visible padding tokens.

    Raises:
        OptionError: The generation config names no token that opens an image.
        UnsupportedModelError: Image tokens and the tokenizer's grid do not agree.
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
                f"this {self.name} draws {tokens} tokens, its tokenizer decodes {side} x {side}; "
                "expected as many: correct its configuration"
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
        """The prompt, and the token that opens an image."""
        return f"{prompt}{tokenizer.boi_token}"

    def check(self, ids: Tensor) -> None:
        """Checks that every row ends with the token that opens an image.

        Raises:
            OptionError: A row does not.
        """
        if not bool((ids[:, -1] == self._opens).all()):
            raise OptionError(
                f"a prompt does not end with {self._opens}, which opens an image; make it with "
                "processor(..., generation_mode='image')"
            )

    def without_text(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Replaces text by padding tokens."""
        kept = (ids == self._begins) | (ids == self._opens)
        return torch.where(kept, ids, self._pad), mask

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States after the final norm, of image tokens."""
        embeds = self.model.prepare_embeddings_for_image_generation(tokens)
        return self._run(mask, positions, past, inputs_embeds=embeds)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of image tokens."""
        return self._inner.generation_head(hidden)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Same as `head`: the language model has no other output matrix."""
        return self.head(hidden)

    def codebook(self) -> Tensor:
        """Embeddings of the codes, normalised to length one."""
        return normalize(self._inner.vqmodel.quantize.embedding.weight.detach(), dim=-1)

    def pixels(self, codes: Tensor) -> Tensor:
        """Decodes codes by the model's own tokenizer."""
        return to_unit(self._inner.vqmodel.decode(codes.flatten(1)))
