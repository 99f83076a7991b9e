"""Functions that acceptance rules share: they find the accepted path in a tree of drafted tokens.

A node is a drafted token in the tree. The root is the last committed token; it is not a node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import Outcome
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Proposal, root_depth
from mmdecode.engine.target_logits import TargetLogits

if TYPE_CHECKING:
    from torch import Tensor


def deepest_path(accepted: Tensor, proposal: Proposal) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the longest path of accepted nodes from the root; of equally long ones the first.

    Args:
        accepted: Whether each node passes the test, ``(B, N)``; all nodes of a path must pass.
        proposal: The tree of drafted tokens.

    Returns:
        Indices of the path's nodes, ``(B, D)``, padded with -1; their number, ``(B,)``; and the
        index into the scores ``(B, N + 1, V)`` of the path's last node, ``(B,)``, 0 for the root.
    """
    batch, nodes = accepted.shape
    if proposal.is_chain or not nodes:
        count = accepted.long().cumprod(1).sum(1)
        order = torch.arange(nodes, device=accepted.device)
        return torch.where(order < count[:, None], order, -1), count, count
    _, depths, ancestors = proposal.structure()
    deepest = proposal.deepest
    above = ancestors[:, 1:, 1:]
    whole = ~(above & ~accepted[:, None]).any(-1)
    count, end = (whole * depths).max(1)
    end_row = torch.where(count > 0, end + 1, 0)
    on_path = ancestors.expand(batch, -1, -1).gather(
        1, end_row[:, None, None].expand(-1, 1, nodes + 1)
    )[:, 0, 1:]
    order = torch.arange(nodes, device=accepted.device).expand(batch, -1)
    index = torch.where(on_path, depths - 1, deepest)
    path = order.new_full((batch, deepest + 1), -1).scatter_(1, index, order)[:, :deepest]
    return path, count, end_row


Choose = Callable[["Tensor", "Tensor"], "Tensor"]
"""Maps scores ``(B, R, V)`` and the depths of their nodes ``(1 or B, R)`` to tokens ``(B, R)``."""


def best(scores: Tensor, depths: Tensor) -> Tensor:
    """Returns the argmax, the target's token in greedy decoding; ties go to the lowest id."""
    return scores.argmax(-1)


def keyed(
    call: Call, role: Role, trial: Tensor | None = None, deepest: int | None = None
) -> Choose:
    """Returns a function that draws Gumbel-max samples with noise that depends on the position.

    Args:
        call: The call.
        role: Purpose of the draws.
        trial: See `mmdecode.engine.noise.Noise.gumbel`.
        deepest: Depth of the deepest node, if it is known: nodes of one depth share their draws.
    """

    def choose(scores: Tensor, depths: Tensor) -> Tensor:
        begin = call.rows.length[:, None]
        if deepest is None or deepest + 1 >= scores.shape[1]:
            return call.request.noise.sample(scores, begin + depths, role, trial)
        order = torch.arange(deepest + 1, device=call.device)
        return call.request.noise.sample(scores, begin + order, role, trial, depths)

    return choose


def follow(proposal: Proposal, target: TargetLogits, call: Call, choose: Choose) -> Outcome:
    """Keeps drafted tokens while they equal the target's choice; that choice is the next token."""
    if not target.vectorised:
        return _follow_lazily(proposal, target, call, choose)
    if not proposal.size:
        chosen = target.choices(choose, root_depth(call.device))
        return Outcome(
            path=proposal.tokens,
            num_accepted=torch.zeros_like(call.rows.length),
            next_token=chosen[:, 0],
            choices=chosen,
        )
    parents, depths, _ = proposal.structure()
    choices = target.choices(choose, torch.nn.functional.pad(depths, (1, 0)))  # (B, N + 1)
    wanted = choices.gather(1, (parents + 1).expand(call.batch, -1))
    path, count, end = deepest_path(proposal.tokens == wanted, proposal)
    decided = choices.gather(1, end[:, None])[:, 0]
    return Outcome(path=path, num_accepted=count, next_token=decided, choices=choices)


