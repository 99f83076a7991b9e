"""CausalMM: contrasts the model with itself under counterfactual attention.

A counterfactual branch is the model with changed attention weights, either in the image encoder
(``"vision"``) or in the language model (``"language"``); ``"both"`` runs one branch of each. With n
such branches the logits are ``(1 + n * gamma) * main - gamma * sum(branches)``; then implausible
tokens are excluded, see `mmdecode.guide.linear`.

The attention weights of each query are changed separately:

- ``random``: random numbers between 0 and 2 replace the weights;
- ``uniform``: the mean weight replaces each weight;
- ``reversed``: each weight is subtracted from the largest weight;
- ``shuffle``: the weights are permuted.

Only keys that the query may attend to are changed (no later tokens, no padding). The new weights
are scaled to sum to one; if all are zero, they become uniform. Random numbers depend on the
request, the layer, the head, the query and the key, so they are the same with and without drafting.

The released code differs. For images it resizes the attention map (queries by keys) of the layer
before the projector to the grid of patches, averages it over heads, and multiplies the patches'
states by it, which makes them nearly zero; ``released=True`` does this, for encoders with square
grids. In the language model it masks attention maps after normalising them, and its branch shares
the main branch's cache, so there is no contrast after the first token; this is not offered here. It
uses ``epsilon`` 0.6 for POPE: if yes or no has a probability above 62.5 %, the other one can no
longer be sampled.

Source: Zhou et al. 2024, arXiv:2410.04780, and its release (The-Martyr/CausalMM). The paper leaves
open which layers are edited; here all of them are by default.
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
"""Maximum number of attention weights edited at once, or one query's if it has more; this limits
memory, since drawing random numbers takes several times the memory of the weights."""

LEVELS = {"vision": ("vision",), "language": ("language",), "both": ("vision", "language")}


class CausalMM(Linear):
    """Contrasts the model with one or two branches under counterfactual attention.

    Args:
        level: Where attention is changed: ``"vision"`` (image encoder), ``"language"`` or
            ``"both"``.
        intervention: How attention weights are changed: ``"random"``, ``"uniform"``,
            ``"reversed"`` or ``"shuffle"``, see the module.
        gamma: Strength of the contrast.
        epsilon: Plausibility cut, 0 to 1: excludes tokens with a main probability below ``epsilon *
            max p``.
        layers: First and last layer that is edited, as fractions of the depth of the encoder and
            of the language model.
        released: Whether images are changed as in the released code, see the module; ``layers``
            then applies only to the language model. Not possible with level ``"language"``.
        at_once: Maximum number of attention weights that are edited at once; affects memory, not
            the output.

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
        """Multiplies states of patches ``(R, n, H)`` by their attention map, as released."""
        whole = weights.flatten(2)
        allowed = torch.ones_like(whole, dtype=torch.bool)
        edited = self._change(whole, allowed, lambda: uniform(whole, draw))
        return states * patch_map(edited.view_as(weights), states.shape[1])[..., None]


Draws = Callable[[], Tensor]
"""Function that returns random numbers in (0, 1), one for each weight; drawn when called."""

Intervention = Callable[[Tensor, Tensor, Draws], Tensor]
"""Function ``(rows (..., n), allowed (..., n) bool, draws) -> rows``: changes attention weights.
Entries that are not allowed are ignored, and may have any value in the result."""


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
    """Changes the attention weights of each query, and scales them to sum to one.

    Args:
        change: The change of the weights, see `Intervention`.
        weights: Attention weights, ``(R, heads, Q, K)``.
        seen: Whether each query may attend to each key, bool, broadcastable to ``weights``. A query
            without such keys keeps its weights.
        draws: Function of a slice of the queries; returns random numbers between 0 and 1 for their
            weights. Called only if ``change`` needs them.
        at_once: Maximum number of weights edited at once, see `AT_ONCE`.
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
    """Resizes an attention map ``(R, heads, N, N)`` to the grid of patches, as released.

    Returns:
        One factor per patch, averaged over heads, ``(R, patches)``.

    Raises:
        IncompatibleError: The patches do not form a square grid.
    """
    side = round(patches**0.5)
    if side * side != patches:
        raise IncompatibleError(
            f"released=True resizes attention to a square grid of patches, and {patches} patches "
            "do not form one; leave released out"
        )
    resized = interpolate(weights, size=(side, side), mode="bilinear", align_corners=False)
    return resized.mean(1).flatten(1)


def uniform(values: Tensor, draw: torch.Generator) -> Tensor:
    """Draws a random number in (0, 1) for each of some values, on their device."""
    return torch.rand(values.shape, generator=draw).to(values.device)
