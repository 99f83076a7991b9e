"""Rejection sampling of sampled drafts: exact for chains and trees, with one draft or several.

At a node the children are tested in the order in which they were drawn: x is kept with probability
min(1, p(x) / q(x)); else p becomes the residual norm(max(p - q, 0)) and, for siblings drawn without
replacement, q loses x. When no child is left, the token is drawn from what p has become.

Sources: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1 (p target, q draft); several
independent siblings: Miao et al. 2023 (SpecInfer), arXiv:2305.09781, algorithm 2; siblings without
replacement: Jeon et al. 2024 (RSD), arXiv:2402.14160, and Chen et al. 2024 (Sequoia),
arXiv:2402.12374. Differs from common code: the test is ``u q < p``, so that a token of probability
zero is never accepted, and a residual that vanishes by rounding falls back to p.
"""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmdecode.accept.follow import finish
from mmdecode.engine.contracts import Context, LawView, Outcome
from mmdecode.engine.noise import Noise, Role
from mmdecode.engine.proposal import Kind, Proposal, Tree


class Rejection:
    """Keeps a drafted token with probability min(1, p / q); else goes on with the residual.

    Law: exact, if every token was really drawn from its ``log_q``, siblings in their order and,
    where the kind is ``iid``, independently: a repeated draw stays in the proposal. One draft is
    accepted with probability 1 - TV(p, q), the best possible.
    """

    law: ClassVar[Literal["exact", "exact for v"]] = "exact"
    kinds: tuple[Kind, ...] = ("without_replacement", "iid")
    modes = frozenset({"sample"})

    def target(self, p: Tensor, q: Tensor) -> Tensor:
        """The law that is followed where q drafted, both ``(B, V)``; the model's own."""
        return p

    def __call__(self, proposal: Proposal, law: LawView, noise: Noise, ctx: Context) -> Outcome:
        """See `mmdecode.engine.contracts.Accept`."""
        parents, _, _ = proposal.structure()
        tests = _tests(proposal.tree, proposal.size, ctx.device)
        # exponential draws E = -log u, one a test: u < p / q is E > log q - log p
        gumbel = noise.gumbel(ctx.length[:, None], Role.ACCEPT, len(tests), trial=ctx.rounds)
        draws = (-gumbel[:, 0]).exp()
        p = law.at(torch.where(ctx.open, 0, -1)).softmax(-1)
        node = torch.full_like(ctx.length, -1)  # where a row stands; -1 is the root
        fresh = ctx.open  # whether no child of that node was tested yet
        drawn = torch.zeros_like(p, dtype=torch.bool)  # its siblings that were
        steps = []
        for index, nodes in enumerate(tests):
            assert proposal.log_q is not None
            below = (parents[:, nodes] == node[:, None]) & (proposal.tokens[:, nodes] >= 0)
            asked = below.any(1) & ctx.open
            child = nodes[below.long().argmax(1)]
            token = proposal.tokens.gather(1, child[:, None]).clamp_min(0)
            q = _at(proposal.log_q, child).softmax(-1)
            if proposal.kind == "without_replacement":
                q = q.masked_fill(drawn, 0)
                q = q / q.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
            p = torch.where((asked & fresh)[:, None], self.target(p, q), p)
            p_x, q_x = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
            keep = asked & (draws[:, index] > q_x.log() - p_x.log())
            stay = asked & ~keep
            p = torch.where(stay[:, None], residual(p, q), p)
            drawn = drawn.scatter(1, token, drawn.gather(1, token) | stay[:, None])
            drawn = drawn & ~keep[:, None]
            fresh = keep | (fresh & ~asked)
            if law.vectorised or bool(keep.any()):  # unknown processors run at kept nodes alone
                ahead = law.at(torch.where(keep, child + 1, -1)).softmax(-1)
                p = torch.where(keep[:, None], ahead, p)
            node = torch.where(keep, child, node)
            steps.append(torch.where(keep, child, -1))
        path, count = _aligned(steps, proposal)
        gumbel = noise.gumbel(
            (ctx.length + count)[:, None], Role.RESIDUAL, p.shape[-1], trial=ctx.rounds
        )
        next_token = (p.log() + gumbel[:, 0]).argmax(-1)
        outcome = Outcome(path=path, num_accepted=count, next_token=next_token)
        return finish(outcome, proposal, law, noise, ctx)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What to draw from after a rejection: max(p - q, 0), renormalised; p where nothing is left."""
    excess = (p - q).clamp_min(0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total.clamp_min(torch.finfo(p.dtype).tiny), p)


def _at(rows: Tensor, node: Tensor) -> Tensor:
    """``(B, N, V)`` at one node per row, ``(B, V)``."""
    return rows.gather(1, node[:, None, None].expand(-1, 1, rows.shape[-1]))[:, 0]


def _aligned(steps: list[Tensor], proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Kept nodes in order, left-aligned, -1 behind; and how many. A test may have kept none."""
    if not steps:
        return proposal.tokens, proposal.tokens.new_zeros(len(proposal.tokens))
    kept = torch.stack(steps, 1)  # (B, tests), rising where not -1
    count = (kept >= 0).sum(1)
    deepest = proposal.size if proposal.tree is None else proposal.tree.depth
    path = torch.where(kept >= 0, kept, proposal.size).sort(1).values[:, :deepest]
    return path.masked_fill(path == proposal.size, -1), count


@lru_cache(maxsize=256)
def _tests(tree: Tree | None, size: int, device: torch.device) -> list[Tensor]:
    """Nodes by the order in which they are tested; of those in one test, a row meets one at most.

    In a shared tree these are the first children of all nodes of a depth, then the second ones, and
    so on. Where rows have trees of their own it is one node after the other.
    """
    if tree is None:
        return [torch.tensor([node], device=device) for node in range(size)]
    groups: dict[tuple[int, int], list[int]] = {}
    for node, parent in enumerate(tree.parents):
        elder = tree.parents[:node].count(parent)
        groups.setdefault((tree.depths[node], elder), []).append(node)
    return [torch.tensor(groups[key], device=device) for key in sorted(groups)]
