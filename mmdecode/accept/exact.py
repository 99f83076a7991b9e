"""Exact rules: the output law is the guided law of the model, whatever is proposed.

Which rule takes which kind of proposal is not a matter of taste: a rule that divides by q needs
the law the token was really drawn from.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmdecode.accept.follow import finish, follow
from mmdecode.engine.contracts import Context, LawView, Outcome
from mmdecode.engine.noise import Noise, Role
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import IncompatibleError

_ANY: tuple[Kind, ...] = ("deterministic", "coupled", "iid", "without_replacement")


class GreedyMatch:
    """Keeps a drafted token if it is the argmax of the law; ties go to the lowest id.

    Law: exact for greedy decoding, for any proposal.
    Source: Stern et al. 2018, arXiv:1811.03115, section 3.
    """

    law: ClassVar[Literal["exact"]] = "exact"
    kinds = _ANY
    modes = frozenset({"greedy"})
    needs_all_nodes = False

    def __call__(self, proposal: Proposal, law: LawView, noise: Noise, ctx: Context) -> Outcome:
        """See `mmdecode.engine.contracts.Accept`."""
        outcome = follow(proposal, law, ctx, lambda scores, depths: scores.argmax(-1))
        return finish(outcome, proposal, law, noise, ctx)


class Coupled:
    """Keeps a drafted token if it is argmax(log pi + G), with Gumbel noise G keyed by position.

    The noise belongs to the position, not to the round, so the sequence is the one that the
    undrafted loop draws with the same seed, for any draft and in any batch.

    Law: exact, for any proposal. A coupled draft (argmax log q + the same G) is accepted with
    probability at least (1 - TV) / (1 + TV).
    Source: Daliri, Musco and Suresh 2024, arXiv:2408.07978 (drafter-invariant coupling).
    """

    law: ClassVar[Literal["exact"]] = "exact"
    kinds: tuple[Kind, ...] = ("coupled", "deterministic", "iid", "without_replacement")
    modes = frozenset({"sample"})
    needs_all_nodes = False

    def __call__(self, proposal: Proposal, law: LawView, noise: Noise, ctx: Context) -> Outcome:
        """See `mmdecode.engine.contracts.Accept`."""

        def choose(scores: Tensor, depths: Tensor) -> Tensor:
            gumbel = noise.gumbel(_positions(proposal, depths, ctx), Role.TARGET, scores.shape[-1])
            return _best(scores, depths, gumbel)

        return finish(follow(proposal, law, ctx, choose), proposal, law, noise, ctx)


class Membership:
    """Draws the token from the law first, and follows the draw while it was drafted.

    Form (a) of one-hot rejection: the same law and acceptance, the probability that the law puts on
    the drafted children, as testing them one after the other.

    Law: exact, for any proposal whose tokens do not depend on the acceptance noise.
    Source: Leviathan et al. 2023, arXiv:2211.17192, with a one-hot q.
    """

    law: ClassVar[Literal["exact"]] = "exact"
    kinds = _ANY
    modes = frozenset({"sample"})
    needs_all_nodes = False

    def __call__(self, proposal: Proposal, law: LawView, noise: Noise, ctx: Context) -> Outcome:
        """See `mmdecode.engine.contracts.Accept`."""

        def choose(scores: Tensor, depths: Tensor) -> Tensor:
            positions = _positions(proposal, depths, ctx)
            gumbel = noise.gumbel(positions, Role.ACCEPT, scores.shape[-1], trial=ctx.rounds)
            return _best(scores, depths, gumbel)

        return finish(follow(proposal, law, ctx, choose), proposal, law, noise, ctx)


class Rejection:
    """Keeps a drafted token with probability min(1, p / q); else draws from the residual.

    Law: exact, if each token of the chain was really drawn from its ``log_q``; acceptance is
    1 - TV(p, q), the best possible for one draft.
    Source: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1 (p target, q draft). Differs from
    common code: the test is ``u q < p``, so that a token of probability zero is never accepted, and
    a residual that vanishes by rounding falls back to p.
    """

    law: ClassVar[Literal["exact"]] = "exact"
    kinds: tuple[Kind, ...] = ("iid",)
    modes = frozenset({"sample"})
    needs_all_nodes = False

    def __call__(self, proposal: Proposal, law: LawView, noise: Noise, ctx: Context) -> Outcome:
        """See `mmdecode.engine.contracts.Accept`."""
        if not proposal.is_chain:
            raise IncompatibleError.between(
                "accept 'rejection'",
                "a tree of sampled tokens",
                "the rule tests one draft per position",
                "propose chains",
            )
        order = torch.arange(proposal.size + 1, device=ctx.device)
        positions = ctx.length[:, None] + order
        uniform = noise.uniform(positions, Role.ACCEPT, trial=ctx.rounds)
        vocab = law.raw().shape[-1]
        q = torch.zeros(ctx.batch, proposal.size + 1, vocab, device=ctx.device)  # zero at the bonus
        if proposal.log_q is not None:
            q[:, :-1] = proposal.log_q.softmax(-1)
        tokens = torch.nn.functional.pad(proposal.tokens, (0, 1), value=-1)
        q = q * (tokens >= 0)[..., None]  # where nothing was drafted, nothing is subtracted
        count = torch.zeros_like(ctx.length)
        going = ctx.open.clone()
        final = torch.zeros_like(q[:, 0])
        for depth in range(proposal.size + 1):
            if not law.vectorised and not bool(going.any()):
                break  # processors of unknown type must not run past the first rejection
            p = law.at(torch.where(going, depth, -1)).softmax(-1)
            token = tokens[:, depth, None].clamp_min(0)
            p_x, q_x = p.gather(1, token)[:, 0], q[:, depth].gather(1, token)[:, 0]
            keep = going & (tokens[:, depth] >= 0) & (uniform[:, depth] * q_x < p_x)
            stopped = going & ~keep
            final = torch.where(stopped[:, None], residual(p, q[:, depth]), final)
            count = count + keep
            going = keep
        gumbel = noise.gumbel(
            (ctx.length + count)[:, None], Role.RESIDUAL, final.shape[-1], trial=ctx.rounds
        )
        path = torch.where(order[:-1] < count[:, None], order[:-1], -1)
        next_token = (final.log() + gumbel[:, 0]).argmax(-1)
        outcome = Outcome(path=path, num_accepted=count, next_token=next_token)
        return finish(outcome, proposal, law, noise, ctx)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What to draw from after a rejection: max(p - q, 0), renormalised; p where nothing is left."""
    excess = (p - q).clamp_min(0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / total.clamp_min(torch.finfo(p.dtype).tiny), p)


def _positions(proposal: Proposal, depths: Tensor, ctx: Context) -> Tensor:
    """Positions of the levels that ``depths`` ask about: nodes of one depth share their noise."""
    if depths.shape[1] == 1:
        return ctx.length[:, None] + depths
    deepest = proposal.size if proposal.tree is None else proposal.tree.depth
    return ctx.length[:, None] + torch.arange(deepest + 1, device=depths.device)


def _best(scores: Tensor, depths: Tensor, gumbel: Tensor) -> Tensor:
    """The argmax of scores plus each row's level of the noise."""
    if gumbel.shape[1] > 1:
        index = depths.expand(len(scores), -1)[..., None].expand(-1, -1, scores.shape[-1])
        gumbel = gumbel.gather(1, index)
    return (scores + gumbel).argmax(-1)
