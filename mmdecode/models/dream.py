"""DREAM: a drafter of three blocks; the middle block cross-attends to the target's hidden states.

Block 0 is self-attention over token embeddings. Block 1 cross-attends from its output to the
target's states after the final norm, with two gates that are initialised to zero. Block 2 is
self-attention, followed by a norm. An input row holds a token's embedding and the target's state of
the token before it, so that self-attention and cross-attention use the same mask, also in a tree.
The first token's row has no state.

Source: Hu et al. 2025 (DREAM), arXiv:2505.19201, section 3; checked against SAI-Lab-NYU/DREAM.
Differs from it: nodes of a tree attend only to states of their own path, while the published code
adds those of siblings. Published weights expect that the first row, which has no state to read,
gets the mean over the states of all rows, later rows included. With ``"first_row": "zero"`` in the
configuration it gets zeros instead, so that no row depends on later rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdecode.errors import InputError
from mmdecode.models.eagle import EagleLayer
from mmdecode.models.feature_drafter import MLP, FeatureDrafter, Level, Rows, norm_of

FIRST_ROWS = ("uniform", "zero")


class CrossAttention(nn.Module):
    """Cross-attention from the drafter's rows to the target's states, without positions."""

    def __init__(self, config: Mapping[str, Any], index: int, uniform: bool) -> None:
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        self.dim = config.get("head_dim") or width // heads
        self.index, self.grouped, self.uniform = index, groups != heads, uniform
        self.q_proj = nn.Linear(width, heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, groups * self.dim, bias=False)
        self.v_proj = nn.Linear(width, groups * self.dim, bias=False)
        self.o_proj = nn.Linear(heads * self.dim, width, bias=False)
        self.q_norm, self.k_norm = norm_of(config, self.dim), norm_of(config, self.dim)

    def forward(self, states: Tensor, features: Tensor, mask: Tensor | None, past: Any) -> Tensor:
        """Attends from ``states (B, Q, H)`` to cached and new ``features (B, Q, H)``.

        The first slot that ``mask`` lets a query read belongs to the row without a state, and is
        masked. Without a mask the Q rows are the first ones, and attend to those before them.
        """
        query, key, value = (
            part(given).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for part, given in (
                (self.q_proj, states),
                (self.k_proj, features),
                (self.v_proj, features),
            )
        )
        key, value = past.update(self.k_norm(key), value, self.index)
        if mask is None:
            return self.o_proj(self._causal(self.q_norm(query), key, value))
        low = torch.finfo(mask.dtype).min
        seen = mask > low / 2
        seen = seen & (seen.cumsum(-1) > 1)
        mask = (~seen).to(mask.dtype) * low
        found = F.scaled_dot_product_attention(
            self.q_norm(query), key, value, attn_mask=mask, enable_gqa=self.grouped
        )
        found = torch.where(seen.any(-1, keepdim=True), found, self._instead(value, seen))
        return self.o_proj(found.transpose(1, 2).flatten(2))

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of all rows without a mask, ``(B, Q, heads * D)``; the first has no keys."""
        after = slice(1, None)
        seen = torch.ones_like(key[:, :1, :, :1], dtype=torch.bool).transpose(2, 3)
        seen[..., 0] = False
        found = [self._instead(value, seen).expand_as(query[:, :, :1])]
        if query.shape[2] > 1:
            found.append(
                F.scaled_dot_product_attention(
                    query[:, :, after],
                    key[:, :, after],
                    value[:, :, after],
                    is_causal=True,
                    enable_gqa=self.grouped,
                )
            )
        return torch.cat(found, 2).transpose(1, 2).flatten(2)

    def _instead(self, value: Tensor, seen: Tensor) -> Tensor:
        """Returns the output of a query without keys: 0, or the mean value of all visible keys."""
        if not self.uniform:
            return value.new_zeros(())
        there = seen.any(2).to(value.dtype)  # (B, 1, K)
        mean = (there[:, :, None] @ value) / there.sum(-1).clamp_min(1)[:, :, None, None]
        heads = self.q_proj.out_features // self.dim
        return mean.repeat_interleave(heads // value.shape[1], 1)


class CrossBlock(nn.Module):
    """Gated cross-attention and MLP: ``x + tanh(g_a) attention``, then ``x + tanh(g_m) MLP``.

    The gates ``g_a`` and ``g_m`` are initialised to zero.
    """

    def __init__(self, config: Mapping[str, Any], index: int, uniform: bool) -> None:
        super().__init__()
        self.cross_attn = CrossAttention(config, index, uniform)
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))
        self.mlp = MLP(config)
        self.input_layernorm = norm_of(config)
        self.post_attention_layernorm = norm_of(config)

    def forward(self, states: Tensor, features: Tensor, mask: Tensor | None, past: Any) -> Tensor:
        """Computes states ``(B, Q, H)`` from states and features ``(B, Q, H)``."""
        found = self.cross_attn(self.input_layernorm(states), features, mask, past)
        states = states + self.cross_attn_attn_gate.tanh() * found
        made = self.mlp(self.post_attention_layernorm(states))
        return states + self.cross_attn_mlp_gate.tanh() * made


