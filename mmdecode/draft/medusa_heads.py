"""Medusa's heads: residual blocks on the target's states, before an output matrix.

Heads score the whole vocabulary, by an output matrix of their own or by the target's. They may be
limited to a list of ids, such as the most frequent tokens of transcripts: they then multiply by
these rows of the target's output matrix only. With a vocabulary of tens of thousands of tokens and
a small model, that product is most of what a draft costs. Tokens outside the list are never
drafted, and which tokens are decided is up to the target in any case.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from mmdecode.errors import InputError

UNSCORED = -1e4
"""Logit of a token that heads do not score, where logits of the whole vocabulary are needed."""

Product = Callable[[Tensor], Tensor]


class MedusaHeads(nn.Module):
    """K heads of L residual blocks each, stacked so that one matrix product serves all heads.

    Args:
        num_heads: Number K of heads.
        num_layers: Number L of residual blocks per head.
        width: Hidden size H of the target.
        vocab: Vocabulary size of the heads' own output matrices; ``None``: all heads use the
            target's output matrix.
        vocabulary: Ids of the tokens that heads score, by the target's output matrix, ``(N,)``;
            ``None``: all tokens.
    """

    vocabulary: Tensor | None

    def __init__(
        self,
        num_heads: int,
        num_layers: int,
        width: int,
        vocab: int | None = None,
        vocabulary: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_layers, num_heads, width, width))
        self.bias = nn.Parameter(torch.zeros(num_layers, num_heads, 1, width))
        self.out = None if vocab is None else nn.Parameter(torch.zeros(num_heads, vocab, width))
        ids = None if vocabulary is None else vocabulary.long()
        self.register_buffer("vocabulary", ids, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes the states of all heads, ``(K, B, H)``, from hidden states ``(B, H)``."""
        states = hidden.to(self.weight.dtype).expand(self.weight.shape[1], -1, -1)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            states = states + nn.functional.silu(torch.baddbmm(bias, states, weight.mT))
        return states

    def logits(self, hidden: Tensor, adapter: Any) -> Tensor:
        """Computes logits of all heads, ``(K, B, V)`` or ``(K, B, N)``, from states ``(B, H)``."""
        states = self(hidden)
        if self.out is not None:
            return states @ self.out.mT
        if self.vocabulary is None:
            return adapter.unembed(states)
        return some_logits(self, states, self.vocabulary, adapter)

    def target_ids(self, tokens: Tensor) -> Tensor:
        """Returns the target's ids of tokens given by their index in the heads' logits."""
        return tokens if self.vocabulary is None else self.vocabulary[tokens]

    def own_ids(self, tokens: Tensor, nothing: int = -100) -> Tensor:
        """Returns the index of each token in the heads' logits; ``nothing`` if it has none."""
        if self.vocabulary is None:
            return tokens
        size = 1 + max(int(self.vocabulary.max()), int(tokens.max()))
        table = torch.full((size,), nothing, device=tokens.device)
        table[self.vocabulary] = torch.arange(len(self.vocabulary), device=tokens.device)
        return table[tokens.clamp(min=0)].masked_fill(tokens < 0, nothing)

    def spread(self, logits: Tensor, vocab: int) -> Tensor:
        """Returns logits ``(..., V)`` of the target's whole vocabulary."""
        if self.vocabulary is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], vocab), UNSCORED)
        whole[..., self.vocabulary] = logits
        return whole

    @classmethod
    def from_layout(
        cls, weights: dict[str, Tensor], first: int = 0, vocabulary: Tensor | None = None
    ) -> MedusaHeads:
        """Builds heads from keys ``<head>.<layer>.linear.{weight,bias}`` and ``<head>.<L>.weight``.

        Args:
            weights: Weights by key; all heads have the same shapes. The key ``<head>.<L>.weight``
                is only there if heads have their own output matrices.
            first: Index of the first head to use. Head 0 of Medusa-Linear belongs to the target.
            vocabulary: Ids of the tokens that heads score; ``None``: all tokens.

        Raises:
            InputError: Heads with their own output matrices are limited to a list of ids.
        """
        keys = [key.split(".") for key in weights]
        heads = sorted({int(key[0]) for key in keys})[first:]
        layers = len({key[1] for key in keys if "linear" in key})
        sample = weights[f"{heads[0]}.0.linear.weight"]
        own = f"{heads[0]}.{layers}.weight"
        vocab = weights[own].shape[0] if own in weights else None
        if vocab is not None and vocabulary is not None:
            raise InputError(
                "Medusa heads with own output matrices and with a list of token ids; expected one "
                "of them: train the heads again by 'mmdecode train medusa'"
            )
        module = cls(len(heads), layers, sample.shape[1], vocab, vocabulary)
        with torch.no_grad():
            for index, head in enumerate(heads):
                for layer in range(layers):
                    module.weight[layer, index] = weights[f"{head}.{layer}.linear.weight"]
                    module.bias[layer, index, 0] = weights[f"{head}.{layer}.linear.bias"]
                if module.out is not None:
                    module.out[index] = weights[f"{head}.{layers}.weight"]
        return module

    def to_layout(self) -> dict[str, Tensor]:
        """Returns the weights under the published keys, with heads numbered from 0."""
        layers, heads = self.weight.shape[:2]
        weights = {}
        for head, layer in itertools.product(range(heads), range(layers)):
            weights[f"{head}.{layer}.linear.weight"] = self.weight[layer, head]
            weights[f"{head}.{layer}.linear.bias"] = self.bias[layer, head, 0]
        if self.out is not None:
            weights |= {f"{head}.{layers}.weight": self.out[head] for head in range(heads)}
        return {key: value.detach().clone() for key, value in weights.items()}


_products: WeakKeyDictionary[MedusaHeads, tuple[ReferenceType[nn.Module], Product | None]] = (
    WeakKeyDictionary()
)
"""Product with the target's output rows, for the last target that heads drafted for."""


def some_logits(heads: MedusaHeads, states: Tensor, ids: Tensor, adapter: Any) -> Tensor:
    """Computes the target's logits of some ids; the rows of its output matrix are selected once.

    A model whose weights are changed afterwards is drafted for with the earlier rows, which may
    cost acceptance and changes no output.

    Args:
        heads: Heads that the rows are kept for.
        states: States of the heads, ``(K, B, H)``.
        ids: Ids of the heads' tokens, ``(N,)``.
        adapter: Adapter of the target.
    """
    model, found = adapter.model, _products.get(heads)
    if found is None or found[0]() is not model:
        found = (ref(model), adapter.unembed_some(ids))
        _products[heads] = found
    product = found[1]
    return adapter.unembed(states)[..., ids] if product is None else product(states)
