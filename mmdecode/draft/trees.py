"""Chooses the shape of a draft tree for a budget of nodes, from measured acceptance rates.

A tree is a list of rank paths. The rank path ``(0, 2)`` is the third most likely token after the
most likely one. The value of a tree is the mean number of tokens committed per pass: one for
the target's own token, plus, for every node, the probability that its whole path is accepted.

Sources: Chen et al. 2024 (Sequoia), arXiv:2402.12374, section 3.1, with rates that may differ by
depth; Cai et al. 2024 (Medusa), arXiv:2401.10774, section 2.3.3, with counts of whole paths instead
of products of the heads' accuracies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from mmdecode.errors import OptionError

Path = tuple[int, ...]


def plan(rates: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """Finds the best tree of at most ``nodes`` nodes; a rank is used only after all lower ranks.

    Args:
        rates: ``rates[d][r]`` is the probability that the child of rank r is accepted, given that
            its parent was accepted. The parent has depth d; the root has depth 0. The rates of one
            depth add up to at most 1.
        nodes: Maximum number of nodes; nodes that could never be accepted are left out.

    Returns:
        Rank paths, the most often accepted first; the first n paths are a tree for every n.

    Raises:
        OptionError: The rates of a depth are negative, or add up to more than 1.
    """
    if any(sum(row) > 1 + 1e-6 or min(row, default=0) < 0 for row in rates):
        raise OptionError(
            f"rates {[list(row) for row in rates]} are no probabilities: at most one child of a "
            "node is accepted, so the rates of one depth add up to at most 1"
        )

    @cache
    def best(budget: int, depth: int, rank: int) -> tuple[float, int]:
        """Returns the value of children from ``rank`` on, and the size of the first's subtree."""
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
    """Finds the tree that commits most tokens per second; returns no paths if drafting is slower.

    This is Sequoia's hardware-aware choice of the tree size (section 3.3), from measured times.
    Only budgets that are powers of two are tried.

    Args:
        rates: Acceptance rates, see `plan`.
        seconds: Function of the numbers of nodes and levels; returns the seconds of a round that
            drafts and verifies such a tree. For ``(0, 0)`` it returns those of a pass without a
            draft.
        most: Maximum number of nodes.

    Returns:
        Rank paths, as in `plan`.
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
    """Returns the mean number of tokens that a pass commits, the target's own token included."""
    return 1 + sum(_product(rates, path) for path in paths)


def choose_tree(hits: Tensor, nodes: int) -> list[Path]:
    """Chooses the ``nodes`` rank paths that were right most often, the most frequent first.

    A path is never right more often than its prefixes, so the most frequent paths form a tree and
    are optimal for the sample. Whole paths are counted, whereas the Medusa paper multiplies the
    accuracies of the heads.

    Args:
        hits: Whether the token of each rank was right at each level and position of a sample, bool
            ``(levels, positions, ranks)``.
        nodes: Number of nodes of the tree.
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
    """Returns the mean number of tokens per pass of a tree on a sample; see `choose_tree`."""
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
