"""Adapter of Chameleon and Anole for generating images.

The model's own forward pass excludes image tokens from the logits, so the base model and the head
are called separately. The published Chameleon does not generate images; Anole, whose weights have
the same layout, does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmdecode.adapters.images.base import Preset, SharedVocabularyAdapter, named_id, to_unit
from mmdecode.errors import IncompatibleError, OptionError

if TYPE_CHECKING:
    from transformers import ChameleonForConditionalGeneration

    from mmdecode.models.chameleon_vq import ChameleonVQDecoder

OPENS = "<racm3:break>"
"""Token that opens an image."""


class ChameleonImagesAdapter(SharedVocabularyAdapter):
    """Chameleon, generating square images of its tokenizer's resolution.

    The token that closes an image is not generated. Guidance is ``u + s (c - u)``, as in the
    published code for prompts of text alone.

    Args:
        model: The model.
        vq: The decoder of its image tokenizer, which is needed for pixels.

    Raises:
        OptionError: Not every code of the image tokenizer has a token in the vocabulary.
        IncompatibleError: Decoder and model have different numbers of codes.
    """

    summary = "Chameleon and Anole, generating image tokens"
    source = "Chameleon Team 2024; Chern et al. 2024"
    image_types = ("chameleon",)
    preset = Preset(guidance=3.0, sampling={"temperature": 0.7, "top_p": 0.9})

    def __init__(
        self, model: ChameleonForConditionalGeneration, vq: ChameleonVQDecoder | None = None
    ) -> None:
        config: Any = model.config
        found = model.model.vocabulary_mapping.img2bpe
        if sorted(found) != list(range(config.vq_config.num_embeddings)):
            raise OptionError(
                f"the vocabulary has {len(found)} image tokens, the image tokenizer "
                f"{config.vq_config.num_embeddings} codes; give config.vocabulary_map as published"
            )
        levels = len(config.vq_config.channel_multiplier)
        side = config.vq_config.resolution // 2 ** (levels - 1)
        codes = torch.tensor([found[code] for code in range(len(found))], device=model.device)
        super().__init__(model, codes, side, side)
        opens = (config.vocabulary_map or {}).get(OPENS)
        self._opens = named_id(model, f"id of {OPENS}", opens, "config.vocabulary_map")
        self._begins = named_id(model, "bos_token_id", config.bos_token_id, "config")
        if vq is not None and vq.config.codebook_size != len(codes):
            raise IncompatibleError.between(
                "the tokenizer's decoder",
                self.name,
                f"it has {vq.config.codebook_size} codes, the model {len(codes)}",
                "give the decoder of the tokenizer that the model was trained on",
            )
        self.vq = vq

    def text(self, prompt: str, tokenizer: Any) -> str:
        """Returns the prompt followed by the token that opens an image."""
        return f"{prompt}{OPENS}"

    def check(self, ids: Tensor) -> None:
        """Checks that every prompt ends with the token that opens an image.

        Raises:
            OptionError: A prompt does not.
        """
        if not bool((ids[:, -1] == self._opens).all()):
            raise OptionError(
                f"a prompt does not end with {OPENS} ({self._opens}), which opens an image; put it "
                "after the text"
            )

    def without_text(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids and mask: the begin-of-sequence token and the token that opens an image."""
        ids = ids.new_tensor([[self._begins, self._opens]]).expand(len(ids), -1)
        return ids, torch.ones_like(ids, dtype=torch.bool)

    def codebook(self) -> Tensor:
        """Returns the embeddings of the codes, which the model itself contains."""
        return self._body.vqmodel.quantize.embedding.weight.detach()

    def pixels(self, codes: Tensor) -> Tensor:
        """Decodes codes to pixels with the decoder ``vq``.

        Raises:
            IncompatibleError: The decoder was not given.
        """
        if self.vq is None:
            raise IncompatibleError.between(
                self.name,
                "pixels",
                "transformers has no decoder for its tokenizer",
                "pass vq=..., of mmdecode.models.chameleon_vq.load_published('vqgan.ckpt')",
            )
        return to_unit(self.vq.decode_codes(codes.to(self.vq.device)))
