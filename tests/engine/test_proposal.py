"""Trees and proposals: what is refused, and that both ways of giving a shape agree."""

import pytest
import torch

from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.errors import OptionError, ShapeError


def test_a_tree_knows_its_depths_and_chains():
    tree = Tree((-1, -1, 0, 2, 1))
    assert tree.depths == (1, 1, 2, 3, 2) and tree.depth == 3 and not tree.is_chain
    assert Tree.chain(3).is_chain and Tree.chain(0).depth == 0
    assert tree.narrow(2) == Tree((-1, -1)) and tree.narrow(5) is tree


@pytest.mark.parametrize("parents", [(0,), (-1, 1), (-2,)])
def test_a_parent_that_does_not_come_before_is_refused(parents):
    with pytest.raises(ShapeError, match="names parent"):
        Tree(parents)


def test_rank_paths_become_a_tree_with_missing_prefixes():
    tree, paths = Tree.from_paths([(1, 0), (0,), (0, 2)])
    assert paths == [(0,), (1,), (0, 2), (1, 0)]
    assert tree.parents == (-1, -1, 0, 1)


def test_parents_per_row_give_the_structure_of_the_shared_tree():
    generator = torch.Generator().manual_seed(0)
    for nodes in (1, 2, 5, 17):
        limits = torch.arange(nodes) + 1
        parents = (torch.rand(6, nodes, generator=generator) * limits).long() - 1
        tokens = torch.zeros(6, nodes, dtype=torch.long)
        rows = Proposal(tokens=tokens, kind="deterministic", parents=parents)
        for b in range(6):
            tree = Tree(tuple(parents[b].tolist()))
            shared = Proposal(tokens=tokens[b : b + 1], kind="deterministic", tree=tree)
            for own, one in zip(rows.structure(), shared.structure(), strict=True):
                assert torch.equal(own[b], one[0])


def test_a_proposal_without_its_kind_or_distribution_is_refused():
    tokens = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(TypeError, match="kind"):
        Proposal(tokens=tokens)
    with pytest.raises(OptionError, match="needs log_q"):
        Proposal(tokens=tokens, kind="iid")
    with pytest.raises(OptionError, match="not one of"):
        Proposal(tokens=tokens, kind="guess")
    with pytest.raises(ShapeError, match="int64"):
        Proposal(tokens=tokens.float(), kind="deterministic")
    with pytest.raises(ShapeError, match="the tree has 2 nodes"):
        Proposal(tokens=tokens, kind="deterministic", tree=Tree.chain(2))


def test_narrowing_and_masking_touch_what_they_should():
    tokens = torch.arange(6).reshape(2, 3)
    proposal = Proposal(tokens=tokens, kind="iid", log_q=torch.zeros(2, 3, 4))
    narrow = proposal.narrow(2)
    assert narrow.size == 2 and narrow.log_q.shape == (2, 2, 4) and narrow.is_chain
    masked = proposal.masked(tokens != 4)
    assert masked.tokens.tolist() == [[0, 1, 2], [3, -1, 5]]
    assert proposal.tokens.tolist() == [[0, 1, 2], [3, 4, 5]]
