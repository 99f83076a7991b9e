"""Whisper's decoder with the work of a step and little else.

At small batch a step of the stock decoder spends more time between the operations than in them:
module calls, dropout that drops nothing, attention dispatch, mask utilities. This runs the same
weights through the same formulas in about 14 operations a layer. It is used only where nothing can
tell the difference: exact ``nn.Linear`` and ``nn.LayerNorm`` modules without hooks, quantisation,
offload or adapters, evaluation mode, sdpa attention; else the adapter runs the stock modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from mmdecode._compat import attention_implementation
from mmdecode.engine.cache import RaggedLayer

Affine = tuple[Tensor, Tensor | None]
"""Weight and bias."""
Norm = tuple[tuple[int, ...], Tensor, Tensor, float]
"""What ``torch.layer_norm`` takes behind its input."""


class Layer(NamedTuple):
    """Weights of one layer, looked up once a call: attributes of modules are slow to read.

    ``place`` is that of its own keys and values in the cache: a view may leave layers out.
    ``keys`` and ``values`` are those of the audio, ``(B, heads, S, D)``.
    """

    place: int
    heads: int
    self_norm: Norm
    q: Affine
    k: Affine
    v: Affine
    out: Affine
    cross_norm: Norm
    cross_q: Affine
    cross_out: Affine
    keys: Tensor
    values: Tensor
    final_norm: Norm
    up: Affine
    activation: Callable[[Tensor], Tensor]
    down: Affine

    @classmethod
    def of(cls, layer: Any, audio: Tensor) -> Layer:
        """Of a ``WhisperDecoderLayer`` that hears ``audio (B, S, H)``."""
        own, cross = layer.self_attn, layer.encoder_attn
        return cls(
            place=own.layer_idx,
            heads=own.num_heads,
            self_norm=_norm(layer.self_attn_layer_norm),
            q=_affine(own.q_proj),
            k=_affine(own.k_proj),
            v=_affine(own.v_proj),
            out=_affine(own.out_proj),
            cross_norm=_norm(layer.encoder_attn_layer_norm),
            cross_q=_affine(cross.q_proj),
            cross_out=_affine(cross.out_proj),
            keys=_split(linear(audio, *_affine(cross.k_proj)), cross.num_heads).contiguous(),
            values=_split(linear(audio, *_affine(cross.v_proj)), cross.num_heads).contiguous(),
            final_norm=_norm(layer.final_layer_norm),
            up=_affine(layer.fc1),
            activation=layer.activation_fn,
            down=_affine(layer.fc2),
        )

    def reorder(self, rows: Tensor) -> Layer:
        """The rows ``rows`` of the audio."""
        return self._replace(keys=self.keys[rows], values=self.values[rows])


def usable(decoder: Any) -> bool:
    """Whether the stock modules are plain enough to be run directly."""
    if decoder.training or attention_implementation(decoder.config) != "sdpa":
        return False
    plain = {nn.Linear, nn.LayerNorm, nn.Embedding}
    return all(_plain(module, plain) for module in decoder.modules())


def _plain(module: nn.Module, plain: set[type]) -> bool:
    holds_weights = bool(module._parameters) and type(module).__module__.startswith("torch.")
    foreign = holds_weights and type(module) not in plain
    patched = "forward" in vars(module) or "_hf_hook" in vars(module)
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    wrapped = not type(module).__module__.startswith(("torch.", "transformers."))
    return not (foreign or patched or hooked or wrapped)


def step(
    decoder: Any,
    tokens: Tensor,
    mask: Tensor,
    positions: Tensor,
    layers: list[Layer],
    caches: list[RaggedLayer],
) -> Tensor:
    """States after the final norm, ``(B, Q, H)``.

    Args:
        decoder: A ``WhisperDecoder``.
        tokens: ``(B, Q)``.
        mask: Additive, ``(B, 1, Q, K)``.
        positions: ``(B, Q)``.
        layers: Its layers.
        caches: Self-attention cache, one per layer of the whole decoder.
    """
    hidden = decoder.embed_tokens.weight[tokens]
    if decoder.embed_scale != 1.0:
        hidden = hidden * decoder.embed_scale
    hidden = hidden + decoder.embed_positions.weight[positions]
    for layer in layers:
        hidden = run_layer(layer, hidden, mask, caches[layer.place])
    return torch.layer_norm(hidden, *_norm(decoder.layer_norm))


def run_layer(layer: Layer, hidden: Tensor, mask: Tensor, cache: RaggedLayer) -> Tensor:
    """One pre-norm layer: causal attention, attention to the audio, feed-forward."""
    heads = layer.heads
    x = torch.layer_norm(hidden, *layer.self_norm)
    keys, values = cache.update(
        _split(linear(x, *layer.k), heads), _split(linear(x, *layer.v), heads)
    )
    queries = _split(linear(x, *layer.q), heads)
    x = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    hidden = hidden + linear(_merge(x), *layer.out)

    queries = _split(linear(torch.layer_norm(hidden, *layer.cross_norm), *layer.cross_q), heads)
    x = scaled_dot_product_attention(queries, layer.keys, layer.values)
    hidden = hidden + linear(_merge(x), *layer.cross_out)

    x = linear(torch.layer_norm(hidden, *layer.final_norm), *layer.up)
    return hidden + linear(layer.activation(x), *layer.down)


def _affine(module: nn.Linear) -> Affine:
    return module.weight, module.bias


def _norm(module: nn.LayerNorm) -> Norm:
    return module.normalized_shape, module.weight, module.bias, module.eps


def _split(x: Tensor, heads: int) -> Tensor:
    """``(B, Q, H)`` to ``(B, heads, Q, D)``."""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)
