"""Adapter of Moonshine, a speech model that reads raw samples and has rotary positions.

The encoder's first norm is computed over time, padding included. In a padded batch a recording
therefore has other encoder states than alone, and may get another transcript. This adapter cannot
change that: it is given the encoder states.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.moonshine.modeling_moonshine import MoonshineDecoderLayer

from mmdecode.adapters.audio.lean_step import (
    Layer,
    LeanAdapter,
    LeanPast,
    Rotation,
    Turns,
    embedded,
    norm,
    plain,
    product,
    products,
    run_layer,
)
from mmdecode.engine.call import Call
from mmdecode.quantization.modules import Int8Linear

if TYPE_CHECKING:
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration


by_column_copies: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, int], Tensor]] = (
    weakref.WeakKeyDictionary()
)
"""Column-major copies of output matrices, with the address and a checksum of their weights."""


def by_column(head: nn.Module) -> Tensor | None:
    """Returns a transposed copy ``(H, V)`` of an output matrix; ``None`` if it is not faster.

    On a CPU, the product of a vector and a matrix with tens of thousands of short rows reaches only
    a third of the memory bandwidth; the transposed matrix reaches all of it. The copy is made once,
    and again if the weights have changed.
    """
    if type(head) is not nn.Linear or head.bias is not None or not plain(head):
        return None
    weight = head.weight
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
    """Moonshine, whose rotary positions are unlimited, as in plain ``generate``."""

    summary = "Moonshine, which reads samples and has rotary positions"
    source = "Jeffries et al. 2024"
    model_types = ("moonshine",)

    def __init__(self, model: MoonshineForConditionalGeneration) -> None:
        super().__init__(model, model.config.num_hidden_layers)
        # other types change with the length, or scale what is rotated
        self._lean = self._lean and self._decoder.rotary_emb.rope_type == "default"

    @functools.cached_property
    def _by_column(self) -> Tensor | None:
        """The transposed output matrix, used for a single state; more states would not gain."""
        return by_column(self._head)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the output matrix to hidden states."""
        head = self._head
        hooked = head._forward_hooks or head._forward_pre_hooks
        if hooked or hidden.shape[:-1].numel() > 1 or self._by_column is None:
            return super().unembed(hidden)
        return hidden @ self._by_column

    @property
    def source_width(self) -> int:
        """Returns the width of the encoder's states."""
        return int(self.model.config.hidden_size)

    def source_mask(self, call: Call) -> Tensor | None:
        """Returns the mask of encoder states, ``(B, S)``; the call's mask is over audio samples."""
        return getattr(call.request.model_kwargs["encoder_outputs"], "attention_mask", None)

    @staticmethod
    def describe(layer: Any) -> Layer:
        """Collects the weights of a layer."""
        own, cross = layer.self_attn, layer.encoder_attn
        heads, device = own.config.num_key_value_heads, layer.input_layernorm.weight.device
        return Layer(
            cache_index=own.layer_idx,
            heads=heads,
            self_norm=norm(layer.input_layernorm),
            qkv=products(own.q_proj, own.k_proj, own.v_proj),
            out=product(own.o_proj),
            cross_norm=norm(layer.post_attention_layernorm),
            cross_q=product(cross.q_proj),
            cross_out=product(cross.o_proj),
            cross_kv=(cross.k_proj, cross.v_proj),
            final_norm=norm(layer.final_layernorm),
            up=product(layer.mlp.fc1),
            activation=_gated(layer.mlp.activation_fn),
            down=product(layer.mlp.fc2),
            by_rows=isinstance(own.q_proj, Int8Linear),
            scale=own.scaling,
            padding=0 if device.type == "cpu" else own.head_dim_padding,
        )

    def embed_at(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        """Returns the tokens' embeddings, and the rotation of queries and keys for all layers."""
        hidden = embedded(self._decoder.embed_tokens, tokens)
        return hidden, self._turns.at(positions, hidden.dtype)

    @functools.cached_property
    def _turns(self) -> Turns:
        decoder = self._decoder
        return Turns.of(decoder.rotary_emb.inv_freq, decoder.layers[0].self_attn.head_dim)

    def final_norm(self) -> nn.LayerNorm:
        """Returns the norm after the last layer."""
        return self._decoder.norm

    @staticmethod
    def extra_layer(config: MoonshineConfig) -> nn.Module:
        """Returns an untrained decoder layer, for a drafter that loads its weights into it."""
        return MoonshineDecoderLayer(config, layer_idx=0)

    def run_extra_layer(
        self, layer: nn.Module, hidden: Tensor, mask: Tensor, past: LeanPast
    ) -> Tensor:
        """Runs such a layer on ``hidden (B, Q, H)``; ``past`` comes from `open`.

        Queries and keys are rotated by the positions of the tokens whose states are given.
        """
        order = torch.arange(hidden.shape[1], device=hidden.device)
        positions = (past.cache.start - past.pads)[:, None] + order
        rotation = self._turns.at(positions.clamp(min=0), hidden.dtype)
        return run_layer(past.read([layer])[0], hidden, mask, past.cache.layers[0], rotation)


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns a gated activation: the first half of its input times the activated second half."""

    def act(x: Tensor) -> Tensor:
        kept, gate = x.chunk(2, -1)
        return activation(gate) * kept

    return act
