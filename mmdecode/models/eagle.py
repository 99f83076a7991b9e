"""EAGLE's drafters: a decoder layer that reads the target's states of one layer, or of three.

`EagleModel` (EAGLE, EAGLE-2 and FSPAD) reads the states after the final norm and uses the target's
output head. `Eagle3Model` fuses states of three layers, norms embeddings and features, and has its
own head, whose vocabulary may be a part of the target's. The weights have the published names.

Sources: Li et al. 2024, arXiv:2401.15077, section 3 (EAGLE); arXiv:2406.16858 (EAGLE-2, the same
weights); 2025, arXiv:2503.01840, section 3 (EAGLE-3); checked against SafeAILab/EAGLE. Differs from
it: the configuration may name the target's layers to read. Gui et al. 2024, arXiv:2408.15562
(FSPAD): the two parts are from the paper's abstract, their form and losses from the authors' code,
Luc4Gui/FSPAD; no published weights were available to check against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmdecode.models.feature_drafter import (
    MLP,
    Attention,
    FeatureDrafter,
    Level,
    Rows,
    norm_of,
)


class EagleLayer(nn.Module):
    """A Llama layer; a drafter's first layer has no norm before its attention.

    Args:
        config: Sizes, as in ``config.json``.
        index: Index of the layer.
        copies: Number of states that the layer computes for each row, concatenated.
    """

    def __init__(self, config: Mapping[str, Any], index: int, copies: int = 1) -> None:
        super().__init__()
        self.copies = copies
        self.self_attn = Attention(config, index)
        self.mlp = MLP(config, copies * config["hidden_size"])
        self.post_attention_layernorm = norm_of(config)
        if index:
            self.input_layernorm = norm_of(config)

    def forward(
        self, states: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, past: Any
    ) -> Tensor:
        """Computes states ``(B, Q, copies * H)`` from states ``(B, Q, H)``."""
        normed = self.input_layernorm(states) if self.self_attn.index else states
        states = states + self.self_attn(normed, rotation, mask, past)
        made = self.mlp(self.post_attention_layernorm(states))
        return torch.cat([states] * self.copies, -1) + made


class Sampled(nn.Module):
    """FSPAD's feature sampling: the embedding of the sampled token gates the feature.

    The feature stands for all possible next tokens, the embedding for the chosen one: ``x + W_d
    (silu(W_g e) * W_u norm(x))`` with ``x = W [e; h] + b``.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.fc = nn.Linear(2 * width, width)
        self.mlp = MLP(config)
        self.post_attention_layernorm = norm_of(config)

    def forward(self, both: Tensor) -> Tensor:
        """Combines concatenated embedding and feature, ``(B, Q, 2 H)``, to ``(B, Q, H)``."""
        states = self.fc(both)
        embeds = both[..., : states.shape[-1]]
        return states + self.mlp(self.post_attention_layernorm(states), gate=embeds)


class EagleModel(FeatureDrafter):
    """Drafter of EAGLE and EAGLE-2: ``layers(W [e; h] + b)``, then the target's head.

    Here e is a token's embedding and h the target's last state. With ``feature_sampling`` in the
    configuration it is FSPAD's drafter: `Sampled` replaces ``W [e; h] + b``, and the last layer
    computes two states for each row. Logits are computed from the first state; the second is the
    feature of the next row, and only the second is trained to match the target's state (partial
    alignment).
    """

    kind: ClassVar[str] = "eagle"
    marker: ClassVar[str] = "fc."

    def __init__(self, config: Mapping[str, Any], own_embedding: bool = False) -> None:
        super().__init__(config, own_embedding)
        self.cache_layers = config.get("num_hidden_layers", 1)
        sampling = bool(config.get("feature_sampling"))
        bias = config.get("bias", True)
        fc = Sampled(config) if sampling else nn.Linear(2 * self.width, self.width, bias=bias)
        self.fc: nn.Module = fc
        last = self.cache_layers - 1
        self.layers = nn.ModuleList(
            EagleLayer(config, i, copies=2 if sampling and i == last else 1)
            for i in range(self.cache_layers)
        )

    def levels(self, num_layers: int) -> tuple[Level, ...]:
        """Returns the level of the target's states after the final norm."""
        return ("last",)

    def read(self, rows: Rows) -> Tensor:
        """Returns the input of the first layer, ``(B, Q, H)``."""
        return self.fc(torch.cat([rows.embeds, rows.features], -1))

    def forward(self, rows: Rows, mask: Tensor | None, past: Any) -> Tensor:
        """See `FeatureDrafter.forward`; ``(B, Q, 2 H)`` where features are sampled."""
        states = self.read(replace(rows, features=self.feature(rows.features)))
        rotation = self.rotary(rows.positions, states.dtype)
        for layer in self.layers:
            states = layer(states, rotation, mask, past)
        return states

    def feature(self, states: Tensor) -> Tensor:
        """Returns the part of a row's states that is the next row's feature, ``(..., H)``."""
        return states[..., -self.width :]

    def logits(self, states: Tensor, adapter: Any) -> Tensor:
        """Computes logits with the target's head."""
        return adapter.head(states[..., : self.width])

    @classmethod
    def from_weights(
        cls, config: Mapping[str, Any], weights: Mapping[str, Tensor], name: str | Path
    ) -> FeatureDrafter:
        """Builds the module of a checkpoint, with feature sampling if the weights have its keys."""
        if "fc.fc.weight" in weights:
            config = {**config, "feature_sampling": True}
        return super().from_weights(config, weights, name)


