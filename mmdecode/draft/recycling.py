"""Token recycling: proposes the tokens that were most likely after the same token before.

The target scores every node of a draft tree. The most likely next tokens of a node, its candidates,
are stored in a table under the node's token. The next tree is built from this table: the children
of a node are the candidates stored for its token. No parameters, no training, no model pass.

Source: Luo et al. 2024 (Token Recycling), arXiv:2408.08696, sections 3.1 and 3.2. Differs from the
reference: tokens without candidates draft nothing (-1), whereas the reference's table of zeros
drafts token 0; if several nodes of a tree have the same token, the deepest one is stored, whatever
the order of writes; each row has its own table, unless the table is kept from call to call.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

from mmdecode.draft.trees import Path, plan
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Block, BranchOutput, Drafter, DraftSession
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.errors import OptionError


@lru_cache
def default_paths(nodes: int = 40, ranks: int = 8) -> tuple[Path, ...]:
    """Returns the best tree of five levels if rank r is right with probability 0.5 * 0.4^r."""
    rates = [[0.5 * 0.4**rank for rank in range(ranks)]] * 5
    return tuple(plan(rates, nodes))


class Recycling(Drafter):
    """Drafts a tree of the tokens that the model found most likely after the same tokens before.

    Args:
        nodes: Number of nodes of the default tree; 0 drafts nothing. Not used with ``paths``.
        ranks: Number k of candidates (most likely next tokens) stored per token.
        paths: Rank paths of another tree, see `mmdecode.draft.trees`; ``None``: the default tree.
        keep: Whether one table, shared by all rows, is kept from call to call, so that it has
            candidates from the first token on. The tokens that ``sample_match`` samples for a seed
            (not their distribution) then depend on the other rows and on earlier calls; with the
            greedy and the coupled rule they do not.

    Proposals are deterministic trees. A row's table is ``(V, k)`` int32, filled from the logits of
    the main branch, before any guide. Lossless under every exact acceptance rule, whatever the
    table contains.
    """

    summary = "a tree of the model's earlier candidates after the same tokens"
    source = "Luo et al. 2024"
    capabilities = DrafterCapabilities(graph_safe=True)

    def __init__(
        self,
        nodes: int = 40,
        ranks: int = 8,
        paths: list[Path] | None = None,
        keep: bool = False,
    ) -> None:
        if nodes < 0 or ranks < 1:
            raise OptionError(f"nodes={nodes}, ranks={ranks}; expected nodes >= 0 and ranks >= 1")
        self.tree, order = Tree.from_paths(
            list(paths if paths is not None else default_paths(nodes, ranks))
        )
        self.ranks, self.keep = ranks, keep
        self.capabilities = replace(self.capabilities, repeatable=not keep)
        self._ranks = tuple(path[-1] for path in order)
        if any(path[-1] >= ranks for path in order):
            raise OptionError(
                f"a path names rank {max(path[-1] for path in order)}; with ranks={ranks} the "
                f"highest is {ranks - 1}"
            )
        self._kept: Tensor | None = None
        self._lock = Lock()

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Opens a session with empty tables, or with the table kept from earlier calls."""
        vocab = prefill.logits.shape[-1]
        # entry V is scratch: what must not be written goes there
        shape = (1 if self.keep else call.batch, vocab + 1, min(self.ranks, vocab))
        if not self.keep:
            table = torch.full(shape, -1, dtype=torch.int32, device=call.device)
            return RecyclingSession(call, self.tree, self._ranks, table)
        with self._lock:
            if self._kept is None or self._kept.shape != shape:
                self._kept = torch.full(shape, -1, dtype=torch.int32)
            self._kept = self._kept.to(call.device)
            return RecyclingSession(call, self.tree, self._ranks, self._kept)


class RecyclingSession(DraftSession):
    """Session of a `Recycling` drafter: builds trees from tables of candidates and updates these.

    Args:
        call: The generation call.
        tree: Shape of the draft tree.
        ranks: Rank of each node's token among the candidates.
        table: Candidates by token, ``(B or 1, V + 1, k)`` int32, -1 where unknown;
            written in place.
    """

    def __init__(self, call: Call, tree: Tree, ranks: tuple[int, ...], table: Tensor) -> None:
        super().__init__(call)
        self.tree, self.ranks, self.table = tree, ranks, table
        root = call.rows.length.new_full((call.batch, 1), -1)
        if call.prompt_length:
            root = call.request.prompt_ids[:, -1:]
        vocab = table.shape[1] - 1
        self.root = root.masked_fill(root >= vocab, -1)  # an id that is read, never generated

    def propose(self, budget: int) -> Proposal:
        """The tree below the last token; nodes without a stored candidate have token -1."""
        call, table = self.call, self.table
        self.root.copy_(call.last(1))
        if budget <= 0 or not len(self.tree):
            return Proposal.empty(call.batch, call.device)
        row = torch.arange(call.batch, device=call.device) % len(table)
        level, levels = self.root, []
        for index in _levels(self.tree, self.ranks, table.shape[2], call.device):
            known = table[row[:, None], level].long()  # (B, n, k); -1 reads the scratch entry
            known = known.masked_fill(level[..., None] < 0, -1).flatten(1)
            known = torch.nn.functional.pad(known, (0, 1), value=-1)  # for ranks beyond V
            level = known[:, index]
            levels.append(level)
        return Proposal(tokens=torch.cat(levels, 1), kind="deterministic", tree=self.tree)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Stores the most likely next tokens of every scored node under the node's token."""
        table, vocab = self.table, self.table.shape[1] - 1
        best = output.logits.topk(table.shape[2], dim=-1).indices.int()
        tokens = torch.cat([self.root, proposal.tokens], 1)
        if len(table) == 1:
            tokens, best = tokens.reshape(1, -1), best.reshape(1, -1, best.shape[-1])
        used = torch.where(tokens < 0, vocab, tokens)
        order = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        last = order.new_zeros(len(tokens), vocab + 1).scatter_reduce(1, used, order, "amax")
        written = torch.where(last.gather(1, used) == order, used, vocab)
        table.scatter_(1, written[..., None].expand_as(best), best)


@lru_cache(maxsize=64)
def _levels(tree: Tree, ranks: tuple[int, ...], width: int, device: torch.device) -> list[Tensor]:
    """Returns where each node's token is among the candidates of all nodes above, by depth."""
    result, first = [], -1
    for depth in range(1, tree.depth + 1):
        nodes = [u for u, d in enumerate(tree.depths) if d == depth]
        above = nodes[0] - first  # nodes of the level above; the root is the first level
        index = [
            (tree.parents[u] - first) * width + ranks[u] if ranks[u] < width else above * width
            for u in nodes
        ]
        result.append(torch.tensor(index, device=device))
        first = nodes[0]
    return result
