"""Rejection sampling of drafted chains and trees, which is exact for tokens sampled from q.

The children of a node are tested in the order in which they were sampled. A child x is kept with
probability min(1, p(x) / q(x)). If it is rejected, p becomes the residual norm(max(p - q, 0)), and,
for siblings sampled without replacement, x is removed from q. When all children are rejected, the
next token is sampled from the current p.

Sources: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1 (p target, q draft); several
independent siblings: Miao et al. 2023 (SpecInfer), arXiv:2305.09781, algorithm 2; siblings without
replacement: Jeon et al. 2024 (RSD), arXiv:2402.14160, and Chen et al. 2024 (Sequoia),
arXiv:2402.12374. Differs from common code: the test is ``u q < p`` with u uniform in (0, 1), so a
token with p = 0 is never accepted; and a residual that is zero by rounding is replaced by p.
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
    """Keeps a drafted token with probability min(1, p / q); otherwise samples from the residual.

    Guarantee: exact, if every token was sampled from the proposal's ``log_q`` and siblings are in
    the order of sampling. Siblings of kind ``iid`` must be independent, so repeated samples must
    stay in the proposal. A single drafted token is accepted with the best possible probability,
    1 - TV(p, q).
    """

    summary = "rejection sampling of sampled chains and trees, with the residual distribution"
    source = "Leviathan et al. 2023; SpecInfer, Miao et al. 2023; RSD, Jeon et al. 2024"
    guarantee = "exact"
    kinds: tuple[Kind, ...] = ("without_replacement", "iid")
    modes = frozenset({"sample"})

    def followed(self, p: Tensor, q: Tensor) -> Tensor:
        """Returns the distribution that drafted positions follow, ``(..., V)``: the target's p."""
        return p

    def odds(self, candidate: Candidate) -> tuple[Tensor, Tensor]:
        """Returns both sides of the test, ``(...)`` each; it passes if ``u * second < first``."""
        return at_token(candidate.p, candidate.token), at_token(candidate.q, candidate.token)

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """Applies the rule to a proposal; see `mmdecode.engine.contracts.AcceptanceRule`."""
        walk = self._chain if proposal.is_chain and target.vectorised else self._tree
        path, count, p = walk(proposal, target, call)
        at, rounds = (call.rows.length + count)[:, None], call.rows.rounds
        next_token = call.request.noise.sample(p.log()[:, None], at, Role.RESIDUAL, rounds)[:, 0]
        return Outcome(path=path, num_accepted=count, next_token=next_token)

    def _chain(
        self, proposal: Proposal, target: TargetLogits, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tests a chain at once; returns the path, its length and the next distribution."""
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
        """Tests a tree child by child; unknown logits processors run only after kept nodes."""
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
        """Returns one uniform sample for each of ``count`` tests, float64 ``(B, count)``."""
        positions = call.rows.length[:, None] + torch.arange(count, device=call.device)
        return call.request.noise.uniform(positions, Role.ACCEPT, trial=call.rows.rounds)

    @staticmethod
    def _sampled_from(proposal: Proposal, node: Tensor | None = None) -> Tensor:
        """Returns q at all nodes, ``(B, N, V)``, or at one node per row, ``(B, V)``."""
        assert proposal.log_q is not None
        rows = proposal.log_q if node is None else _at(proposal.log_q, node)
        return rows.softmax(-1)


class Relaxed(Rejection):
    """Base of lossy rules that accept more often than exact rejection; subclasses override `odds`.

    After a rejection the next token is sampled from norm(max(p - q, 0)), as in exact rejection
    sampling. If every token is kept at least as often as by the exact test, no other residual
    brings the output distribution closer to p in total variation.

    Guarantee: lossy; the output moves from the target's distribution towards the draft's. Drafted
    tokens that were not sampled are accepted as input too: their q is one-hot, so the exact test
    keeps a token x with probability p(x).
    """

    guarantee = "lossy"
    kinds: tuple[Kind, ...] = ("without_replacement", "iid", "deterministic")

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """Applies the rule to a proposal; see `mmdecode.engine.contracts.AcceptanceRule`."""
        if proposal.log_q is None:
            tokens = proposal.tokens.clamp_min(0)[..., None]
            vocab = target.raw().shape[-1]
            certain = target.raw().new_full((*proposal.tokens.shape, vocab), -torch.inf)
            proposal = replace(proposal, log_q=certain.scatter_(2, tokens, 0.0))
        return super().__call__(proposal, target, call)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Inputs of the acceptance test of drafted tokens.

    Attributes:
        p: The target distribution, or its residual after rejected siblings, ``(..., V)``.
        q: The distribution that the token was sampled from, ``(..., V)``; siblings that were
            sampled before it without replacement have probability 0.
        token: The drafted token, ``(...)``.
        depth: Number of drafted tokens before it on its path, ``(...)``.
        position: Index of the token among the generated tokens of its row, ``(...)``.
        adapter: Adapter of the target model, which knows the codes and the grid of an image.
    """

    p: Tensor
    q: Tensor
    token: Tensor
    depth: Tensor
    position: Tensor
    adapter: Any


def at_token(probs: Tensor, token: Tensor) -> Tensor:
    """Returns the probabilities of one token per distribution: ``(..., V)`` to ``(...)``."""
    return probs.gather(-1, token[..., None])[..., 0]


def _at(rows: Tensor, node: Tensor) -> Tensor:
    """Selects one node per row: ``(B, N, V)`` to ``(B, V)``."""
    return rows.gather(1, node[:, None, None].expand(-1, 1, rows.shape[-1]))[:, 0]


def _aligned(steps: list[Tensor], proposal: Proposal) -> tuple[Tensor, Tensor]:
    """Returns the nodes kept by the tests, left-aligned and padded with -1, and their number."""
    if not steps:
        return proposal.tokens, proposal.tokens.new_zeros(len(proposal.tokens))
    kept = torch.stack(steps, 1)  # (B, tests), rising where not -1
    count = (kept >= 0).sum(1)
    deepest = proposal.size if proposal.tree is None else proposal.tree.depth
    path = torch.where(kept >= 0, kept, proposal.size).sort(1).values[:, :deepest]
    return path.masked_fill(path == proposal.size, -1), count


@lru_cache(maxsize=256)
def _tests(tree: Tree | None, size: int, device: torch.device) -> list[Tensor]:
    """Groups the nodes of a tree into tests that are run one after the other.

    If all rows share the tree, a test contains the first children of all nodes at one depth, or all
    second children, and so on: at most one of them has its parent on the row's path. If rows have
    different trees (``tree`` is ``None``), every node is a test.
    """
    if tree is None:
        return [torch.tensor([node], device=device) for node in range(size)]
    groups: dict[tuple[int, int], list[int]] = {}
    for node, parent in enumerate(tree.parents):
        elder = tree.parents[:node].count(parent)
        groups.setdefault((tree.depths[node], elder), []).append(node)
    return [torch.tensor(groups[key], device=device) for key in sorted(groups)]
