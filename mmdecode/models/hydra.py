"""Hydra heads: Medusa-like heads that also read the tokens drafted so far.

Head k, counted from 1, reads the target's last state, which decided the last committed token x_1,
and the embeddings of x_1 to x_k, and predicts x_(k+1). Unlike with Medusa, the children of two
sibling nodes may therefore differ.

Source: Ankner et al. 2024 (Hydra), arXiv:2402.05109, section 3; checked against the reference's
``mlp`` heads as hemingkx/Spec-Bench has them. Differs from it: heads share the target's output
matrix unless a checkpoint has one for each head, and are initialised to the target's own
prediction, as Medusa's heads are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmdecode.checkpoints import local_path
from mmdecode.errors import InputError, UnsupportedModelError
from mmdecode.models.feature_drafter import SavedDrafter, embedded
from mmdecode.weights import fill, read_weights


class Block(nn.Module):
    """Residual block ``x + silu(A x + b)``; if the width changes, ``R x + r`` replaces the first x.

    Args:
        inputs: Width of x.
        width: Width of the output.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.res_connection: nn.Module = nn.Identity()
        if inputs != width:
            self.res_connection = nn.Linear(inputs, width)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                kept = torch.eye(width, inputs) if name == "res_connection.weight" else 0.0
                parameter.copy_(torch.as_tensor(kept).expand_as(parameter))

    def forward(self, states: Tensor) -> Tensor:
        """Maps ``(..., inputs)`` to ``(..., width)``."""
        return self.res_connection(states) + nn.functional.silu(self.linear(states))


class HydraHeads(SavedDrafter):
    """K Hydra heads; the parameters have the published names.

    Args:
        config: ``hidden_size``, ``vocab_size``, ``hydra_num_heads``, ``hydra_num_layers`` (blocks
            per head, default 1) and ``hydra_own_outputs`` (whether each head has its own output
            matrix, default no). Fields about the target must match it, as for
            `mmdecode.models.feature_drafter.FeatureDrafter`.
    """

    kind = "hydra"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = dict(config)
        self.width: int = config["hidden_size"]
        count, blocks = config["hydra_num_heads"], config.get("hydra_num_layers", 1)
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                Block((2 + head) * self.width, self.width),
                *(Block(self.width, self.width) for _ in range(blocks - 1)),
            )
            for head in range(count)
        )
        own = count if config.get("hydra_own_outputs") else 0
        self.hydra_lm_head = nn.ModuleList(
            nn.Linear(self.width, config["vocab_size"]) for _ in range(own)
        )

    def __len__(self) -> int:
        return len(self.hydra_mlp)

    @property
    def target_width(self) -> int:
        """Returns the width of the target's states."""
        return self.width

    def embed(self, ids: Tensor, adapter: Any) -> Tensor:
        """Embeds tokens with the target's table."""
        return embedded(ids, adapter)

    def logits(self, head: int, read: Tensor, adapter: Any) -> Tensor:
        """Computes logits of a head, counted from 0, ``(..., (2 + head) H)`` to ``(..., V)``."""
        states = self.hydra_mlp[head](read)
        return self.hydra_lm_head[head](states) if self.hydra_lm_head else adapter.head(states)

    @classmethod
    def from_pretrained(cls, name: str | Path) -> HydraHeads:
        """Loads heads that this package saved, or a published checkpoint.

        Raises:
            InputError: The checkpoint holds no Hydra heads.
            UnsupportedModelError: The heads have another structure: Hydra++, with a layer of
                attention, or heads that read no drafted token.
        """
        config, weights = read_weights(local_path(name))
        heads = {key for key in weights if key.startswith("hydra_mlp.")}
        first = weights.get("hydra_mlp.0.0.linear.weight")
        if first is None:
            raise InputError(
                f"{name} holds no Hydra heads; expected keys hydra_mlp.0.0.linear.weight, ...: "
                "give the checkpoint of the heads, not the bare model"
            )
        strange = sorted(key for key in weights if not key.startswith(("hydra_mlp.", "hydra_lm_")))
        width = first.shape[0]
        if strange or first.shape[1] != 2 * width:
            raise UnsupportedModelError(
                f"{name} holds other heads ({', '.join(strange[:3]) or 'reading no tokens'}); "
                "expected Hydra heads, where head k reads a state and k embeddings: Hydra++ and "
                "other variants are not supported"
            )
        paths = [key.split(".") for key in heads]
        inferred = {
            "hidden_size": width,
            "hydra_num_heads": 1 + max(int(path[1]) for path in paths),
            "hydra_num_layers": 1 + max(int(path[2]) for path in paths),
            "hydra_own_outputs": "hydra_lm_head.0.weight" in weights,
        }
        if inferred["hydra_own_outputs"]:
            inferred["vocab_size"] = len(weights["hydra_lm_head.0.weight"])
        return fill(cls(config | inferred), weights, name)
