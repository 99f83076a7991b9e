"""An attention function, registered with transformers, that reads and edits attention weights.

A model uses it, under the name `NAME`, only inside `switched`. A layer that no plan names runs as
before, bit for bit. A layer of the plan computes its scores and weights explicitly, so that a part
can read or edit them, but only for the queries that the part asks for: in a prompt most often the
last one alone, which avoids the matrix of all queries and keys. Edits are given the columns of the
prompt and the rows of a block, and do not depend on the cache's slots after the prompt.

The adapter says which modules are attention layers; a branch's runner says when a plan is active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmdecode._compat import attention_configs, stock_attention
from mmdecode.engine.noise import Noise

NAME = "mmdecode"

Rows = Literal["decoding", "last_prompt", "all"]
"""Queries that an edit changes; ``decoding``: the prompt's last token and all later ones."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """One layer's attention in one pass, as an edit is given it; R rows, Q queries, K keys.

    Attributes:
        layer: Index of the layer.
        depth: Number of layers.
        images: Keys that are image tokens, bool ``(R, 1, 1, K)``.
        seen: Keys that each query may attend to, bool ``(R or 1, 1, Q, K)``.
        strength: Strength of the edit at each query, ``(R, 1, Q, 1)``; ones if the edit has no
            ``strength``.
        positions: Logical positions of the queries, ``(R, Q)``: how many tokens come before them.
        keys: Logical positions of the keys, ``(R, K)``; negative for padding.
        noise: Keyed noise of the rows; a random edit uses `Noise.pairs`.
    """

    layer: int
    depth: int
    images: Tensor
    seen: Tensor
    strength: Tensor
    positions: Tensor
    keys: Tensor
    noise: Noise


@dataclass(frozen=True, kw_only=True)
class AttentionEdit:
    """A change to the attention of one branch.

    Attributes:
        branch: Name of the branch.
        layers: First and last layer to edit as fractions of the depth, both included; 0 is the
            first layer, 1 the last. A text model of 32 layers has layer 16 at 16 / 31.
        rows: Queries to edit, see `Rows`.
        scores: ``(scores, site) -> scores``: edits scaled scores before the mask is added and
            before the softmax, float32 ``(R, H, Q, K)``.
        weights: ``(weights, site) -> weights``: edits the softmax's result, the same shape.
        strength: ``(call, outputs of earlier stages) -> (B, N + 1)``, or ``(B, 1)``, passed on as
            `Site.strength`; 0 leaves a query unchanged, bit for bit within the layer.
    """

    branch: str
    layers: tuple[float, float] = (0.0, 1.0)
    rows: Rows = "decoding"
    scores: Callable[[Tensor, Site], Tensor] | None = None
    weights: Callable[[Tensor, Site], Tensor] | None = None
    strength: Callable[[Any, Mapping[str, Any]], Tensor] | None = None

    def covers(self, layer: int, depth: int) -> bool:
        """Whether a layer of a stack of ``depth`` layers is edited."""
        return layer in layer_range(self.layers, depth)


def layer_range(fractions: tuple[float, float], depth: int) -> range:
    """Layers between two fractions of the depth, both included; at least one."""
    first, last = (round(f * (depth - 1)) for f in fractions)
    return range(first, last + 1)


@dataclass(kw_only=True)
class AttentionPlan:
    """Edits and reads of attention in one pass.

    Attributes:
        sites: Attention module (by id) to layer index.
        depth: Number of layers.
        edits: Edits, each with the rows of the pass that it may change, as a slice.
        reads: Layers whose weights are kept.
        images: Keys that are image tokens, bool ``(R, K)``.
        decoding_rows: Queries whose logits decide tokens, bool ``(R, Q)``: see `Rows`.
        is_prompt: Whether the pass reads the prompt.
        positions: Tokens before each query, ``(R, Q)``.
        keys: Tokens before each key, ``(R, K)``.
        noise: Keyed noise of one branch's rows; all branches use the same draws.
        strengths: Strengths by index of the edit, ``(rows of the edit, Q)``.
        texts: Queries whose mean weights are kept in all layers, ``(R, T)``, -1 unused.
        means: Mean weights of these queries, layer to ``(R, H, K)``.
        weights: Weights that were read, layer to ``(R, H, Q, K)``; in a prompt, of the last token.
    """

    sites: Mapping[int, int]
    depth: int
    edits: Sequence[tuple[AttentionEdit, slice]] = ()
    reads: frozenset[int] = frozenset()
    images: Tensor
    decoding_rows: Tensor
    is_prompt: bool
    positions: Tensor
    keys: Tensor
    noise: Noise
    strengths: Mapping[int, Tensor] = field(default_factory=dict)
    texts: Tensor | None = None
    means: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[int, Tensor] = field(default_factory=dict)

    def active(self, layer: int) -> list[tuple[int, AttentionEdit, slice]]:
        """Edits of a layer in this pass."""
        return [
            (index, edit, rows)
            for index, (edit, rows) in enumerate(self.edits)
            if edit.covers(layer, self.depth) and (self.is_prompt or edit.rows != "last_prompt")
        ]

    def queries(self, layer: int, count: int) -> int:
        """Number of queries, counted from the last of ``count``, to edit or read in a layer."""
        edits = [edit for _, edit, _ in self.active(layer)]
        if not edits and layer not in self.reads:
            return 0
        return 1 if self.is_prompt and all(edit.rows != "all" for edit in edits) else count

    def keep(self, layer: int, weights: Tensor) -> None:
        """Keeps a layer's weights; in a prompt, those of its last token."""
        self.weights[layer] = weights[:, :, -1:].clone() if self.is_prompt else weights

    def apply(self, values: Tensor, layer: int, seen: Tensor, stage: str) -> Tensor:
        """Applies a layer's edits to scores or weights, in place; other rows stay unchanged.

        Args:
            values: Scores or weights of the last queries of the pass, ``(R, H, Q, K)``.
            layer: Index of the layer.
            seen: Keys that each query may attend to, ``(R or 1, 1, Q, K)``.
            stage: ``"scores"`` or ``"weights"``.
        """
        here = slice(self.decoding_rows.shape[1] - values.shape[2], None)
        decoding = self.decoding_rows[:, here]
        for index, edit, rows in self.active(layer):
            change = getattr(edit, stage)
            if change is None:
                continue
            chosen = torch.ones_like(decoding) if edit.rows == "all" else decoding
            chosen = chosen[rows][:, None, :, None]
            strength = self.strengths.get(index)
            strength = (
                torch.ones_like(chosen, dtype=values.dtype)
                if strength is None
                else strength[:, here].to(values.dtype)[:, None, :, None]
            )
            before = values[rows]
            site = Site(
                layer=layer,
                depth=self.depth,
                images=_as_wide(self.images[rows], before.shape[-1])[:, None, None],
                seen=seen[rows] if len(seen) > 1 else seen,
                strength=strength,
                positions=self.positions[rows, here],
                keys=self.keys[rows, : before.shape[-1]],
                noise=self.noise,
            )
            values[rows] = torch.where(chosen & (strength != 0), change(before, site), before)
        return values


