"""START HERE: the one decoding loop of this library.

Each round a drafter proposes a tree of tokens after the last committed one, the root; one pass
scores root and nodes in every branch; a guide makes the target distribution of them; a rule accepts
a path and decides the token after it; what the stop rules leave of that block is committed.

The host learns of a round by one transfer. It stays outside of what a CUDA graph replays, and the
next proposal is made before it, so that it tells the proposal's width as well.

Read on: `contracts` (what the parts promise), `proposal` (trees of tokens), `branches` (one forward
pass over root and nodes), `target_logits` (the caller's processors at every node), `stop` (where a
block is cut), `noise` (why a seed gives the same tokens with and without a draft).
`mmdecode.decoder` makes the parts of a call from names and objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmdecode.engine import capture, checks, window
from mmdecode.engine.branches import main_output, main_runner, without_replaced
from mmdecode.engine.contracts import (
    AcceptanceRule,
    BranchOutput,
    BranchRunner,
    Context,
    Drafter,
    Guide,
    Outcome,
)
from mmdecode.engine.output import Committed, Listener, TargetScores
from mmdecode.engine.proposal import MAX_NODES, Kind, Proposal
from mmdecode.engine.stats import Stats
from mmdecode.engine.stop import Stopping
from mmdecode.engine.target_logits import Processors, TargetLogits
from mmdecode.engine.trace import NoTrace


class RoundResult(NamedTuple):
    """What a round leaves on the device.

    Attributes:
        proposal: The next one.
        counts: Of `Stats.scored`, ``(B, 4)``.
        sync_vector: What the host must know, see `Run.sync`, ``(4,)``.
    """

    proposal: Proposal
    counts: Tensor
    sync_vector: Tensor


class HostState(NamedTuple):
    """What the host knows after a round: active rows, tokens of the longest, the next proposal."""

    active: int
    cur_len: int
    proposal: Proposal


@dataclass
class Run:
    """One call: its parts, and what they move.

    Attributes:
        ctx: The rows.
        draft: Proposes tokens.
        guide: Makes the target distribution; ``None``: it is the model's.
        rule: Decides how much of a proposal is kept.
        kind: Of the proposals, as agreed between the drafter and the rule.
        runners: Of the branches, by stage.
        processors: The caller's logits processors and warpers.
        stopping: The caller's stop rules.
        stats: Counters.
        listeners: They are shown every committed block.
        trace: Asked for details of every scoring pass.
        constants: The guide's, of this call.
        shortest: Tokens of the shortest active row at the last transfer; a host number.
    """

    ctx: Context
    draft: Drafter
    guide: Guide | None
    rule: AcceptanceRule
    kind: Kind
    runners: list[BranchRunner]
    processors: Processors
    stopping: Stopping
    stats: Stats
    listeners: Sequence[Listener] = ()
    trace: NoTrace = field(default_factory=NoTrace)
    constants: Any = None
    shortest: int = 0

    def run(self) -> int:
        """Decodes every row to its end; returns the tokens of the longest."""
        state = self.sync(self.prefill(), self.stats.prefilled)
        step = self.step()
        while state.active:
            state = self.sync(step(state.proposal), self.stats.scored)
        return state.cur_len

    def round(self, proposal: Proposal) -> RoundResult:
        """Scores root and nodes, and finishes the round."""
        return self.finish_round(proposal, self.score(proposal))

    def finish_round(
        self, proposal: Proposal, target: TargetScores, first: bool = False
    ) -> RoundResult:
        """Accepts a path, commits what the stop rules leave of it, and drafts again."""
        ctx = self.ctx
        law = TargetLogits(target.logits, ctx, proposal, self.processors)
        outcome = self.rule(proposal, law, ctx.noise, ctx).of_active(ctx.open)
        if ctx.window_mode is not None:
            left = window.continued(outcome, proposal, law, ctx.noise, ctx)
            outcome = replace(outcome, window=left)
        counts = self.commit(proposal, target, law, outcome, first)
        self.draft.observe(ctx, proposal, target.main, outcome)
        following = self.propose()
        return RoundResult(following, counts, self.sync_vector(following))

    def prefill(self) -> RoundResult:
        """Round 0: the prompt's last position decides, nothing was drafted."""
        ctx = self.ctx
        scores: dict[str, BranchOutput] = {}
        for runner in self.runners:
            scores |= runner.prefill(ctx, scores)
        if self.guide:
            self.constants = self.guide.begin(ctx, scores)
            self.runners = without_replaced(self.runners, self.guide, scores)
        ctx.branch = main_runner(self.runners)
        nothing = Proposal.empty(ctx.batch, ctx.device)
        target = self.guided(nothing, scores)
        self.draft.begin(ctx, target.main, self.kind)
        self.stats.calls += 1
        return self.finish_round(nothing, target, first=True)

    def step(self) -> Callable[[Proposal], RoundResult]:
        """A round, or what replays captured ones."""
        ctx = self.ctx
        return capture.step(self) if ctx.fixed and capture.available(ctx.device) else self.round

    def score(self, proposal: Proposal) -> TargetScores:
        """Runs the branches over root and nodes, stage by stage, and the guide on their outputs."""
        scores: dict[str, BranchOutput] = {}
        for runner in self.runners:
            scores |= runner.score(self.ctx, proposal, scores)
        return self.guided(proposal, scores)

    def guided(self, proposal: Proposal, scores: Mapping[str, BranchOutput]) -> TargetScores:
        """The main branch's outputs, and what the guide makes of all."""
        logits = scores["main"].logits
        if self.guide:
            logits = self.guide.apply(self.constants, self.ctx, proposal, scores)
        details = self.trace.details(self.constants, self.ctx, proposal, scores, logits)
        return TargetScores(main_output(scores), logits, details)

    def commit(
        self,
        proposal: Proposal,
        target: TargetScores,
        law: TargetLogits,
        outcome: Outcome,
        first: bool,
    ) -> Tensor:
        """Cuts the block where a row ends, writes it, and moves caches; returns `Stats` counts."""
        ctx = self.ctx
        path, accepted = outcome.path, outcome.num_accepted
        order = torch.arange(path.shape[1] + 1, device=ctx.device)
        block = outcome.next_token[:, None]
        if path.shape[1]:
            tokens = torch.nn.functional.pad(proposal.tokens.gather(1, path.clamp_min(0)), (0, 1))
            block = torch.where(order < accepted[:, None], tokens, block)
        count = torch.where(ctx.open, accepted + 1, 0)
        count, ended = self.stopping.cut(ctx, block, count)
        for listener in self.listeners:
            listener.add(Committed(proposal, target, law, outcome, block, count, first))
        columns = ctx.end()[:, None] + order
        kept = order < count[:, None]
        ctx.ids.scatter_(1, columns, torch.where(kept, block, ctx.ids.gather(1, columns)))
        if not first:
            for runner in self.runners:
                runner.keep(path, count, proposal.is_chain)
        drafted = (proposal.tokens >= 0).sum(1)
        counts = torch.stack([ctx.open.long(), drafted, accepted, count], 1)
        # in place: a captured round finds its tensors where they were
        ctx.length += count
        ctx.rounds += ctx.open
        ctx.open &= ~ended
        return counts

    def propose(self) -> Proposal:
        """The drafter's next proposal, without nodes that could not be committed."""
        ctx = self.ctx
        # levels of tokens that could still be committed in some row
        budget = MAX_NODES if ctx.fixed else min(ctx.limit - self.shortest - 1, MAX_NODES)
        proposal = self.draft.propose(ctx, budget)
        if not proposal.size:
            return proposal
        checks.refuse_proposal(proposal, self.kind, self.draft, self.rule)
        _, depths, _ = proposal.structure()
        room = (ctx.limit - ctx.length)[:, None]  # for a node and the token after it
        return proposal.masked((depths < room) & ctx.open[:, None] & (proposal.tokens >= 0))

    def sync_vector(self, proposal: Proposal) -> Tensor:
        """Active rows, length of the longest and of the shortest active one, nodes in use."""
        ctx = self.ctx
        order = torch.arange(1, proposal.size + 1, device=ctx.device)
        width = (
            (order * (proposal.tokens >= 0)).amax() if proposal.size else ctx.length.new_zeros(())
        )
        shortest = torch.where(ctx.open, ctx.length, ctx.limit).amin()
        return torch.stack([ctx.open.sum(), ctx.length.amax(), shortest, width])

    def sync(self, result: RoundResult, count: Callable[[Tensor], None]) -> HostState:
        """The one transfer of a round; ``count`` takes its counts."""
        count(result.counts)
        active, longest, self.shortest, width = result.sync_vector.tolist()
        ctx = self.ctx
        ctx.longest = min(capture.coarse(longest), ctx.limit) if ctx.fixed else longest
        proposal = result.proposal
        return HostState(active, longest, proposal.narrow(width_bucket(width, proposal.size)))


def width_bucket(width: int, size: int) -> int:
    """Nodes to score when the widest row uses ``width`` of ``size``: 0, powers of two, or all."""
    if width == 0:
        return 0
    return min(size, 1 << (width - 1).bit_length())
