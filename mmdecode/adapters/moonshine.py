"""Moonshine: a decoder with rotary positions that reads samples through cross-attention.

The encoder's first norm runs over time, padding included: a recording in a padded batch has other
states than alone, and so other text. What is decoded here are the states that are handed over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.functional import linear

from mmdecode.adapters.lean_step import (
    Layer,
    LeanAdapter,
    Rotation,
    Turns,
    affine,
    norm,
    split,
)
from mmdecode.engine.contracts import Context

if TYPE_CHECKING:
    from transformers import MoonshineForConditionalGeneration


class MoonshineAdapter(LeanAdapter):
    """Its limit of positions is none: plain ``generate`` goes on past it, rotation has no table."""

    model_types = ("moonshine",)

    def __init__(self, model: MoonshineForConditionalGeneration) -> None:
        super().__init__(model, model.config.decoder_num_hidden_layers)
        # others change with the length, or scale what is turned
        self._lean = self._lean and self._decoder.rotary_emb.rope_type == "default"

    @property
    def source_width(self) -> int:
        """Width of the encoder's states."""
        return int(self.model.config.hidden_size)

    def source_mask(self, ctx: Context) -> Tensor | None:
        """As the encoder gives it, ``(B, S)``: the call's own attention mask is one of samples."""
        return getattr(ctx.model_inputs["encoder_outputs"], "attention_mask", None)

    @staticmethod
    def describe(layer: Any, source: Tensor, source_mask: Tensor | None) -> Layer:
        """Of a ``MoonshineDecoderLayer`` that hears ``source (B, S, H)``."""
        own, cross = layer.self_attn, layer.encoder_attn
        heads = own.config.num_key_value_heads
        return Layer(
            place=own.layer_idx,
            heads=heads,
            self_norm=norm(layer.input_layernorm),
            q=affine(own.q_proj),
            k=affine(own.k_proj),
            v=affine(own.v_proj),
            out=affine(own.o_proj),
            cross_norm=norm(layer.post_attention_layernorm),
            cross_q=affine(cross.q_proj),
            cross_out=affine(cross.o_proj),
            keys=split(linear(source, *affine(cross.k_proj)), heads),
            values=split(linear(source, *affine(cross.v_proj)), heads),
            source_mask=source_mask,
            final_norm=norm(layer.final_layernorm),
            up=affine(layer.mlp.fc1),
            activation=_gated(layer.mlp.activation_fn),
            down=affine(layer.mlp.fc2),
            scale=own.scaling,
            padding=0 if source.device.type == "cpu" else own.head_dim_padding,
        )

    def embed(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        """Embeddings, and the rotation of queries and keys, one for all layers."""
        hidden = self._decoder.embed_tokens.weight[tokens]
        return hidden, self._turns.at(positions, hidden.dtype)

    @functools.cached_property
    def _turns(self) -> Turns:
        decoder = self._decoder
        return Turns.of(decoder.rotary_emb.inv_freq, decoder.layers[0].self_attn.head_dim)

    def final_norm(self) -> nn.LayerNorm:
        """After the last layer."""
        return self._decoder.norm


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The second half of what goes up, activated, times the first."""

    def act(x: Tensor) -> Tensor:
        kept, gate = x.chunk(2, -1)
        return activation(gate) * kept

    return act
