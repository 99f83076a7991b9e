"""Kangaroo's adapter: one attention and two norms between an early layer and the model's head.

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
        self, states: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, past: Any
    ) -> Tensor:
        """``(B, Q, H)`` to the same."""
        return states + self.self_attn(self.input_layernorm(states), rotation, mask, past)


class KangarooModel(FeatureDrafter):
    """The adapter of a target's first ``exit_layer`` layers (of the configuration; default 2)."""

    kind: ClassVar[str] = "kangaroo"
    marker: ClassVar[str] = "layers.0.self_attn."

    def __init__(self, config: Mapping[str, Any], own_embedding: bool = False) -> None:
        super().__init__(config, own_embedding)
        self.exit_layer: int = config.get("exit_layer", 2)
        self.layers = nn.ModuleList([KangarooLayer(config, 0)])
        self.norm = norm_of(config)

    def levels(self, num_layers: int) -> tuple[Level, ...]:
        """States that the next layer of the target reads."""
        return (self.exit_layer,)

    def forward(self, rows: Rows, mask: Tensor, past: Any) -> Tensor:
        """From features alone; see `FeatureDrafter.forward`."""
        rotation = self.rotary(rows.positions, rows.features.dtype)
        return self.norm(self.layers[0](rows.features, rotation, mask, past))

    def after_layer(self, states: Tensor, mask: Tensor, rotation: Any, past: Any) -> Tensor:
        """States ``(B, Q, H)`` before the last norm, run right after a layer of the target.

        Args:
            states: States that the layer made, ``(B, Q, H)``.
            mask: Additive, the layer's own.
            rotation: Cosines and sines of the target, ``(B, Q, D)`` each.
            past: Cache like the target's, whose layer ``exit_layer`` is free.
        """
        return self.layers[0](states, rotation, mask, _Shifted(past, self.exit_layer))


class _Shifted:
    """A cache without its first layers."""

    def __init__(self, past: Any, first: int) -> None:
        self._past, self._first = past, first

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Stores keys and values of a layer; called as transformers does."""
        return self._past.update(keys, values, self._first + layer)


class Exit(nn.Module):
    """The last layer of a view of the target, with the adapter after it.

    Args:
        layer: Layer of the target.
        adapter: The adapter, run with the layer's arguments.
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
        """Runs like a decoder layer of transformers."""
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
    """Fields of a target's configuration that define its rotary positions."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    sizes = {"rope_parameters": rope} if rope else {}
    if (dim := getattr(config, "head_dim", None)) is not None:
        sizes["head_dim"] = dim
    return sizes
