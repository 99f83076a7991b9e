"""Whisper's decoder with the work of a step and little else.

At small batch a step of the stock decoder spends more time between the operations than in them:
module calls, dropout that drops nothing, attention dispatch, mask utilities. This runs the same
weights through the same formulas in about 14 operations a layer. It is used only where nothing can
tell the difference: exact ``nn.Linear`` and ``nn.LayerNorm`` modules without hooks, quantisation,
offload or adapters, evaluation mode, sdpa attention; else the adapter runs the stock modules.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

from mmdecode._compat import attention_implementation
from mmdecode.engine.cache import RaggedLayer

CrossStates = tuple[Tensor, Tensor]
"""Keys and values of the audio for one layer, ``(B, heads, S, D)``."""


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
    layers: list[RaggedLayer],
    cross: list[CrossStates],
) -> Tensor:
    """States after the final norm, ``(B, Q, H)``.

    Args:
        decoder: A ``WhisperDecoder``.
        tokens: ``(B, Q)``.
        mask: Additive, ``(B, 1, Q, K)``.
        positions: ``(B, Q)``.
        layers: Self-attention cache, one per layer.
        cross: From `cross_states`, one per layer.
    """
    hidden = decoder.embed_tokens.weight[tokens]
    if decoder.embed_scale != 1.0:
        hidden = hidden * decoder.embed_scale
    hidden = hidden + decoder.embed_positions.weight[positions]
    for layer, cache, states in zip(decoder.layers, layers, cross, strict=True):
        hidden = run_layer(layer, hidden, mask, cache, states)
    return _norm(decoder.layer_norm, hidden)


def run_layer(
    layer: Any, hidden: Tensor, mask: Tensor, cache: RaggedLayer, cross: CrossStates
) -> Tensor:
    """One pre-norm layer: causal attention, attention to the audio, feed-forward."""
    attention = layer.self_attn
    heads = attention.num_heads
    x = _norm(layer.self_attn_layer_norm, hidden)
    keys, values = cache.update(
        _split(_linear(attention.k_proj, x), heads), _split(_linear(attention.v_proj, x), heads)
    )
    x = scaled_dot_product_attention(
        _split(_linear(attention.q_proj, x), heads), keys, values, attn_mask=mask
    )
    hidden = hidden + _linear(attention.out_proj, _merge(x))

    attention = layer.encoder_attn
    x = _norm(layer.encoder_attn_layer_norm, hidden)
    x = scaled_dot_product_attention(_split(_linear(attention.q_proj, x), heads), *cross)
    hidden = hidden + _linear(attention.out_proj, _merge(x))

    x = _norm(layer.final_layer_norm, hidden)
    return hidden + _linear(layer.fc2, layer.activation_fn(_linear(layer.fc1, x)))


def cross_states(layer: Any, audio: Tensor) -> CrossStates:
    """What one layer attends to in the audio, ``(B, S, H)``; computed once per call."""
    attention = layer.encoder_attn
    heads = attention.num_heads
    return (
        _split(_linear(attention.k_proj, audio), heads).contiguous(),
        _split(_linear(attention.v_proj, audio), heads).contiguous(),
    )


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)


def _split(x: Tensor, heads: int) -> Tensor:
    """``(B, Q, H)`` to ``(B, heads, Q, D)``."""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def _merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)
