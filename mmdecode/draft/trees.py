"""Choice of the tree to draft from measured acceptance: rank paths for a budget of nodes.

A rank path ``(0, 2)`` is the third choice below the first choice. The value of a tree is the number
of tokens a pass commits on average: one for the target itself, and for every node the probability
that its whole path is accepted.

Sources: Chen et al. 2024 (Sequoia), arXiv:2402.12374, section 3.1, with rates that may differ by
depth; Cai et al. 2024 (Medusa), arXiv:2401.10774, section 2.3.3, with joint counts in place of
products of accuracies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from mmdecode.errors import OptionError

Path = tuple[int, ...]


def plan(rates: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """The best tree of at most ``nodes`` nodes in which a sibling follows all better ones.

    Args:
        rates: ``rates[d][r]``: how often the child of rank r is accepted, given that its parent (of
            depth d; the root has depth 0) was. The ranks of one depth add up to 1 at most.
        nodes: Budget; nodes that could never be accepted are left out.

    Returns:
        Rank paths, the most often accepted first; every beginning of the list is a tree.
    """
    if any(sum(row) > 1 + 1e-6 or min(row, default=0) < 0 for row in rates):
        raise OptionError(
            f"rates {[list(row) for row in rates]} are no probabilities: the ranks of one depth "
            "exclude each other, so they add up to 1 at most"
        )

    @cache
    def best(budget: int, depth: int, rank: int) -> tuple[float, int]:
        """Value of the children from ``rank`` on, and how many nodes the first of them takes."""
        if budget == 0 or depth == len(rates) or rank == len(rates[depth]):
            return 0.0, 0
        found = (0.0, 0)
        for size in range(1, budget + 1):
            below, siblings = (
                best(size - 1, depth + 1, 0)[0],
                best(budget - size, depth, rank + 1)[0],
            )
            value = rates[depth][rank] * (1 + below) + siblings
            if value > found[0] + 1e-12:
                found = (value, size)
        return found

    paths: list[Path] = []

    def collect(path: Path, budget: int) -> None:
        rank = 0
        while size := best(budget, len(path), rank)[1]:
            paths.append((*path, rank))
            collect((*path, rank), size - 1)
            budget, rank = budget - size, rank + 1

    collect((), nodes)
    return sorted(paths, key=lambda path: (-_product(rates, path), len(path), path))


def affordable(
    rates: Sequence[Sequence[float]], seconds: Callable[[int, int], float], most: int = 64
) -> list[Path]:
    """The tree that commits most tokens a second; empty where drafting would lose.

    Sequoia's choice of a size for a machine (section 3.3), from measured times. Sizes are powers of
    two, as the widths of passes are.

    Args:
        rates: See `plan`.
        seconds: ``(nodes, levels)`` to the seconds of a round that scores and drafts as many; ``(0,
            0)`` is a pass without a draft.
        most: Nodes of the largest tree.
    """
    sizes = [1 << power for power in range(most.bit_length())] if most else []
    best: tuple[float, list[Path]] = (1 / seconds(0, 0), [])
    for levels in range(1, len(rates) + 1):
        for nodes in sizes:
            paths = plan(rates[:levels], nodes)
            if not paths:
                continue
            speed = value(rates, paths) / seconds(len(paths), max(map(len, paths)))
            if speed > best[0]:
                best = (speed, paths)
    return best[1]


def value(rates: Sequence[Sequence[float]], paths: Sequence[Path]) -> float:
    """Tokens committed in a pass on average: the target's own, and nodes whose path is accepted."""
    return 1 + sum(_product(rates, path) for path in paths)


def choose_tree(hits: Tensor, nodes: int) -> list[Path]:
    """The ``nodes`` rank paths that were right most often, best first, closed under prefixes.

    A path's frequency never exceeds its prefix's, so taking the most frequent ones in order is
    optimal for the sample. Counts joint hits, where the Medusa paper multiplies accuracies.

    Args:
        hits: Whether rank r of level k was right at each position, ``(levels, positions, ranks)``.
        nodes: Size of the tree.
    """
    chosen: list[Path] = []
    frontier: dict[Path, Tensor] = {(rank,): hits[0, :, rank] for rank in range(hits.shape[2])}
    while frontier and len(chosen) < nodes:
        path = max(frontier, key=lambda p: (int(frontier[p].sum()), -len(p), [-r for r in p]))
        right = frontier.pop(path)
        chosen.append(path)
        if len(path) < len(hits):
            for rank in range(hits.shape[2]):
                frontier[(*path, rank)] = right & hits[len(path), :, rank]
    return chosen


def expected_length(hits: Tensor, paths: Sequence[Path]) -> float:
    """Mean tokens per pass of a tree on a sample of hits, the token after the path included."""
    longest = torch.zeros(hits.shape[1])
    for path in paths:
        whole = torch.stack([hits[level, :, rank] for level, rank in enumerate(path)]).all(0)
        longest = torch.maximum(longest, whole * len(path))
    return 1 + float(longest.mean())


def _product(rates: Sequence[Sequence[float]], path: Path) -> float:
    result = 1.0
    for depth, rank in enumerate(path):
        result *= rates[depth][rank]
    return result