@dataclass(kw_only=True)
class TowerPlan:
    """Edits and reads of attention in one pass through an image encoder.

    Encoders read whole images, some of them in chunks of the batch, so there are no rows to choose.

    Attributes:
        sites: Attention module (by id) to layer index.
        edit: ``(weights (R, H, Q, K), seen (R or 1, 1, Q, K), layer) -> weights``, after the
            softmax, where ``seen`` is true for keys that a query may attend to; ``None``: no edit.
        layers: Layers to edit.
        reads: Layers whose weights are kept.
        joined: Whether to read weights as if all heads were one: the softmax of ``q k^T`` over the
            square root of the full width, ``(R, 1, Q, K)``.
        weights: Weights that were read: layer to chunks in order, each ``(R, H, Q, K)``.
    """

    sites: Mapping[int, int]
    edit: Callable[[Tensor, Tensor, int], Tensor] | None = None
    layers: frozenset[int] = frozenset()
    reads: frozenset[int] = frozenset()
    joined: bool = False
    weights: dict[int, list[Tensor]] = field(default_factory=dict)

    def queries(self, layer: int, count: int) -> int:
        """Number of ``count`` queries to edit or read in a layer: all or none."""
        edited = self.edit is not None and layer in self.layers
        return count if edited or layer in self.reads else 0

    def apply(self, values: Tensor, layer: int, seen: Tensor, stage: str) -> Tensor:
        """Edited weights; scores stay unchanged."""
        if stage == "weights" and self.edit is not None and layer in self.layers:
            return self.edit(values, seen, layer)
        if stage == "scores" and self.joined and layer in self.reads:
            whole = values.sum(1, keepdim=True) / values.shape[1] ** 0.5  # scaled for one head
            self._read(layer, masked_softmax(whole, seen))
        return values

    def chunks(self) -> list[Tensor]:
        """Weights that were read, layer by layer."""
        return [chunk for read in self.weights.values() for chunk in read]

    def keep(self, layer: int, weights: Tensor) -> None:
        """Keeps one more chunk of a layer's weights."""
        if not self.joined:
            self._read(layer, weights)

    def _read(self, layer: int, weights: Tensor) -> None:
        self.weights.setdefault(layer, []).append(weights)


_plan: ContextVar[AttentionPlan | TowerPlan | None] = ContextVar("mmdecode_plan", default=None)


