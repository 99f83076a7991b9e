"""Top-p and typical sampling without sorting the vocabulary.

Both keep tokens in the order of a key until they hold a mass. The token at the edge is found from a
histogram of the mass over the key; only the tokens of one bin are sorted. The kept set is that of
the sorted form with sums in float64, ties included: those of transformers' warpers, which sum in
float32, differ where a sum is within rounding of the mass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation import logits_process as lp

_BINS = 1024
_SORTED = 4096
"""A bin of more tokens is divided again."""


def top_p(processor: lp.TopPLogitsWarper, scores: Tensor) -> Tensor:
    """Scores ``(R, V)`` of the fewest most likely tokens that hold ``top_p``, -inf elsewhere.

    Tokens are taken away from the least likely one, of equal ones from the lowest id, while those
    taken away hold at most ``1 - top_p``.
    """
    probs = scores.softmax(-1)
    limit = 1 - processor.top_p
    removed = torch.empty_like(scores, dtype=torch.bool)
    for row, values in enumerate(scores):
        edge, first = _edge(values, probs[row], limit, beyond=True)
        torch.lt(values, edge, out=removed[row])
        if first:
            removed[row, :first] |= values[:first] == edge
    _keep_least(removed, scores, processor.min_tokens_to_keep, from_end=True)
    return scores.masked_fill(removed, processor.filter_value)


def typical(processor: lp.TypicalLogitsWarper, scores: Tensor) -> Tensor:
    """Scores ``(R, V)`` of tokens whose surprise is nearest to the entropy, -inf elsewhere.

    Tokens are kept until they hold ``mass``, with all that are as near as the last one.
    """
    logs = scores.log_softmax(-1)
    probs = logs.exp()
    entropy = -(logs * probs).nansum(-1, keepdim=True)
    distance = (-logs - entropy).abs()
    removed = torch.empty_like(scores, dtype=torch.bool)
    for row, values in enumerate(distance):
        edge, _ = _edge(values, probs[row], processor.mass, beyond=False)
        torch.gt(values, edge, out=removed[row])
    _keep_least(removed, distance, processor.min_tokens_to_keep, from_end=False)
    return scores.masked_fill(removed, processor.filter_value)


def _keep_least(removed: Tensor, keys: Tensor, least: int, from_end: bool) -> None:
    """Keeps ``least`` tokens of every row at one end of the order, by key and then by id."""
    few = (removed.logical_not().sum(-1) < least).nonzero()[:, 0]
    if len(few):
        order = keys[few].argsort(stable=True)
        kept = order[:, -least:] if from_end else order[:, :least]
        removed[few] = removed[few].scatter(-1, kept, False)


def _edge(keys: Tensor, mass: Tensor, limit: float, beyond: bool) -> tuple[Tensor, int]:
    """The first token, by key and then by id, up to which the mass reaches a limit.

    Args:
        keys: ``(V,)``; infinite ones hold no mass.
        mass: ``(V,)``, not negative.
        limit: Mass to reach.
        beyond: Whether the limit has to be exceeded.

    Returns:
        Its key and its id; the last token's if the limit is out of reach.
    """
    ids = keys.isfinite().nonzero()[:, 0]
    if len(ids) < len(keys):
        keys, mass = keys[ids], mass[ids]
    if not len(ids):
        return torch.full((), torch.nan), 0
    before = 0.0
    while len(keys) > _SORTED:
        low, high = keys.aminmax()
        if low == high:
            break
        scale = _BINS / (float(high) - float(low))
        bins = ((keys - low) * scale).clamp_(0, _BINS - 1).to(torch.int32)
        sums = torch.bincount(bins, mass.double(), _BINS).cumsum(0).add_(before)
        at = min(int((sums <= limit if beyond else sums < limit).sum()), int(bins.max()))
        inside = (bins == at).nonzero()[:, 0]
        if at:
            before = float(sums[at - 1])
        if len(inside) == len(keys):
            break  # as many ties
        keys, mass, ids = keys[inside], mass[inside], ids[inside]
    order = keys.argsort(stable=True)
    sums = mass[order].double().cumsum(0).add_(before)
    at = min(int((sums <= limit if beyond else sums < limit).sum()), len(order) - 1)
    return keys[order[at]], int(ids[order[at]])
