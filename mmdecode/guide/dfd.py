"""Dynamic Focus Decoding: a temperature for each token, low where layers disagree.

On the tokens with ``p_L > rho * max p_L``, ``KA = mean_l KL(p_L || p_l)`` over the early layers l,
all distributions normalised on those tokens; then ``T = T0 * 0.5 ** (KA / sigma)`` and the
distribution is that of ``logits / T``. It only affects sampling: greedy decoding takes the same
tokens with and without it, and pays for the exits of all layers. Works on text models too.

Two differences from the released code: early states pass the final norm before the head, without
which their logits have another scale, and every row and node has a temperature of its own.

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
    """Temperature from the divergence of the layers.

    Args:
        rho: The divergence is taken over tokens above ``rho`` times the best probability, 0..1.
        sigma: Divergence, in nats, that halves the temperature; infinite: none does.
        temperature: T0, that of layers which agree. 1 with an infinite ``sigma`` is neutral.
        layers: Early layers, as fractions of the depth; the embeddings are left out.
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
        """Layers whose inputs are compared with the last output."""
        return exit_layers(self.layers, adapter.num_layers, least=1)

    def needs(self, adapter: Any) -> Requirements:
        """The early layers' exits."""
        return Requirements(early_exit_logits=frozenset(self.early(adapter)))

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Warns in greedy generation; computes nothing in advance."""
        warn_inert(type(self).__name__, call)

    def temperatures(self, call: Call, main: BranchOutput) -> Tensor:
        """T of root and nodes, ``(B, N + 1)``."""
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
        """Factor of the logits, ``1 / T``, ``(B, N + 1)``."""
        return 1 / self.temperatures(call, outputs["main"])

    def apply(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the guided logits; see `mmdecode.engine.contracts.Guide.apply`."""
        main = outputs["main"]
        return main.logits / self.temperatures(call, main)[..., None]
