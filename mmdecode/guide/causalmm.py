"""CausalMM: contrast with the model under counterfactual attention.

A counterfactual branch runs with another attention map, in the image encoder (``"vision"``), in the
language model (``"language"``), or one branch of each (``"both"``). With n of them,
``(1 + n * gamma) * main - gamma * (their sum)``, then the plausibility cut.

Each query's row of a map is replaced on its own:

- ``random``: draws between 0 and 2 instead of the weights;
- ``uniform``: each weight is the mean;
- ``reversed``: the largest weight minus each;
- ``shuffle``: the weights in another order.

Only keys that a query may attend to take part (no later ones, no padding), rows are scaled to sum
to one, and a row of zeros becomes uniform. Draws depend on the request, the layer, the head, the
query and the key, so that they are the same with and without drafting.

The release edits a map as a whole. For images it takes the map of the layer whose states are
projected, resizes it from queries and keys to the grid of patches, averages heads, and multiplies
the states by it, which come out near zero; ``released=True`` does so, for encoders with square
grids. Its language maps are masked after they were normalised, and its branch shares the cache of
the main one, so that the contrast ends with the first token: neither is offered. It ships
``epsilon`` 0.6 for POPE, which leaves no token below 0.6 of the best one's probability: once yes or
no has 62.5 %, the other can no longer be sampled.

Source: Zhou et al. 2024, arXiv:2410.04780, and its release (The-Martyr/CausalMM). In which layers
the map is edited is left open there; all of them is our choice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.attention import AttentionEdit, Site
from mmdecode.errors import IncompatibleError, OptionError
from mmdecode.guide.edited import checked_layers
from mmdecode.guide.linear import Linear, not_negative

AT_ONCE = 1 << 20
"""Weights that are edited together, at most, unless one query has more: the keys of draws take
several times the memory of the weights."""

LEVELS = {"vision": ("vision",), "language": ("language",), "both": ("vision", "language")}


class CausalMM(Linear):
    """Contrast against counterfactual attention.

    Args:
        level: ``"vision"``, ``"language"`` or ``"both"``.
        intervention: ``"random"``, ``"uniform"``, ``"reversed"`` or ``"shuffle"``.
        gamma: Strength of the contrast.
        epsilon: Plausibility cut, 0..1.
        layers: First and last layer that is edited, as fractions of the depth of the encoder and
            of the language model.
        released: Edits images as the release does, see above; ``layers`` then applies to the
            language model alone. Not at level ``"language"``.
        at_once: Attention weights that are edited together; changes memory, not the output.

    The guide has no effect with ``gamma`` 0 and ``epsilon`` 0.
    """

    summary = "away from counterfactual attention in the encoder or the language model"
    source = "Zhou et al. 2024"
    requires_inputs: tuple[str, ...] = ("image",)

    def __init__(
        self,
        level: Literal["vision", "language", "both"] = "vision",
        intervention: str = "shuffle",
        gamma: float = 1.0,
        epsilon: float = 0.1,
        layers: tuple[float, float] = (0.0, 1.0),
        released: bool = False,
        at_once: int = AT_ONCE,
    ) -> None:
        if level not in LEVELS:
            raise OptionError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
        if intervention not in INTERVENTIONS:
            known = ", ".join(INTERVENTIONS)
            raise OptionError(f"intervention must be one of {known}, got {intervention!r}")
        if released and level == "language":
            raise OptionError(
                "released=True says how images are edited, and level 'language' edits none; set "
                "level to 'vision' or 'both', or leave released out"
            )
        layers = checked_layers(layers)
        self._change, self._at_once = INTERVENTIONS[intervention], at_once
        vision = BranchSpec(
            name="vision",
            transform="tower",
            transform_options={"edit": self._in_tower, "layers": layers},
        )
        if released:
            options = {"change": self._of_patches}
            vision = BranchSpec(name="vision", transform="patches", transform_options=options)
        specs = {"vision": vision, "language": BranchSpec(name="language")}
        names = LEVELS[level]
        weights = [1 + not_negative("gamma", gamma) * len(names), *(-gamma for _ in names)]
        super().__init__([specs[name] for name in names], weights, epsilon)
        self.requires_inputs = ("image",) if "vision" in names else ()
        edit = AttentionEdit(
            branch="language", layers=layers, rows="all", weights=self._in_language
        )
        self.edits = [edit] if any(b.name == "language" for b in self.branches) else []

    @classmethod
    def from_options(
        cls,
        level: Literal["vision", "language", "both"] = "vision",
        intervention: str = "shuffle",
        gamma: float = 1.0,
        epsilon: float = 0.1,
        first: float = 0.0,
        last: float = 1.0,
        released: bool = False,
    ) -> CausalMM:
        """Builds the guide from the options of a string; ``first`` and ``last`` give ``layers``."""
        return cls(level, intervention, gamma, epsilon, (first, last), released)

    def _in_tower(self, weights: Tensor, seen: Tensor, layer: int, draw: torch.Generator) -> Tensor:
        draws = lambda part: uniform(weights[:, :, part], draw)  # noqa: E731
        return counterfactual(self._change, weights, seen, draws, at_once=self._at_once)

    def _in_language(self, weights: Tensor, site: Site) -> Tensor:
        def draws(part: slice) -> Tensor:
            queries = site.positions[:, part]
            return site.noise.pairs(queries, site.keys, site.layer, weights.shape[1])

        return counterfactual(self._change, weights, site.seen, draws, at_once=self._at_once)

    def _of_patches(self, states: Tensor, weights: Tensor, draw: torch.Generator) -> Tensor:
        """States of patches ``(R, n, H)`` times the map of their layer, as released."""
        whole = weights.flatten(2)
        allowed = torch.ones_like(whole, dtype=torch.bool)
        edited = self._change(whole, allowed, lambda: uniform(whole, draw))
        return states * patch_map(edited.view_as(weights), states.shape[1])[..., None]


Draws = Callable[[], Tensor]
"""Function that returns draws in (0, 1), one for each weight; computed only when called."""

Intervention = Callable[[Tensor, Tensor, Draws], Tensor]
"""``(rows (..., n), allowed (..., n) bool, draws) -> rows``; entries that are not allowed do not
count, and may have any value in the result."""


def _random(rows: Tensor, allowed: Tensor, draws: Draws) -> Tensor:
    return 2 * draws()


def _mean(rows: Tensor, allowed: Tensor, draws: Draws) -> Tensor:
    mean = (rows * allowed).sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp_min(1)
    return mean.expand_as(rows)


def _reversed(rows: Tensor, allowed: Tensor, draws: Draws) -> Tensor:
    return (rows * allowed).amax(-1, keepdim=True) - rows


def _shuffle(rows: Tensor, allowed: Tensor, draws: Draws) -> Tensor:
    # allowed entries come first in both orders: of the draws, and of the keys
    source = draws().masked_fill(~allowed, 2.0).argsort(-1)
    target = (~allowed).long().argsort(dim=-1, stable=True)
    return torch.zeros_like(rows).scatter(-1, target, rows.gather(-1, source))


INTERVENTIONS: dict[str, Intervention] = {
    "random": _random,
    "uniform": _mean,
    "reversed": _reversed,
    "shuffle": _shuffle,
}


def counterfactual(
    change: Intervention,
    weights: Tensor,
    seen: Tensor,
    draws: Callable[[slice], Tensor],
    *,
    at_once: int = AT_ONCE,
) -> Tensor:
    """Attention weights, changed for each query among its allowed keys, and scaled to sum to one.

    Args:
        change: The intervention.
        weights: ``(R, heads, Q, K)``.
        seen: Keys that a query may attend to, bool, broadcasts to ``weights``. A query without any
            keeps its weights.
        draws: Between 0 and 1 for the weights of a slice of the queries; called where ``change``
            draws.
        at_once: Weights that are edited together, at most, unless one query has more.
    """
    rows, heads, queries, keys = weights.shape
    seen, step = seen.expand_as(weights), max(1, at_once // (rows * heads * keys))
    result = torch.empty_like(weights)
    for first in range(0, queries, step):
        part = slice(first, first + step)
        result[:, :, part] = _intervened(
            change, weights[:, :, part], seen[:, :, part], partial(draws, part)
        )
    return result


def _intervened(change: Intervention, weights: Tensor, allowed: Tensor, draws: Draws) -> Tensor:
    edited = change(weights, allowed, draws) * allowed
    total = edited.sum(-1, keepdim=True)
    uniform = allowed / allowed.sum(-1, keepdim=True).clamp_min(1)
    edited = torch.where(
        total > 0, edited / total.clamp_min(torch.finfo(total.dtype).tiny), uniform
    )
    return torch.where(allowed.any(-1, keepdim=True), edited, weights)


def patch_map(weights: Tensor, patches: int) -> Tensor:
    """A map of queries and keys ``(R, heads, N, N)`` as the release spreads it over patches.

    Returns:
        ``(R, patches)``: resized to the grid of patches, averaged over heads.

    Raises:
        IncompatibleError: The patches are no square grid.
    """
    side = round(patches**0.5)
    if side * side != patches:
        raise IncompatibleError(
            f"the released form of CausalMM resizes attention to a square grid, and {patches} "
            "patches are none; leave released out"
        )
    resized = interpolate(weights, size=(side, side), mode="bilinear", align_corners=False)
    return resized.mean(1).flatten(1)


def uniform(values: Tensor, draw: torch.Generator) -> Tensor:
    """Draws in (0, 1) for each of some values, on their device."""
    return torch.rand(values.shape, generator=draw).to(values.device)
