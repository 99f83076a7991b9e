"""Adapter of ImageGPT, which generates images without a condition, one token per pixel.

The model's own forward pass flattens a four-dimensional mask, and its attention cuts a causal mask
out of a table that may be smaller than the engine's cache. So the adapter calls the embeddings, the
parts of each block and the head itself, with the engine's mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmdecode.adapters.images.base import ImageAdapter, Preset, to_unit
from mmdecode.engine.adapter import Mask, Prompt
from mmdecode.errors import IncompatibleError, OptionError, ShapeError, UnsupportedModelError
from mmdecode.models.image_layout import Layout

if TYPE_CHECKING:
    from transformers import ImageGPTForCausalImageModeling


class ImageGPTAdapter(ImageAdapter):
    """ImageGPT, generating square images with as many pixels as the model has positions.

    Args:
        model: The model.
        clusters: Colour of each token, from -1 to 1, ``(C, 3)``: ``clusters`` of the model's image
            processor. They are needed for pixels and for the codebook.

    Raises:
        UnsupportedModelError: The number of positions is not the square of an integer.
        ShapeError: There is not one cluster for each token.
    """

    summary = "ImageGPT, generating pixels as tokens"
    source = "Chen et al. 2020"
    image_types = ("imagegpt",)
    preset = Preset(sampling={"top_k": 40})

    def __init__(
        self,
        model: ImageGPTForCausalImageModeling,
        clusters: Tensor | Sequence[Sequence[float]] | None = None,
    ) -> None:
        super().__init__(model)
        self._stack: Any = model.transformer
        self._opens = model.config.vocab_size - 1  # which is never sampled
        self.vocab = self._opens
        positions = self.max_positions = model.config.n_positions
        side = math.isqrt(positions)
        if side**2 != positions:
            raise UnsupportedModelError(
                f"this {self.name} has {positions} positions, which do not fill a square image; "
                "expected the square of the image's side"
            )
        self.layout = Layout(side, side, torch.arange(self.vocab, device=model.device))
        self.clusters = None
        if clusters is not None:
            self.clusters = torch.as_tensor(clusters, dtype=torch.float32, device=model.device)
            if self.clusters.shape != (self.vocab, 3):
                raise ShapeError(
                    f"clusters have shape {tuple(self.clusters.shape)}; expected ({self.vocab}, 3):"
                    " give those of the model's own image processor"
                )

    def condition(self, *, count: int = 1) -> dict[str, Any]:  # type: ignore[override]
        """Returns model inputs for ``count`` images; there is no condition.

        Raises:
            OptionError: ``count`` is below 1.
        """
        if count < 1:
            raise OptionError(f"count must be 1 or more, got {count}")
        opens = torch.full((count, 1), self._opens, device=self.model.device)
        return {"opening": opens}

    def row_names(self, inputs: Mapping[str, Any]) -> list[bytes]:
        """Returns the same name for every row, since there is no condition."""
        return [b""] * len(inputs["opening"])

    def condition_prompt(self, inputs: Mapping[str, Any], unconditional: bool) -> Prompt:
        """Returns the prompt, which is the token that starts every image.

        Raises:
            IncompatibleError: ``unconditional`` is set, but there is no condition to leave out.
        """
        if unconditional:
            raise IncompatibleError.between(
                "guidance",
                self.name,
                "it is unconditional, so there is no condition to follow",
                "leave guidance out, or set it to 1",
            )
        ids = inputs["opening"]
        mask = torch.ones_like(ids, dtype=torch.bool)
        return Prompt(ids=ids, mask=mask, inputs={"inputs_embeds": self._stack.wte(ids)})

    def _run(self, mask: Mask, positions: Tensor, past: Any, **tokens: Tensor) -> Tensor:
        hidden = tokens.get("inputs_embeds")
        hidden = self._stack.wte(tokens["input_ids"]) if hidden is None else hidden
        hidden = hidden + self._stack.wpe(positions)
        for index, block in enumerate(self._stack.h):
            hidden = hidden + _attend(block.attn, index, block.ln_1(hidden), mask, past)
            hidden = hidden + block.mlp(block.ln_2(hidden))
        return self._stack.ln_f(hidden)

    def norm(self, hidden: Tensor) -> Tensor:
        """Applies the norm after the last block."""
        return self._stack.ln_f(hidden)

    def layers(self) -> Sequence[torch.nn.Module]:
        """Raises an error: blocks are run in parts, so no hook could read their outputs.

        Raises:
            IncompatibleError: Always.
        """
        raise IncompatibleError.between(
            "a draft or guide that reads layers",
            self.name,
            "its adapter runs the parts of each layer separately",
            "use a draft or guide that reads logits, or the last hidden state",
        )

    def attention_sites(self) -> Sequence[torch.nn.Module]:
        """Raises the same error as `layers`.

        Raises:
            IncompatibleError: Always.
        """
        return self.layers()

    def codebook(self) -> Tensor | None:
        """Returns the colour of each token, ``(C, 3)``; ``None`` if colours were not given."""
        if self.clusters is not None:
            # cached on the model's device: a captured round cannot copy between devices
            self.clusters = self.clusters.to(self.model.device)
        return self.clusters

    def pixels(self, codes: Tensor) -> Tensor:
        """Returns the colours of the tokens as pixels.

        Raises:
            IncompatibleError: The colours were not given.
        """
        if self.clusters is None:
            raise IncompatibleError.between(
                self.name,
                "pixels",
                "the model does not contain the colours of its tokens",
                "pass clusters=..., from its image processor",
            )
        return to_unit(self.clusters.to(codes.device)[codes].permute(0, 3, 1, 2))


def _attend(module: Any, layer: int, hidden: Tensor, mask: Any, past: Any) -> Tensor:
    """Computes the attention output of a block, ``(R, Q, H)``, with the engine's mask."""
    heads = module.num_heads
    query, key, value = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in module.c_attn(hidden).chunk(3, -1)
    )
    scale = query.shape[-1] ** -0.5 if module.scale_attn_weights else 1.0
    if module.scale_attn_by_inverse_layer_idx:
        scale /= layer + 1
    key, value = past.update(key, value, layer)
    seen = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return module.c_proj(seen.transpose(1, 2).flatten(2))
