"""The next window of a Jacobi drafter: tokens from the position after ``next_token`` on.

The pass has scored the whole window. Its tokens after ``next_token`` have not been verified, so
each may be sampled again from the distribution at its position, or be tested on its own: kept with
probability min(1, p / q), else replaced by a sample from the residual. Either way the token is a
sample from the distribution along the drafted chain, which is recorded with it. A window that keeps
tokens converges.

If a token kept the distribution of an earlier round, or were kept without a test, later decisions
would be biased. After a tree, the window is the chain of first siblings.

Sources: redraw, Teng et al. 2024 (SJD), arXiv:2410.01699, algorithm 1; adaptive, SJD-PAC,
arXiv:2603.18599, and the maximal coupling of arXiv:2510.24211; shared, the Gumbel sharing of the
latter, exact because a position is tested once and its distribution never depends on its own noise;
coupled, the same with the noise that decides (arXiv:2408.07978).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import DraftWindow, Outcome
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.engine.sampling import passes, residual
from mmdecode.engine.target_logits import TargetLogits


def continued(
    outcome: Outcome, proposal: Proposal, target: TargetLogits, call: Call
) -> DraftWindow:
    """The window after an outcome, refilled as `Plan.window_mode` says.

    Processors of unknown type are left out of its distribution, since they may not run past the
    first rejection; a drafter may use any distribution as long as it is recorded.
    """
    rows = target.all() if target.vectorised else target.raw()  # (B, N + 1, V)
    nodes = _first_children(proposal.tree, call.device)
    tokens, log_q, choices = proposal.tokens, proposal.log_q, outcome.choices
    if nodes is not None:  # the chain of first siblings, M of N nodes
        first = pad(nodes + 1, (1, 0))
        rows = rows[:, first]
        choices = None if choices is None else choices[:, first]
        tokens = tokens[:, nodes]
        log_q = None if log_q is None else log_q[:, nodes]
    size = tokens.shape[1]
    order = torch.arange(size + 1, device=rows.device)
    if choices is not None and (call.plan.window_mode == "coupled" or not call.request.do_sample):
        sampled = choices
    else:
        sampled = _sampled(rows, tokens, log_q, call.rows.length[:, None] + order, call)
    used = pad(tokens >= 0, (1, 0), value=True)
    source = outcome.num_accepted[:, None] + 1 + order[:size]  # left-align
    real = (source <= size) & call.rows.active[:, None]
    source = source.clamp_max(size)
    real = real & used.gather(1, source)
    index = source[..., None].expand(-1, -1, rows.shape[-1])
    return DraftWindow(
        tokens=sampled.gather(1, source).masked_fill(~real, -1), logits=rows.gather(1, index)
    )


def _sampled(
    rows: Tensor,
    tokens: Tensor,
    log_q: Tensor | None,
    positions: Tensor,
    call: Call,
) -> Tensor:
    """A token sampled from each of ``rows (B, M + 1, V)``, at ``positions (B, M + 1)``."""
    noise = call.request.noise
    if not call.request.do_sample:
        return rows.argmax(-1)
    if call.plan.window_mode == "coupled":
        return noise.sample(rows, positions, Role.TARGET)
    if call.plan.window_mode == "shared":
        return noise.sample(rows, positions, Role.DRAFT)
    trial = call.rows.rounds
    if call.plan.window_mode == "redraw" or log_q is None or not tokens.shape[1]:
        return noise.sample(rows, positions, Role.WINDOW, trial)
    p, q = rows[:, :-1].softmax(-1), log_q.softmax(-1)
    used, x = tokens >= 0, tokens.clamp_min(0)[..., None]
    tests = noise.uniform(positions[:, :-1], Role.WINDOW_ACCEPT, trial)
    keep = used & passes(tests, p.gather(2, x)[..., 0], q.gather(2, x)[..., 0])
    left = torch.where(used[..., None], residual(p, q), p).log()
    left = torch.cat([left, rows[:, -1:]], 1)
    replaced = noise.sample(left, positions, Role.WINDOW, trial)
    return torch.where(pad(keep, (0, 1)), pad(tokens, (0, 1)), replaced)


@lru_cache(maxsize=256)
def _first_children(tree: Tree | None, device: torch.device) -> Tensor | None:
    """The chain of first children from the root; ``None`` if the tree is already a chain.

    For rows with different shapes, ``tree`` is ``None``: nodes are taken in their order.
    """
    if tree is None or tree.is_chain:
        return None
    nodes: list[int] = []
    for node, parent in enumerate(tree.parents):
        if parent == (nodes[-1] if nodes else -1):
            nodes.append(node)
    return torch.tensor(nodes, device=device)
