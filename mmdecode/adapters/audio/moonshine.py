"""Moonshine: a decoder with rotary positions that reads samples through cross-attention.

The encoder's first norm runs over time, padding included. In a padded batch, a recording therefore
has other encoder states, and may get another text, than alone. The adapter takes the encoder states
as they are passed to it.
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
"""Column-major copies of output matrices, each with the address and a checksum of its weights."""


def by_column(head: nn.Module) -> Tensor | None:
    """A transposed copy ``(H, V)`` of an output matrix; ``None`` where it would not be faster.

    On a CPU, a vector times a matrix of tens of thousands of short rows reaches a third of the
    memory bandwidth; with the transposed matrix it reaches all of it. The copy is made once, and
    again if the weights have changed.
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
        """The transposed output matrix, for a single state; batches and trees gain nothing."""
        return by_column(self._head)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states: the product with the output matrix."""
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
        """Mask of the encoder's states, ``(B, S)``; the call's attention mask is over samples."""
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
        """Embeddings of tokens, and the rotary positions for queries and keys of all layers."""
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
