"""Planned trees against every tree of their size."""

import itertools
import math
import random

import pytest
import torch

from mmdecode.draft.recycling import default_paths
from mmdecode.draft.trees import choose_tree, expected_length, plan
from mmdecode.engine.proposal import Tree
from mmdecode.errors import OptionError

RATES = [[0.3, 0.35, 0.1], [0.5, 0.1, 0.3], [0.2, 0.2, 0.0]]  # a later sibling may be the better


def value(rates, paths):
    """Tokens that a pass commits on average: the target's own, and nodes whose path is accepted."""
    return 1 + sum(math.prod(row[r] for row, r in zip(rates, path, strict=False)) for path in paths)


def every_tree(nodes, depth=3, ranks=3):
    """All sets of rank paths that hold every prefix and every earlier sibling."""
    paths = [
        path
        for size in range(1, depth + 1)
        for path in itertools.product(range(ranks), repeat=size)
    ]
    for size in range(nodes + 1):
        for chosen in itertools.combinations(paths, size):
            held = set(chosen)
            if all(
                (len(path) == 1 or path[:-1] in held)
                and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in held)
                for path in chosen
            ):
                yield list(chosen)


@pytest.mark.parametrize("nodes", range(5))
def test_a_planned_tree_is_the_best_of_its_size(nodes):
    best = max(value(RATES, paths) for paths in every_tree(nodes))
    found = plan(RATES, nodes)
    assert value(RATES, found) == pytest.approx(best)
    assert len(found) <= nodes


def test_every_beginning_of_a_plan_is_a_tree():
    paths = plan(RATES, 20)
    for index in range(len(paths)):
        tree, order = Tree.from_paths(paths[: index + 1])
        assert len(tree) == index + 1, "no prefix was missing"
        assert sorted(order) == sorted(paths[: index + 1])


def test_a_larger_budget_never_hurts_and_hopeless_nodes_are_left_out():
    values = [value(RATES, plan(RATES, nodes)) for nodes in range(30)]
    assert values == sorted(values) and values[0] == 1
    assert plan([[0.0, 0.0]] * 3, 10) == []
    assert plan([[1.0, 0.0]] * 3, 10) == [(0,), (0, 0), (0, 0, 0)]


def test_rates_that_exclude_nothing_are_refused():
    with pytest.raises(OptionError, match="probabilities"):
        plan([[0.7, 0.6]], 4)


def test_the_value_is_what_sampling_finds():
    random.seed(0)
    paths = set(plan(RATES, 9))
    total, samples = 0, 40_000
    for _ in range(samples):
        path = ()
        for row in RATES:
            rank = random.choices([*range(3), None], [*row, 1 - sum(row)])[0]
            if rank is None or (*path, rank) not in paths:
                break
            path = (*path, rank)
        total += 1 + len(path)
    assert total / samples == pytest.approx(value(RATES, list(paths)), abs=0.02)


def test_joint_counts_beat_products_where_levels_are_not_independent():
    hits = torch.zeros(2, 100, 2, dtype=torch.bool)
    hits[0, :50, 0] = hits[0, 50:90, 1] = True
    hits[1, 50:90, 0] = True  # the second choice is always followed by the first
    joint, product = choose_tree(hits, 3), plan([[0.5, 0.4], [4 / 9, 0.0]], 3)
    assert (1, 0) in joint
    assert expected_length(hits, joint) > expected_length(hits, product)


def test_the_default_tree_of_recycling_is_a_plan():
    paths = default_paths()
    assert len(paths) == 40 and max(map(len, paths)) == 5
    assert value([[0.5 * 0.4**r for r in range(8)]] * 5, paths) > 2
