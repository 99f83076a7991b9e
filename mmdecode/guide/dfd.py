"""Dynamic Focus Decoding: a sampling temperature per token, low where layers disagree.

Let p_L be the distribution of the last layer, and p_l the distribution that the final norm and the
head give for the hidden state of an early layer l. Both are restricted to tokens with
``p_L > rho * max p_L`` and normalised. The mean divergence ``KA = mean_l KL(p_L || p_l)`` over the
early layers gives the temperature ``T = T0 * 0.5 ** (KA / sigma)``, and the guided logits are
``logits / T``. This affects sampling only: greedy decoding generates the same tokens with the
guide, at the cost of applying the head to all layers. The guide also works on text models.

Differs from the released code in two ways: early hidden states go through the final norm before the
head, without which their logits have another scale; and every row and drafted token has its own
temperature.

Source: Luo et al. 2025, arXiv:2503.08057, and its release (Siren-DFD): ``_get_focus_weight`` and
``_exponential_decay_temperature_converter``; ``rho``, ``sigma`` and ``T0`` of its demonstration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide, Requirements
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError
from mmdecode.guide.edited import checked_layers, exit_layers
from mmdecode.guide.linear import warn_inert

_COLDEST = 1e-4
"""Lowest temperature: below it sampling is greedy anyway, and quotients stay finite."""


class DFD(Guide):
    """Divides the logits by a temperature that depends on the divergence between layers.

    Args:
        rho: The divergence is computed over tokens with a probability above ``rho`` times the
            largest one, 0 to 1.
        sigma: Divergence, in nats, that halves the temperature; with infinity the temperature is
            constant.
        temperature: Temperature T0 if all layers agree. With 1 and an infinite ``sigma`` the guide
            has no effect.
        layers: First and last early layer, as fractions of the depth; the embeddings are left out.
    """

    summary = "a temperature for each token, low where layers disagree; for sampling"
    source = "Dynamic Focus Decoding 2025"

    def __init__(
        self,
        rho: float = 0.1,
        sigma: float = 4.0,
        temperature: float = 1.1,
        layers: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        if not 0 <= rho < 1:
            raise OptionError(f"rho must be at least 0 and below 1, got {rho}; 0 keeps all tokens")
        if not (sigma > 0 and temperature > 0):
            raise OptionError(
                f"sigma and temperature must be above 0, got {sigma} and {temperature}; "
                "sigma=inf switches the dependence on layers off"
            )
        self.rho, self.sigma, self.temperature = rho, float(sigma), float(temperature)
        self.layers = checked_layers(layers)
        self.neutral = math.isinf(self.sigma) and self.temperature == 1

    @classmethod
    def from_options(
        cls,
        rho: float = 0.1,
        sigma: float = 4.0,
        temperature: float = 1.1,
        first: float = 0.0,
        last: float = 1.0,
    ) -> DFD:
        """Builds the guide from the options of a string; ``first`` and ``last`` give ``layers``."""
        return cls(rho, sigma, temperature, (first, last))

    def early(self, adapter: Any) -> range:
        """Returns the early layers, whose inputs are compared with the last layer's output."""
        return exit_layers(self.layers, adapter.num_layers, least=1)

    def needs(self, adapter: Any) -> Requirements:
        """Returns what the guide needs: logits of the early layers."""
        return Requirements(early_exit_logits=frozenset(self.early(adapter)))

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Warns in greedy decoding, where the guide has no effect; computes nothing in advance."""
        warn_inert(type(self).__name__, call)

    def temperatures(self, call: Call, main: BranchOutput) -> Tensor:
        """Computes the temperature after the last token and each drafted token, ``(B, N + 1)``."""
        floor = main.logits.amax(-1, keepdim=True) + (math.log(self.rho) if self.rho else -math.inf)
        outside = main.logits <= floor
        last = main.logits.masked_fill(outside, -torch.inf).log_softmax(-1)
        weight = last.exp()
        layers = self.early(call.plan.adapter)
        divergence = torch.zeros_like(floor[..., 0])
        for layer in layers:
            logprobs = (
                main.early_exit_logits[layer].masked_fill(outside, -torch.inf).log_softmax(-1)
            )
            divergence += (weight * (last - logprobs).masked_fill(outside, 0.0)).sum(-1)
        focus = divergence / len(layers) / self.sigma
        return (self.temperature * 0.5**focus).clamp_min(_COLDEST)

    def totals(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Returns the factors ``1 / T`` of the logits, ``(B, N + 1)``."""
        return 1 / self.temperatures(call, outputs["main"])

    def apply(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the guided logits; see `mmdecode.engine.contracts.Guide.apply`."""
        main = outputs["main"]
        return main.logits / self.temperatures(call, main)[..., None]
