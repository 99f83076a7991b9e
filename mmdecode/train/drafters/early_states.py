"""Recording of early states for DREAM: the layer whose attention has the lowest entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmdecode.engine.attention import AttentionEdit, Site
from mmdecode.engine.contracts import StateEdit
from mmdecode.guide.edited import Edited
from mmdecode.models.dream import early_layers, entropies, least_entropy


class EarlyStates(Edited):
    """Recorder of the states of a model's early layers and their attention entropies.

    It records during the prefill and does not change the model's output. Source: Hu et al. 2025
    (DREAM), arXiv:2505.19201, section 3.2.

    Args:
        adapter: Adapter of the target model.
    """

    def __init__(self, adapter: Any) -> None:
        depth = adapter.num_layers
        layers = early_layers(depth)
        self.neutral = not layers
        self._inputs: dict[int, Tensor] = {}
        self._uncertain: dict[int, Tensor] = {}
        if layers:
            span = (layers[0] / (depth - 1), layers[-1] / (depth - 1))
            self.edits = [
                StateEdit(branch="main", layers=span, change=self._note),
                AttentionEdit(branch="main", layers=span, rows="all", weights=self._weigh),
            ]

    def _note(self, layer: int, states: Tensor, earlier: Sequence[Tensor]) -> Tensor:
        self._inputs.setdefault(layer, earlier[-1])
        return states

    def _weigh(self, weights: Tensor, site: Site) -> Tensor:
        self._uncertain.setdefault(site.layer, entropies(weights))
        return weights

    def lowest_entropy(self) -> Tensor | None:
        """Returns each prompt token's state in the early layer of lowest attention entropy.

        Returns:
            States ``(B, P, H)``; ``None`` if the model is too shallow to have early layers.
        """
        if self.neutral:
            return None
        layers = sorted(self._inputs)
        states = torch.stack([self._inputs[layer] for layer in layers])
        return least_entropy(states, torch.stack([self._uncertain[layer] for layer in layers]))
