"""DAGCD on image tokens: boosts the words that the attended image tokens stand for.

Each image token stands for one word (a vocabulary token): the argmax of the model's head on the
image token's last hidden state. At every step, the attention from the current token to the image
tokens of a word, averaged over these image tokens, gives the usage U of that word. Only words among
the ``rank`` most likely next tokens are boosted. The distribution is
``(P + alpha * H * U) / (1 + alpha * H)``, with H the entropy of P divided by ``log V``. Confident
predictions hardly change. The logits are returned without this normalisation. Nothing changes where
the most likely token ends the text.

The published method applies to the words of a text context, and selects and weights attention heads
with a probe trained for each model. This library has no such probe: all heads of the chosen layers
have equal weights, unless weights are given.

Source: Huang et al. 2025, "Dynamic Attention-Guided Context Decoding", Findings of ACL
(arXiv:2501.01059). The default ``alpha`` is for chat models; the paper has 2 for base models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdecode.engine.attention import layer_range
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide, Requirements
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError
from mmdecode.guide.edited import checked_layers, warn_without_images
from mmdecode.guide.linear import not_negative

_TINY = 1e-12
"""Lower bound of divisors."""


@dataclass(frozen=True)
class Words:
    """Words (vocabulary tokens) that the image tokens of each row stand for.

    Attributes:
        ids: Word of each prompt token, ``(B, P)``; 0 at tokens that are no image tokens.
        share: One divided by the number of image tokens with the same word, ``(B, P)``; 0 at tokens
            that are no image tokens.
        weights: For each layer whose attention is read, the weights of its heads, ``(heads, 1)``.
    """

    ids: Tensor
    share: Tensor
    weights: Mapping[int, Tensor]


class DAGCD(Guide):
    """Boosts words of attended image tokens, the more the higher the prediction's entropy.

    Args:
        alpha: Strength; with 0 the guide has no effect.
        layers: First and last layer whose attention is read, as fractions of the depth.
        heads: Weights of attention heads by ``(layer, head)``, from a trained probe; replaces
            ``layers``. A negative weighted sum counts as 0.
        rank: Number of most likely tokens that can be boosted.
    """

    summary = "words of attended image tokens become more likely, the more so in doubt"
    source = "Huang et al. 2025"
    requires_inputs = ("image",)

    def __init__(
        self,
        alpha: float = 4.0,
        layers: tuple[float, float] = (0.5, 1.0),
        heads: Mapping[tuple[int, int], float] | None = None,
        rank: int = 10,
    ) -> None:
        if rank < 1:
            raise OptionError(f"rank must be at least 1, got {rank}")
        self.alpha, self.rank = not_negative("alpha", alpha), rank
        self.layers, self.heads = checked_layers(layers), heads
        self.neutral = self.alpha == 0

    @classmethod
    def from_options(
        cls, alpha: float = 4.0, first: float = 0.5, last: float = 1.0, rank: int = 10
    ) -> DAGCD:
        """Builds the guide from options; ``first`` and ``last`` give ``layers``."""
        return cls(alpha, (first, last), rank=rank)

    def needs(self, adapter: Any) -> Requirements:
        """Returns the layers whose attention is read, and asks for the prompt's hidden states."""
        return Requirements(prompt_hidden=True, attention=frozenset(self._layers(adapter)))

    def _layers(self, adapter: Any) -> Sequence[int]:
        if self.heads is None:
            return layer_range(self.layers, adapter.num_layers)
        layers = sorted({layer for layer, _ in self.heads})
        if not all(0 <= layer < adapter.num_layers for layer in layers):
            raise OptionError(
                f"heads name layers {layers}, and the model has {adapter.num_layers} layers; "
                "give weights from a probe of this model"
            )
        return layers

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> Words:
        """Finds the words that the image tokens stand for."""
        warn_without_images(type(self).__name__, call)
        main = prefill["main"]
        images = main.images
        assert images is not None, "comes with attention"
        ids = torch.zeros_like(call.request.prompt_ids)
        for row, flags in enumerate(images):  # row by row: logits of all image tokens are large
            states = main.prompt_hidden["last"][row, flags]
            ids[row, flags] = call.plan.adapter.head(states).argmax(-1)
        counts = main.logits.new_zeros(call.batch, main.logits.shape[-1])
        counts = counts.scatter_add(1, ids, images.to(counts))
        share = images / counts.gather(1, ids).clamp_min(1)
        weights = {
            layer: self._weights(layer, main.attention[layer])
            for layer in self._layers(call.plan.adapter)
        }
        return Words(ids, share, weights)

    def usage(self, words: Words, main: BranchOutput) -> Tensor:
        """Computes each word's usage from attention to its image tokens, ``(B, N + 1, V)``."""
        usage = torch.zeros_like(main.logits)
        for layer, weights in words.weights.items():
            attention = main.attention[layer][..., : words.ids.shape[1]]
            attended = (
                attention.transpose(1, 2) * words.share[:, None, None]
            )  # (B, N + 1, heads, P)
            ratio = attended / attended.sum(-1, keepdim=True).clamp_min(_TINY)
            part = (ratio * weights).sum(2)
            usage.scatter_add_(-1, words.ids[:, None].expand_as(part), part)
        return usage.clamp_min(0)

    def _weights(self, layer: int, attention: Tensor) -> Tensor:
        """Returns the weights of heads of ``attention (B, heads, N + 1, P)``, ``(heads, 1)``."""
        heads = range(attention.shape[1])
        if self.heads is None:
            return attention.new_ones(len(heads), 1)
        return attention.new_tensor([[self.heads.get((layer, head), 0.0)] for head in heads])

    def apply(
        self, constants: Words, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the guided logits; see `mmdecode.engine.contracts.Guide.apply`."""
        main = outputs["main"]
        logits = main.logits
        logprobs = logits.log_softmax(-1)
        entropy = torch.special.entr(logprobs.exp()).sum(-1, keepdim=True) / math.log(
            logits.shape[-1]
        )
        ranked = logits.topk(min(self.rank, logits.shape[-1]), -1).indices
        usage = self.usage(constants, main)
        usage = torch.zeros_like(usage).scatter(-1, ranked, usage.gather(-1, ranked))
        usage = usage / usage.sum(-1, keepdim=True).clamp_min(_TINY)
        ending = (ranked[..., :1] == call.request.eos_token_ids).any(-1, keepdim=True)
        boost = torch.where(ending, 0.0, self.alpha * entropy * usage)
        # in the space of the logits, so that a row without a gain keeps them bit for bit
        return torch.logaddexp(logits, logits.logsumexp(-1, keepdim=True) + boost.log())