def _follow_lazily(proposal: Proposal, target: TargetLogits, call: Call, choose: Choose) -> Outcome:
    parents, _, _ = proposal.structure()
    parents = parents.expand(call.batch, -1)
    node = torch.full_like(call.rows.length, -1)  # the root
    going = call.rows.active.clone()
    next_token, steps = torch.full_like(node, -1), []
    for depth in range(proposal.size + 1):
        scores = target.at(torch.where(going, node + 1, -1))
        choice = choose(scores[:, None], torch.full_like(node, depth)[:1, None])[:, 0]
        next_token = torch.where(going, choice, next_token)
        child = (parents == node[:, None]) & (proposal.tokens == choice[:, None])
        going = going & child.any(1)
        if not bool(going.any()):
            break
        node = torch.where(going, child.long().argmax(1), node)
        steps.append(torch.where(going, node, -1))
    path = torch.stack(steps, 1) if steps else node.new_zeros((call.batch, 0))
    return Outcome(path=path, num_accepted=(path >= 0).sum(1), next_token=next_token)


def keep_likely(
    proposal: Proposal,
    target: TargetLogits,
    call: Call,
    choose: Choose,
    test: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Outcome:
    """Keeps the longest path whose tokens all pass a test; of equally long ones the most likely.

    Args:
        proposal: The tree of drafted tokens.
        target: The target distribution at the nodes. Logits processors of an unknown type are run
            only after nodes that pass.
        call: The generation call.
        choose: Function that chooses the token after the path.
        test: Function of the unnormalised log-probabilities before each node ``(B, R, V)``, the
            node's token ``(B, R)`` and the depth of its parent ``(B, R)``; returns whether the node
            passes, ``(B, R)``.
    """
    parents, depths, ancestors = proposal.structure()
    parents, depths = parents.expand(call.batch, -1), depths.expand(call.batch, -1)
    tokens, used = proposal.tokens.clamp_min(0), proposal.tokens >= 0

    def judged(scores: Tensor, nodes: slice) -> tuple[Tensor, Tensor]:
        passes = test(scores, tokens[:, nodes], depths[:, nodes] - 1) & used[:, nodes]
        gain = scores.gather(2, tokens[:, nodes, None])[..., 0] - scores.logsumexp(-1)
        return passes, gain

    if not proposal.size:
        whole, total = used, tokens.float()
    elif target.vectorised:
        rows = target.all()
        index = (parents + 1)[..., None].expand(-1, -1, rows.shape[-1])
        passes, gain = judged(rows.gather(1, index), slice(None))
        above = ancestors[:, 1:, 1:]
        whole = ~(above & ~passes[:, None]).any(-1)
        total = (above * gain.clamp_min(-1e30)[:, None]).sum(-1)
    else:
        reached, sums = (
            [call.rows.active],
            [torch.zeros_like(call.rows.length).float()],
        )  # the root first
        for node in range(proposal.size):
            parent = parents[:, node, None] + 1
            below = torch.stack(reached, 1).gather(1, parent)[:, 0] & used[:, node]
            scores = target.at(torch.where(below, parent[:, 0], -1))[:, None]
            passes, gain = judged(scores, slice(node, node + 1))
            reached.append(below & passes[:, 0])
            sums.append(torch.stack(sums, 1).gather(1, parent)[:, 0] + gain[:, 0])
        whole, total = torch.stack(reached[1:], 1), torch.stack(sums[1:], 1)
    if proposal.size:
        deepest = (whole * depths).amax(1, keepdim=True)
        rank = total.masked_fill(~(whole & (depths == deepest)), -torch.inf)
        order = torch.arange(proposal.size, device=tokens.device)
        end = (order == rank.argmax(1, keepdim=True)) & whole
        whole = (ancestors[:, 1:, 1:] & end[..., None]).any(1)
    path, count, last = deepest_path(whole, proposal)
    scores = target.at(torch.where(call.rows.active, last, -1))[:, None]
    return Outcome(path=path, num_accepted=count, next_token=choose(scores, count[:, None])[:, 0])