class Eagle3Layer(nn.Module):
    """A layer that reads embedding and feature, each normed; its residual is the feature."""

    def __init__(self, config: Mapping[str, Any], embedding: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, inputs=embedding + config["hidden_size"])
        self.mlp = MLP(config)
        self.hidden_norm = norm_of(config)
        self.input_layernorm = norm_of(config, embedding)
        self.post_attention_layernorm = norm_of(config)

    def forward(
        self, rows: Rows, rotation: tuple[Tensor, Tensor], mask: Tensor | None, past: Any
    ) -> Tensor:
        """Computes states ``(B, Q, H)``."""
        both = torch.cat([self.input_layernorm(rows.embeds), self.hidden_norm(rows.features)], -1)
        states = rows.features + self.self_attn(both, rotation, mask, past)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Model(FeatureDrafter):
    """Drafter of EAGLE-3: reads the target's states at three layers, and has its own norm and head.

    The default features are the inputs of layers 2, n // 2 and n - 3 of n. The configuration may
    set ``eagle_aux_hidden_state_layer_ids`` to other layers: at the top level the ids name layers
    whose inputs are read, inside ``eagle_config`` layers whose outputs are read.
    """

    kind: ClassVar[str] = "eagle3"
    marker: ClassVar[str] = "midlayer."

    def __init__(self, config: Mapping[str, Any], own_embedding: bool = False) -> None:
        super().__init__(config, own_embedding)
        name = "eagle_aux_hidden_state_layer_ids"
        inputs, outputs = config.get(name), (config.get("eagle_config") or {}).get(name)
        named = inputs or [layer + 1 for layer in outputs or ()]
        self._named: tuple[Level, ...] = tuple(named)
        size = config.get("draft_vocab_size") or config["vocab_size"]
        self.fc = nn.Linear((len(named) or 3) * self.target_width, self.width, bias=False)
        self.midlayer = Eagle3Layer(config, self.target_width)
        self.norm = norm_of(config)
        self.lm_head = nn.Linear(self.width, size, bias=False)
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        part = size != config["vocab_size"]
        # d2t: offset from each drafter id to the target's; t2d: mask of the ids the drafter has
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long) if part else None)
        known = torch.arange(config["vocab_size"]) < size
        self.register_buffer("t2d", known if part else None)

    def levels(self, num_layers: int) -> tuple[Level, ...]:
        """Returns the low, middle and high level; in a target with few layers they coincide."""
        if self._named:
            return self._named
        return min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)

    def fuse(self, features: Tensor) -> Tensor:
        """Projects the concatenated states of the three levels to the drafter's width."""
        return self.fc(features)

    def forward(self, rows: Rows, mask: Tensor | None, past: Any) -> Tensor:
        """See `FeatureDrafter.forward`."""
        rotation = self.rotary(rows.positions, rows.features.dtype)
        return self.midlayer(rows, rotation, mask, past)

    def logits(self, states: Tensor, adapter: Any) -> Tensor:
        """Computes logits with the drafter's own norm and head."""
        return self.lm_head(self.norm(states))

    def target_ids(self) -> Tensor | None:
        """Returns the target's id of each of the drafter's ids: the id plus its offset."""
        if self.d2t is None:
            return None
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @staticmethod
    def ignored(key: str) -> bool:
        """Returns whether a tensor is not loaded: rotary tables, id maps of a full vocabulary."""
        return key.endswith("rotary_emb.inv_freq") or key in ("d2t", "t2d")


KINDS: dict[str, type[FeatureDrafter]] = {"eagle3": Eagle3Model, "eagle": EagleModel}
"""Drafter classes by name, in the order in which their weights are looked for."""