@contextmanager
def planned(plan: AttentionPlan | TowerPlan | None) -> Iterator[None]:
    """Makes a plan active for forward passes inside the context."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


@contextmanager
def switched(model: nn.Module, name: str = NAME) -> Iterator[None]:
    """Lets all attention layers of a model use a function by name; on exit all is as before.

    The name of the attention function is stored in configs, so models that share a config switch
    together. Contexts may overlap.
    """
    with attention_configs(model, name):
        yield


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: ``(B, H, Q, D)`` in, ``(B, Q, H, D)`` out.

    All queries run by the stock function, then those that the plan asks for again, explicitly.
    """
    plan = _plan.get()
    layer = None if plan is None else plan.sites.get(id(module))
    count = query.shape[2]
    chosen = 0 if plan is None or layer is None else plan.queries(layer, count)
    stock = stock_attention(getattr(module, "config", None))

    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(plan, AttentionPlan) and layer is not None and plan.texts is not None:
        seen = _seen(module, query, key, attention_mask, is_causal)
        plan.means[layer] = mean_weights(query, key, seen, scale, softcap, plan.texts)

    def explicit(
        last: int, plan: AttentionPlan | TowerPlan | None, layer: int | None
    ) -> tuple[Tensor, Tensor]:
        seen = _seen(module, query, key, attention_mask, is_causal)[..., -last:, :]
        return _explicit(query[:, :, -last:], key, value, seen, scale, softcap, plan, layer)

    if chosen == count:
        return explicit(count, plan, layer)
    if stock == "eager":
        usual = explicit(count, None, None)
    else:
        usual = ALL_ATTENTION_FUNCTIONS[stock](
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            softcap=softcap,
            **kwargs,
        )
    if chosen:
        usual[0][:, -chosen:] = explicit(chosen, plan, layer)[0]
    return usual


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    plan: AttentionPlan | TowerPlan | None,
    layer: int | None,
) -> tuple[Tensor, Tensor]:
    """Attention by explicit scores and weights, with the plan's edits; shapes as in `attend`."""
    heads = query.shape[1] // key.shape[1]
    value = value.repeat_interleave(heads, 1) if heads > 1 else value
    scores = _scores(query, key, scale, softcap)
    if plan is not None and layer is not None:
        scores = plan.apply(scores.float(), layer, seen, "scores")
    weights = masked_softmax(scores, seen)
    del scores  # as large as the weights
    if plan is not None and layer is not None:
        weights = plan.apply(weights, layer, seen, "weights")
        if layer in plan.reads:
            plan.keep(layer, weights)
    weights = weights.to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def explicit(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention, ``(B, Q, H, D)``, and its weights, where ``seen`` allows it; see `attend`."""
    return _explicit(query, key, value, seen, scale, softcap, None, None)


def _scores(query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scaled and capped scores, ``(B, H, Q, K)``; query heads of a group share a key head."""
    heads = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(heads, 1) if heads > 1 else key
    scores = query @ key.transpose(2, 3) * scale
    return scores if softcap is None else (scores / softcap).tanh() * softcap


def mean_weights(
    query: Tensor,
    key: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    chosen: Tensor,
) -> Tensor:
    """Mean attention weights of some of the queries, float32 ``(R, H, K)``.

    Only these queries' part of the attention matrix is computed.

    Args:
        query: ``(R, H, Q, D)``.
        key: ``(R, H', K, D)``, where H' divides H.
        seen: Keys that each query may attend to, ``(R or 1, 1, Q, K)``.
        scale: Factor of the scores.
        softcap: Cap of the scores; ``None``: no cap.
        chosen: Indices of the queries, ``(R, T)``, -1 unused.
    """
    index = chosen.clamp_min(0)[:, None, :, None]
    own = query.gather(2, index.expand(-1, query.shape[1], -1, query.shape[3]))
    seen = seen.expand(len(query), -1, -1, -1)
    seen = seen.gather(2, index.expand(-1, seen.shape[1], -1, seen.shape[3]))
    weights = masked_softmax(_scores(own, key, scale, softcap), seen)
    used = (chosen >= 0)[:, None, :, None]
    return (weights * used).sum(2) / used.sum(2).clamp_min(1)


def masked_softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the keys that ``seen`` allows, float32; over all keys where it allows none."""
    low = torch.finfo(scores.dtype).min
    return scores.masked_fill(~seen, low).softmax(-1, dtype=torch.float32)


def _seen(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> Tensor:
    """Keys that each query may attend to, from a boolean mask, an additive one, or no mask."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None:
        mask = mask[..., :keys]
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", False)
    return seen.tril() if causal and queries > 1 else seen


def _as_wide(flags: Tensor, width: int) -> Tensor:
    """``flags (R, P)`` of the prompt, padded with false to ``width`` keys."""
    return torch.nn.functional.pad(flags, (0, width - flags.shape[1]))


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, eager_mask)
