"""Rejection sampling of sampled drafts: exact for chains and trees, with one draft or several.

At a node the children are tested in the order in which they were sampled: x is kept with
probability min(1, p(x) / q(x)); else p becomes the residual norm(max(p - q, 0)) and, for siblings
sampled without replacement, q loses x. When no child is left, the token is sampled from the current
p.

Sources: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1 (p target, q draft); several
independent siblings: Miao et al. 2023 (SpecInfer), arXiv:2305.09781, algorithm 2; siblings without
replacement: Jeon et al. 2024 (RSD), arXiv:2402.14160, and Chen et al. 2024 (Sequoia),
arXiv:2402.12374. Differs from common code: the test is ``u q < p``, so that a token of probability
zero is never accepted, and a residual that vanishes by rounding falls back to p.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import AcceptanceRule, Outcome
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal, Tree
from mmdecode.engine.sampling import passes, residual
from mmdecode.engine.target_logits import TargetLogits


class Rejection(AcceptanceRule):
    """Keeps a drafted token with probability min(1, p / q); else goes on with the residual.

    Guarantee: exact, if every token was really sampled from its ``log_q``, siblings in their order
    and, where the kind is ``iid``, independently: a repeated draw stays in the proposal. One draft
    is accepted with probability 1 - TV(p, q), the best possible.
    """

    summary = "rejection sampling of sampled chains and trees, with the residual distribution"
    source = "Leviathan et al. 2023; SpecInfer, Miao et al. 2023; RSD, Jeon et al. 2024"
    guarantee = "exact"
    kinds: tuple[Kind, ...] = ("without_replacement", "iid")
    modes = frozenset({"sample"})

    def followed(self, p: Tensor, q: Tensor) -> Tensor:
        """The distribution to follow where q drafted, both ``(..., V)``: the model's own."""
        return p

    def odds(self, candidate: Candidate) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of the test, ``(...)``: keeps if ``u * second < first``."""
        return at_token(candidate.p, candidate.token), at_token(candidate.q, candidate.token)

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """See `mmdecode.engine.contracts.AcceptanceRule`."""
        walk = self._chain if proposal.is_chain and target.vectorised else self._tree
        path, count, p = walk(proposal, target, call)
        gumbel = call.request.noise.gumbel(
            (call.rows.length + count)[:, None], Role.RESIDUAL, p.shape[-1], trial=call.rows.rounds
        )
        next_token = (p.log() + gumbel[:, 0]).argmax(-1)
        return Outcome(path=path, num_accepted=count, next_token=next_token)

    def _chain(
        self, proposal: Proposal, target: TargetLogits, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All tests at once: path, its length, and the distribution of the token after it."""
        rows = target.all().softmax(-1)  # (B, N + 1, V)
        size = proposal.size
        order = torch.arange(size, device=call.device)
        if not size:
            return proposal.tokens, torch.zeros_like(call.rows.length), rows[:, 0]
        used = (proposal.tokens >= 0) & call.rows.active[:, None]
        token, q = proposal.tokens.clamp_min(0), self._sampled_from(proposal)
        p = self.followed(rows[:, :-1], q)
        position = call.rows.length[:, None] + order
        candidate = Candidate(
            p=p,
            q=q,
            token=token,
            depth=order.expand_as(token),
            position=position,
            adapter=call.plan.adapter,
        )
        keep = used & passes(self._draws(call, size), *self.odds(candidate))
        count = keep.long().cumprod(1).sum(1)
        stopped = pad(used, (0, 1)).gather(1, count[:, None])  # by a rejection
        last = count.clamp_max(size - 1)
        left = residual(_at(p, last), _at(q, last))
        path = torch.where(order < count[:, None], order, -1)
        return path, count, torch.where(stopped, left, _at(rows, count))

    def _tree(
        self, proposal: Proposal, target: TargetLogits, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tests child after child; processors of unknown type run at kept nodes alone."""
        parents, depths, _ = proposal.structure()
        tests = _tests(proposal.tree, proposal.size, call.device)
        draws = self._draws(call, len(tests))
        p = target.at(torch.where(call.rows.active, 0, -1)).softmax(-1)
        node = torch.full_like(call.rows.length, -1)  # current node of each row; -1 is the root
        fresh = call.rows.active  # whether no child of that node was tested yet
        rejected = torch.zeros_like(p, dtype=torch.bool)  # its siblings rejected so far
        steps = []
        for index, nodes in enumerate(tests):
            below = (parents[:, nodes] == node[:, None]) & (proposal.tokens[:, nodes] >= 0)
            tested = below.any(1) & call.rows.active
            child = nodes[below.long().argmax(1)]
            token = proposal.tokens.gather(1, child[:, None])[:, 0].clamp_min(0)
            q = self._sampled_from(proposal, child)
            if proposal.kind == "without_replacement":
                q = q.masked_fill(rejected, 0)
                q = q / q.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
            p = torch.where((tested & fresh)[:, None], self.followed(p, q), p)
            depth = depths.expand(call.batch, -1).gather(1, child[:, None])[:, 0] - 1
            position = call.rows.length + depth
            odds = self.odds(
                Candidate(
                    p=p, q=q, token=token, depth=depth, position=position, adapter=call.plan.adapter
                )
            )
            keep = tested & passes(draws[:, index], *odds)
            stay = tested & ~keep
            p = torch.where(stay[:, None], residual(p, q), p)
            rejected = rejected.scatter(
                1, token[:, None], rejected.gather(1, token[:, None]) | stay[:, None]
            )
            rejected = rejected & ~keep[:, None]
            fresh = keep | (fresh & ~tested)
            if target.vectorised or bool(keep.any()):  # unknown processors run at kept nodes alone
                ahead = target.at(torch.where(keep, child + 1, -1)).softmax(-1)
                p = torch.where(keep[:, None], ahead, p)
            node = torch.where(keep, child, node)
            steps.append(torch.where(keep, child, -1))
        return *_aligned(steps, proposal), p

    @staticmethod
    def _draws(call: Call, count: int) -> Tensor:
        """Gumbel draws, one a test, ``(B, count)``."""
        positions = call.rows.length[:, None] + torch.arange(count, device=call.device)
        return call.request.noise.gumbel(positions, Role.ACCEPT, 1, trial=call.rows.rounds)[..., 0]

    @staticmethod
    def _sampled_from(proposal: Proposal, node: Tensor | None = None) -> Tensor:
        """The distribution q of all nodes, ``(B, N, V)``, or of one per row, ``(B, V)``."""
        assert proposal.log_q is not None
        rows = proposal.log_q if node is None else _at(proposal.log_q, node)
        return rows.softmax(-1)


class Relaxed(Rejection):
    """A test that keeps more than the exact one; a subclass overrides `odds`.

    After a rejection the next token is sampled from the residual of the exact rule. If every token
    is kept at least as often as by the exact test, no choice of residual brings the output
    distribution closer to p: its total variation equals the excess mass of the accepted tokens.

    Guarantee: lossy; the output moves from the model's distribution towards the draft's. Tokens
    that were not sampled are taken too: q is then one-hot, and the exact test keeps x with
    probability p(x).
    """

    guarantee = "lossy"
    kinds: tuple[Kind, ...] = ("without_replacement", "iid", "deterministic")

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """See `mmdecode.engine.contracts.AcceptanceRule`."""
        if proposal.log_q is None:
            tokens = proposal.tokens.clamp_min(0)[..., None]
            vocab = target.raw().shape[-1]
            certain = target.raw().new_full((*proposal.tokens.shape, vocab), -torch.inf)
            proposal = replace(proposal, log_q=certain.scatter_(2, tokens, 0.0))
        return super().__call__(proposal, target, call)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Inputs of an acceptance test.

    Attributes:
        p: The distribution to follow, after earlier siblings were rejected, ``(..., V)``.
        q: The distribution that the token was sampled from, without earlier siblings, ``(..., V)``.
        token: The token, ``(...)``.
        depth: Nodes between the root and the token, ``(...)``: 0 for the first drafted one.
        position: Index of the token among the generated ones of its row, ``(...)``.
        adapter: Adapter of the main model, for the codes and the grid of an image.
    """

    p: Tensor
    q: Tensor
    token: Tensor
    depth: Tensor
    position: Tensor
    adapter: Any


def at_token(probs: Tensor, token: Tensor) -> Tensor:
    """Probabilities ``(..., V)`` at one token each, ``(...)``."""
    return probs.gather(-1, token[..., None])[..., 0]


def _at(rows: Tensor, node: Tensor) -> Tensor:
    """``(B, N, V)`` at one node per row, ``(B, V)``."""
    return rows.gather(1, node[:, None, None].expand(-1, 1, rows.shape[-1]))[:, 0]


def _aligned(steps: list[Tensor], proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Kept nodes in order, left-aligned, padded with -1; and how many: a test may keep none."""
    if not steps:
        return proposal.tokens, proposal.tokens.new_zeros(len(proposal.tokens))
    kept = torch.stack(steps, 1)  # (B, tests), rising where not -1
    count = (kept >= 0).sum(1)
    deepest = proposal.size if proposal.tree is None else proposal.tree.depth
    path = torch.where(kept >= 0, kept, proposal.size).sort(1).values[:, :deepest]
    return path.masked_fill(path == proposal.size, -1), count


@lru_cache(maxsize=256)
def _tests(tree: Tree | None, size: int, device: torch.device) -> list[Tensor]:
    """Nodes in the order of the tests; each test has at most one node on a row's path.

    In a shared tree these are the first children of all nodes of a depth, then the second ones, and
    so on. Where rows have different trees, nodes are tested one after the other.
    """
    if tree is None:
        return [torch.tensor([node], device=device) for node in range(size)]
    groups: dict[tuple[int, int], list[int]] = {}
    for node, parent in enumerate(tree.parents):
        elder = tree.parents[:node].count(parent)
        groups.setdefault((tree.depths[node], elder), []).append(node)
    return [torch.tensor(groups[key], device=device) for key in sorted(groups)]