class DreamModel(FeatureDrafter):
    """DREAM's drafter: three blocks over embeddings and target states; uses the target's head."""

    kind: ClassVar[str] = "dream"
    marker: ClassVar[str] = "layers.1.cross_attn."
    reads_first: ClassVar = True
    cache_layers = 3

    def __init__(self, config: Mapping[str, Any], own_embedding: bool = False) -> None:
        super().__init__(config, own_embedding)
        first_row = config.get("first_row", FIRST_ROWS[0])
        if first_row not in FIRST_ROWS:
            raise InputError(
                f"first_row={first_row!r} of the drafter's configuration; expected one of "
                f"{', '.join(FIRST_ROWS)}"
            )
        self.layers = nn.ModuleList(
            [
                EagleLayer(config, 0),
                CrossBlock(config, 1, uniform=first_row == "uniform"),
                EagleLayer(config, 2),
            ]
        )
        self.norm = norm_of(config)

    def levels(self, num_layers: int) -> tuple[Level, ...]:
        """Returns the level of the target's states after the final norm."""
        return ("last",)

    def stages(self, rows: Rows, mask: Tensor | None, past: Any) -> list[Tensor]:
        """Returns the states after each of the three blocks and after the norm, ``(B, Q, H)``."""
        rotation = self.rotary(rows.positions, rows.embeds.dtype)
        first = self.layers[0](rows.embeds, rotation, mask, past)
        crossed = self.layers[1](first, rows.features, mask, past)
        last = self.layers[2](crossed, rotation, mask, past)
        return [first, crossed, last, self.norm(last)]

    def forward(self, rows: Rows, mask: Tensor | None, past: Any) -> Tensor:
        """See `FeatureDrafter.forward`."""
        return self.stages(rows, mask, past)[-1]


def most_received(weights: Tensor, images: Tensor, share: float) -> Tensor:
    """Returns the mask of the image tokens with the most attention, bool ``(B, P)``.

    Args:
        weights: Attention that each token receives on average, ``(B, P)``.
        images: Mask of the image tokens, bool ``(B, P)``.
        share: Share of a row's image tokens to keep, rounded down, but at least one token; 1 keeps
            all.
    """
    count = (images.sum(1).double() * share).long().clamp_min(1)
    order = weights.masked_fill(~images, -torch.inf).argsort(dim=1, descending=True, stable=True)
    return (order.argsort(dim=1) < count[:, None]) & images


def entropies(weights: Tensor) -> Tensor:
    """Returns the entropy ``(B, Q)`` in nats of attention ``(B, heads, Q, K)``, mean over heads."""
    return torch.special.entr(weights).sum(-1).mean(1)


def early_layers(num_layers: int, share: float = 0.4) -> range:
    """Returns the layers among the first ``share`` of the target, without its first and last."""
    return range(1, int(num_layers * share) - 1)


def least_entropy(states: Tensor, uncertain: Tensor) -> Tensor:
    """Returns each token's state at the layer with the lowest attention entropy, ``(B, Q, H)``.

    Args:
        states: Inputs of layers, ``(layers, B, Q, H)``.
        uncertain: `entropies` of the same layers, ``(layers, B, Q)``; on ties the first layer is
            taken.
    """
    chosen = uncertain.argmin(0)[None, ..., None].expand(-1, -1, -1, states.shape[-1])
    return states.gather(0, chosen)[0]
