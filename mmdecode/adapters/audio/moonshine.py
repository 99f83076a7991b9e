"""Moonshine: a decoder with rotary positions that reads samples through cross-attention.

The encoder's first norm runs over time, padding included: a recording has other states in a padded
batch than alone, and so other text. The adapter decodes the states that it is passed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mmdecode.adapters.audio.lean_step import (
    Layer,
    LeanAdapter,
    Rotation,
    Turns,
    affine,
    norm,
    plain,
    split,
)
from mmdecode.engine.call import Call

if TYPE_CHECKING:
    from transformers import MoonshineForConditionalGeneration


by_column_copies: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, int], Tensor]] = (
    weakref.WeakKeyDictionary()
)
"""Copies by column of output layers, each with the address and sum of bits of its weights."""


def by_column(head: nn.Module) -> Tensor | None:
    """A copy ``(H, V)`` of an output matrix, made once; ``None`` if it brings nothing.

    On a CPU, the product of one row with tens of thousands of short rows reads memory at a third of
    its speed; with the same numbers stored by column it does not. Weights that changed since are
    copied again.
    """
    weight = getattr(head, "weight", None)
    if type(head) is not nn.Linear or weight is None or head.bias is not None or not plain(head):
        return None
    tall = weight.shape[0] >= 8192 and weight.shape[1] <= 512 and weight.shape[1] % 2 == 0
    if not (tall and weight.device.type == "cpu" and weight.dtype == torch.float32):
        return None
    weight = weight.detach()
    if not weight.is_contiguous():
        return None
    found = (weight.data_ptr(), int(weight.view(torch.int64).sum()))
    if head not in by_column_copies or by_column_copies[head][0] != found:
        by_column_copies[head] = (found, weight.t().contiguous())
    return by_column_copies[head][1]


class MoonshineAdapter(LeanAdapter):
    """Moonshine. Positions are unlimited, as in plain ``generate``: rotation needs no table."""

    summary = "Moonshine, which reads samples and has rotary positions"
    source = "Jeffries et al. 2024"
    model_types = ("moonshine",)

    def __init__(self, model: MoonshineForConditionalGeneration) -> None:
        super().__init__(model, model.config.decoder_num_hidden_layers)
        # other types change with the length, or scale what is rotated
        self._lean = self._lean and self._decoder.rotary_emb.rope_type == "default"

    @functools.cached_property
    def _by_column(self) -> Tensor | None:
        """The copy by column, made when a single row first needs it; batches and trees do not."""
        return by_column(self._head)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the output matrix."""
        head = self._head
        hooked = head._forward_hooks or head._forward_pre_hooks
        if hooked or hidden.shape[:-1].numel() > 1 or self._by_column is None:
            return super().unembed(hidden)
        return hidden @ self._by_column

    @property
    def source_width(self) -> int:
        """Width of the encoder's states."""
        return int(self.model.config.hidden_size)

    def source_mask(self, call: Call) -> Tensor | None:
        """The encoder's mask, ``(B, S)``: the call's own attention mask is one of samples."""
        return getattr(call.request.model_kwargs["encoder_outputs"], "attention_mask", None)

    @staticmethod
    def describe(layer: Any, source: Tensor, source_mask: Tensor | None) -> Layer:
        """Weights of a ``MoonshineDecoderLayer`` that attends to ``source (B, S, H)``."""
        own, cross = layer.self_attn, layer.encoder_attn
        heads = own.config.num_key_value_heads
        return Layer(
            cache_index=own.layer_idx,
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

    def embed_at(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        """Embeddings, and the rotation of queries and keys in all layers."""
        hidden = self._decoder.embed_tokens.weight[tokens]
        return hidden, self._turns.at(positions, hidden.dtype)

    @functools.cached_property
    def _turns(self) -> Turns:
        decoder = self._decoder
        return Turns.of(decoder.rotary_emb.inv_freq, decoder.layers[0].self_attn.head_dim)

    def final_norm(self) -> nn.LayerNorm:
        """The norm after the last layer."""
        return self._decoder.norm


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Gated activation: the first half of the input times the activated second half."""

    def act(x: Tensor) -> Tensor:
        kept, gate = x.chunk(2, -1)
        return activation(gate) * kept

    return act
