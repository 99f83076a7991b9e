"""What a Jacobi window keeps behind the first rejection, with the law each token was drawn from.

The pass has scored the whole window. Behind ``next_token`` its tokens were looked at by nobody, so
each may be drawn anew from the law in its place, or be tested on its own: kept with probability
min(1, p / q), else replaced by a draw from the residual. Either way the token is a draw from the
law along the drafted chain, which is what is recorded; a window that keeps tokens converges.

A kept token that kept its old record, or was kept without a test, would bias what is decided with
it later. Behind a tree the chain goes on from first siblings.

Sources: redraw, Teng et al. 2024 (SJD), arXiv:2410.01699, algorithm 1; adaptive, SJD-PAC,
arXiv:2603.18599, and the maximal coupling of arXiv:2510.24211; shared, the Gumbel sharing of the
latter, exact because a place is tested once and its law never depends on its own noise; coupled,
the same with the noise that decides (arXiv:2408.07978).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.contracts import Context, LawView, Outcome
from mmdecode.engine.noise import Noise, Role
from mmdecode.engine.proposal import Proposal, Tree


def with_tail(
    outcome: Outcome,
    proposal: Proposal,
    law: LawView,
    noise: Noise,
    ctx: Context,
    choices: Tensor | None = None,
) -> Outcome:
    """The outcome with `Outcome.tail_tokens` and `Outcome.tail_law`.

    Processors of unknown type are left out of this law, since they may not run past the first
    rejection; a draft may have any recorded law. ``choices`` are the law's own at root and nodes,
    ``(B, N + 1)``, where the rule has drawn them with the noise that decides: the coupled tail.
    """
    rows = law.all() if law.vectorised else law.raw()  # (B, N + 1, V)
    nodes = _first_children(proposal.tree, ctx.device)
    tokens, log_q = proposal.tokens, proposal.log_q
    if nodes is not None:  # the chain of first siblings, M of N nodes
        first = pad(nodes + 1, (1, 0))
        rows = rows[:, first]
        choices = None if choices is None else choices[:, first]
        tokens = tokens[:, nodes]
        log_q = None if log_q is None else log_q[:, nodes]
    size = tokens.shape[1]
    order = torch.arange(size + 1, device=rows.device)
    if choices is not None and (ctx.tail == "coupled" or not ctx.do_sample):
        drawn = choices
    else:
        drawn = _drawn(rows, tokens, log_q, ctx.length[:, None] + order, noise, ctx)
    used = pad(tokens >= 0, (1, 0), value=True)
    source = outcome.num_accepted[:, None] + 1 + order[:size]  # left-align
    real = (source <= size) & ctx.open[:, None]
    source = source.clamp_max(size)
    real = real & used.gather(1, source)
    index = source[..., None].expand(-1, -1, rows.shape[-1])
    return replace(
        outcome,
        tail_tokens=drawn.gather(1, source).masked_fill(~real, -1),
        tail_law=rows.gather(1, index),
    )


def _drawn(
    rows: Tensor,
    tokens: Tensor,
    log_q: Tensor | None,
    positions: Tensor,
    noise: Noise,
    ctx: Context,
) -> Tensor:
    """A token for each of ``rows (B, M + 1, V)``, at ``positions (B, M + 1)``."""
    vocab = rows.shape[-1]
    if not ctx.do_sample:
        return rows.argmax(-1)
    if ctx.tail == "coupled":
        return (rows + noise.gumbel(positions, Role.TARGET, vocab)).argmax(-1)
    if ctx.tail == "shared":
        return (rows + noise.gumbel(positions, Role.DRAFT, vocab)).argmax(-1)
    fresh = noise.gumbel(positions, Role.TAIL, vocab, trial=ctx.rounds)
    if ctx.tail == "redraw" or log_q is None or not tokens.shape[1]:
        return (rows + fresh).argmax(-1)
    p, q = rows[:, :-1].softmax(-1), log_q.softmax(-1)
    used, x = tokens >= 0, tokens.clamp_min(0)[..., None]
    tests = noise.gumbel(positions[:, :-1], Role.ACCEPT, 2, trial=ctx.rounds)[..., 1]
    keep = used & passes(tests, p.gather(2, x)[..., 0], q.gather(2, x)[..., 0])
    left = torch.where(used[..., None], residual(p, q), p).log()
    replaced = (torch.cat([left, rows[:, -1:]], 1) + fresh).argmax(-1)
    return torch.where(pad(keep, (0, 1)), pad(tokens, (0, 1)), replaced)


def passes(gumbel: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Whether u q < p, for u = exp(-E) of exponential draws E = exp(-gumbel)."""
    return (-gumbel).exp() > q.log() - p.log()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What to draw from after a rejection: max(p - q, 0), renormalised; p where nothing is left."""
    excess = (p - q).clamp_min(0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total.clamp_min(torch.finfo(p.dtype).tiny), p)


@lru_cache(maxsize=256)
def _first_children(tree: Tree | None, device: torch.device) -> Tensor | None:
    """The nodes below the root of which each is the first child of the one before; a chain: None.

    Rows with trees of their own keep no tail beyond their order of nodes.
    """
    if tree is None or tree.is_chain:
        return None
    nodes: list[int] = []
    for node, parent in enumerate(tree.parents):
        if parent == (nodes[-1] if nodes else -1):
            nodes.append(node)
    return torch.tensor(nodes, device=device)
