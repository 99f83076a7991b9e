"""Moonshine: a decoder with rotary positions that reads samples through cross-attention.

The encoder's first norm runs over time, padding included: a recording in a padded batch has other
states than alone, and so other text. What is decoded here are the states that are handed over.
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


_columns: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, int], Tensor]] = (
    weakref.WeakKeyDictionary()
)
"""By output layer: where its weights lie with the sum of their bits, and a copy by column."""


def by_column(head: nn.Module) -> Tensor | None:
    """A copy ``(H, V)`` of an output matrix, made once; ``None`` where it is of no use.

    A CPU's product of one row with tens of thousands of short rows reads the memory at a third of
    its speed; that with the same numbers stored by column does not. Weights that changed since,
    in whatever way, are copied anew.
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
    if head not in _columns or _columns[head][0] != found:
        _columns[head] = (found, weight.t().contiguous())
    return _columns[head][1]


class MoonshineAdapter(LeanAdapter):
    """Its limit of positions is none: plain ``generate`` goes on past it, rotation has no table."""

    summary = "Moonshine, which reads samples and has rotary positions"
    source = "Jeffries et al. 2024"
    model_types = ("moonshine",)

    def __init__(self, model: MoonshineForConditionalGeneration) -> None:
        super().__init__(model, model.config.decoder_num_hidden_layers)
        # others change with the length, or scale what is turned
        self._lean = self._lean and self._decoder.rotary_emb.rope_type == "default"

    @functools.cached_property
    def _by_column(self) -> Tensor | None:
        """Made or looked up at the first single row: batches and trees never ask for it."""
        return by_column(self._head)

    def unembed(self, hidden: Tensor) -> Tensor:
        """The output matrix."""
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
        """As the encoder gives it, ``(B, S)``: the call's own attention mask is one of samples."""
        return getattr(call.request.model_kwargs["encoder_outputs"], "attention_mask", None)

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

    def embed_at(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
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
