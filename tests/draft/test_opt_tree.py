"""Trees that end where they stop to gain, and OPT-Tree's choice of nodes: the best there is."""

import functools

import pytest
import torch

from mmdecode.draft.eagle import Eagle
from mmdecode.draft.growing import Worth, grow
from mmdecode.engine.call import Call, Plan
from mmdecode.errors import OptionError
from mmdecode.testing import check_draft
from tests.draft.test_eagle import decode, inputs_of, random_drafter, reduced, table_drafter
from tests.support.sessions import noting

TOKENS = 3
LEVELS = 8


def distributions(rows, sharpness=1.5):
    """By row and last token, the logits of the next; 0 is the root's."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, TOKENS, TOKENS, generator=generator) * sharpness


def grown(
    table, min_expected_gain=None, nodes=LEVELS, levels=LEVELS, static_shapes=False, active=None
):
    """A tree of each row, and how many levels it took.

    Tokens beyond the first few have no probability, so that a node has as many children as are
    kept.
    """
    rows, read = torch.arange(len(table))[:, None], []
    table = torch.nn.functional.pad(table, (0, LEVELS, 0, LEVELS), value=-60.0)

    def step(level, tokens, above):
        read.append(level)
        return table[rows, tokens]

    plan = Plan(static_shapes=static_shapes)
    call = Call.of(torch.zeros(len(table), 0, dtype=torch.long), plan=plan)
    if active is not None:
        call.rows.active.copy_(active)
    worth = None if min_expected_gain is None else Worth(min_expected_gain, nodes, call)
    tree = grow(table[:, :1], step, levels, nodes, worth=worth).best(nodes)
    return tree, len(read) + 1


def paths_of(tree, row):
    """The nodes in use, as paths of tokens."""
    found = {-1: ()}
    for node, parent in enumerate(tree.parents[row].tolist()):
        token = int(tree.tokens[row, node])
        if token >= 0:
            assert parent in found, "a node stands below one that is not there"
            found[node] = (*found[parent], token)
    return {path for path in found.values() if path}


def weight(table, path):
    total, last = 1.0, 0
    for token in path:
        total *= float(table[last].softmax(-1)[token])
        last = token
    return total


@functools.cache
def subtrees(nodes, tokens):
    """All trees of so many nodes, as sets of paths."""
    if not nodes:
        return {frozenset()}
    return {
        tree | {(*path, token)}
        for tree in subtrees(nodes - 1, tokens)
        for path in (*tree, ())
        for token in range(tokens)
        if (*path, token) not in tree
    }


@pytest.mark.parametrize(("nodes", "tokens"), [(1, 3), (4, 3), (5, 3), (8, 2)])
def test_no_tree_of_the_size_is_expected_to_accept_more(nodes, tokens):
    table = distributions(3)[:, :tokens, :tokens]
    tree, _ = grown(table, min_expected_gain=0.0, nodes=nodes)
    every = {path for one in subtrees(nodes, tokens) for path in one}
    for row in range(len(table)):
        weights = {path: weight(table[row], path) for path in every}
        best = max(sum(weights[path] for path in one) for one in subtrees(nodes, tokens))
        kept = paths_of(tree, row)
        assert len(kept) == nodes
        assert sum(weights[path] for path in kept) == pytest.approx(best, rel=1e-5)


def stopped(table, min_expected_gain, nodes, levels):
    """Levels that a row's tree has, by the rule in plain words."""
    found, before = [], 0.0
    frontier = [()]
    for level in range(1, levels + 1):
        frontier = [(*path, token) for path in frontier for token in range(TOKENS)]
        found = sorted([*found, *(weight(table, path) for path in frontier)], reverse=True)[:nodes]
        if sum(found) - before <= min_expected_gain:
            return level
        before = sum(found)
    return levels


@pytest.mark.parametrize("min_expected_gain", [0.05, 0.3, 0.6])
def test_a_row_ends_after_the_level_that_gains_no_more(min_expected_gain):
    table = distributions(12, sharpness=3.0)
    expected = [stopped(row, min_expected_gain, 6, 5) for row in table]
    assert len(set(expected)) > 1
    tree, levels = grown(table, min_expected_gain, nodes=6, levels=5)
    assert levels == max(expected)
    captured, all_levels = grown(table, min_expected_gain, nodes=6, levels=5, static_shapes=True)
    assert all_levels == 5
    for row, count in enumerate(expected):
        alone, _ = grown(table[row : row + 1], nodes=6, levels=count)
        kept = paths_of(alone, 0)
        assert paths_of(tree, row) == paths_of(captured, row) == kept
        assert sum(weight(table[row], path) for path in kept) > 0


def test_levels_that_add_nothing_are_spared_without_a_loss():
    table = distributions(6, sharpness=2.0)
    whole, levels = grown(table, nodes=5)
    spared, fewer = grown(table, 0.0, nodes=5)
    assert fewer < levels
    for row in range(6):
        assert paths_of(whole, row) == paths_of(spared, row)


def test_a_row_that_is_closed_holds_up_none():
    table = distributions(12, sharpness=3.0)
    needs = torch.tensor([stopped(row, 0.3, 6, 5) for row in table])
    going = needs < needs.max()
    tree, levels = grown(table, 0.3, nodes=6, levels=5, active=going)
    assert levels == needs[going].max() < needs.max()
    assert [bool(paths_of(tree, row)) for row in range(12)] == going.tolist()


DRAFTS = {
    "tree": lambda min_expected_gain: Eagle(
        random_drafter(seed=1), depth=4, top_k=2, nodes=9, min_expected_gain=min_expected_gain
    ),
    "chain": lambda min_expected_gain: Eagle(
        random_drafter(), depth=4, top_k=1, min_expected_gain=min_expected_gain
    ),
    "reduced": lambda min_expected_gain: Eagle(
        reduced(), depth=3, top_k=2, nodes=9, min_expected_gain=min_expected_gain
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "coupled"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_no_token_changes_and_a_row_drafts_what_it_drafts_alone(draft, do_sample):
    inputs = inputs_of("llama")
    expected, _ = decode("llama", do_sample=do_sample)
    found, batched = decode("llama", DRAFTS[draft](0.9), do_sample=do_sample, trace=True)
    assert found == expected
    _, whole = decode("llama", DRAFTS[draft](None), do_sample=do_sample)
    assert 0 < batched.stats.drafted < whole.stats.drafted
    if do_sample:
        return  # noise is keyed by a row's index
    for row in range(3):
        width = int(inputs["attention_mask"][row].sum())
        own = {name: value[row : row + 1, -width:] for name, value in inputs.items()}
        _, alone = decode("llama", DRAFTS[draft](0.9), inputs=own, trace=True)
        assert alone.trace[0] == batched.trace[row]


@pytest.mark.parametrize("draft", DRAFTS)
def test_nodes_after_a_rows_end_are_unused(draft):
    unused = []

    def note(_, proposal):
        unused.append((proposal.tokens < 0).sum(1).tolist())

    min_expected_gain = 0.5 if draft == "reduced" else 0.9
    decode("llama", noting(DRAFTS[draft](min_expected_gain), proposed=note))
    assert any(min(counts) == 0 < max(counts) for counts in unused)  # rows end at levels of theirs


def test_it_passes_the_public_check():
    check_draft(lambda: Eagle(table_drafter(), depth=3, top_k=3, nodes=4, min_expected_gain=0.1))


def test_a_negative_gain_is_refused():
    with pytest.raises(OptionError, match="min_expected_gain=-1"):
        Eagle(random_drafter(), min_expected_gain=-1)
