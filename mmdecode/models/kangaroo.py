"""Kangaroo's adapter: one attention layer and two norms between an early layer and the head.

Row t reads the state of token t after the target's first ``exit_layer`` layers and predicts the
token after it, through the target's own head. It uses the target's rotary positions.

Source: Liu et al. 2024 (Kangaroo), arXiv:2404.18911, section 3; keys and sizes as in
Equationliu/Kangaroo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from mmdecode.models.feature_drafter import Attention, FeatureDrafter, Level, Rows, norm_of


class KangarooLayer(nn.Module):
    """Pre-norm attention with a residual connection."""

    def __init__(self, config: Mapping[str, Any], index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, index)
        self.input_layernorm = norm_of(config)

    def forward(
        self, states: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, past: Any
    ) -> Tensor:
        """Computes states ``(B, Q, H)`` from states ``(B, Q, H)``."""
        return states + self.self_attn(self.input_layernorm(states), rotation, mask, past)


class KangarooModel(FeatureDrafter):
    """Drafts from the states after the target's first ``exit_layer`` layers.

    The configuration sets ``exit_layer``; the default is 2.
    """

    kind: ClassVar[str] = "kangaroo"
    marker: ClassVar[str] = "layers.0.self_attn."

    def __init__(self, config: Mapping[str, Any], own_embedding: bool = False) -> None:
        super().__init__(config, own_embedding)
        self.exit_layer: int = config.get("exit_layer", 2)
        self.layers = nn.ModuleList([KangarooLayer(config, 0)])
        self.norm = norm_of(config)

    def levels(self, num_layers: int) -> tuple[Level, ...]:
        """Returns the level of the states after the first ``exit_layer`` layers."""
        return (self.exit_layer,)

    def forward(self, rows: Rows, mask: Tensor | None, past: Any) -> Tensor:
        """Computes states from features, without embeddings; see `FeatureDrafter.forward`."""
        rotation = self.rotary(rows.positions, rows.features.dtype)
        return self.norm(self.layers[0](rows.features, rotation, mask, past))

    def after_layer(self, states: Tensor, mask: Tensor, rotation: Any, past: Any) -> Tensor:
        """Computes states ``(B, Q, H)`` before the last norm, right after a layer of the target.

        Args:
            states: Output of the layer, ``(B, Q, H)``.
            mask: The layer's additive attention mask.
            rotation: Rotary cosines and sines of the target, ``(B, Q, D)`` each.
            past: A cache that is indexed like the target's; its layer ``exit_layer`` is used here.
        """
        return self.layers[0](states, rotation, mask, _Shifted(past, self.exit_layer))


class _Shifted:
    """View of a cache that skips its first layers."""

    def __init__(self, past: Any, first: int) -> None:
        self._past, self._first = past, first

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Stores keys and values of a layer, with the arguments that transformers uses."""
        return self._past.update(keys, values, self._first + layer)


class Exit(nn.Module):
    """The last of the target's first layers, followed by the adapter.

    Args:
        layer: Layer of the target.
        adapter: The adapter; it gets the layer's mask, rotary tables and cache.
    """

    def __init__(self, layer: nn.Module, adapter: KangarooModel) -> None:
        super().__init__()
        self.layer, self.adapter = layer, adapter

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        *,
        position_embeddings: Any,
        past_key_values: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Computes states; the arguments are those of a transformers decoder layer."""
        made = self.layer(
            hidden_states,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            past_key_values=past_key_values,
            **kwargs,
        )
        states = made[0] if isinstance(made, tuple) else made
        return self.adapter.after_layer(
            states, attention_mask, position_embeddings, past_key_values
        )


def rope_of(config: Any) -> dict[str, Any]:
    """Returns the fields of a target's configuration that define its rotary positions."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    sizes = {"rope_parameters": rope} if rope else {}
    if (dim := getattr(config, "head_dim", None)) is not None:
        sizes["head_dim"] = dim
    return sizes
