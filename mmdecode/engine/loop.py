"""START HERE: the one decoding loop of this library.

Each round a drafter proposes a tree of tokens after the last committed one, the root. One forward
pass scores root and nodes in every branch. A guide combines the branches into the target
distribution. A rule accepts a path and decides the token after it. Stop rules cut that block.

One transfer a round brings the state to the host. It stays outside of what a CUDA graph replays,
and the next proposal is made before it, so that its width comes with the same transfer.

Read on: `contracts` (drafters, guides, rules and what they exchange), `proposal` (trees of tokens),
`branches` (one forward pass over root and nodes), `target_logits` (the caller's processors at every
node), `stop` (where a block is cut), `noise` (why a seed gives the same tokens with and without a
draft). `mmdecode.decoder` makes the parts of a call from names and objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmdecode.engine import capture, checks, host, window
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import (
    AcceptanceRule,
    Block,
    BranchOutput,
    BranchRunner,
    Drafter,
    DraftSession,
    Guide,
    Outcome,
)
from mmdecode.engine.output import Committed, Listener, TargetScores
from mmdecode.engine.processors import Processors
from mmdecode.engine.proposal import MAX_NODES, Proposal, width_bucket
from mmdecode.engine.runners import main_output, main_runner, without_replaced
from mmdecode.engine.stats import Stats
from mmdecode.engine.stop import Stopping
from mmdecode.engine.target_logits import TargetLogits
from mmdecode.engine.trace import NoTrace


class RoundResult(NamedTuple):
    """Result of a round, on the device.

    Attributes:
        proposal: The next proposal.
        counts: Counts for `Stats.scored`, ``(B, 4)``.
        sync_vector: Numbers for the host, see `Run.sync_vector`, ``(4,)`` or a list.
    """

    proposal: Proposal
    counts: Tensor
    sync_vector: Tensor | list[int]


class HostState(NamedTuple):
    """Host state after a round: number of active rows, length of the longest, the next proposal."""

    active: int
    cur_len: int
    proposal: Proposal


@dataclass
class Run:
    """One call of a decoder: its parts and its state.

    Attributes:
        call: The call, which every part is given.
        drafter: Opens the session that proposes tokens.
        guide: Makes the target distribution; ``None``: the model's own is the target.
        rule: Decides how much of a proposal is kept.
        runners: Runners of the branches, by stage.
        processors: The caller's logits processors and warpers.
        stopping: The caller's stop rules.
        stats: Counters.
        listeners: Called with every committed block.
        trace: Called with every scoring pass; returns the details to keep.
        session: The drafter's session; ``None`` until the first token is decided.
        constants: Result of the guide's ``begin``.
        shortest: Tokens of the shortest active row at the last transfer; a host number.
    """

    call: Call
    drafter: Drafter
    guide: Guide | None
    rule: AcceptanceRule
    runners: list[BranchRunner]
    processors: Processors
    stopping: Stopping
    stats: Stats
    listeners: Sequence[Listener] = ()
    trace: NoTrace = field(default_factory=NoTrace)
    session: DraftSession | None = None
    constants: Any = None
    shortest: int = 0

    def run(self) -> int:
        """Decodes every row to its end; returns the number of tokens of the longest."""
        runners = list(self.runners)  # some serve the prefill alone
        try:
            state = self.sync(self.prefill(), self.stats.prefilled)
            step = self.step()
            while state.active:
                state = self.sync(step(state.proposal), self.stats.scored)
        finally:
            self.stats.ran([*runners, self.processors, self.session])
            if self.session is not None:
                self.session.close()
        return state.cur_len

    def round(self, proposal: Proposal) -> RoundResult:
        """Scores root and nodes, and finishes the round."""
        return self.finish_round(proposal, self.score(proposal))

    def finish_round(self, proposal: Proposal, scores: TargetScores) -> RoundResult:
        """Accepts a path, commits it up to where stop rules cut, and makes the next proposal."""
        parts = self.call, proposal, self.processors
        target = TargetLogits(scores.logits, *parts, scores.main.argmax)
        outcome = self.accept(proposal, target)
        block = self.commit(proposal, scores, target, outcome)
        if self.session is None:
            self.session = self.begin(scores.main)
            if self.session.unguided is not None:
                self.stats.unguided.add(self.session.unguided)
        self.session.observe(proposal, scores.main, block)
        return self.propose(block)

    def prefill(self) -> RoundResult:
        """Round 0: reads the prompt and decides the first token; nothing was drafted."""
        call = self.call
        outputs: dict[str, BranchOutput] = {}
        for runner in self.runners:
            outputs |= runner.prefill(call, outputs)
        if self.guide:
            self.constants = self.guide.begin(call, outputs)
            self.runners = without_replaced(self.runners, self.guide, outputs)
        target = replace(call.plan.draft_target, constants=self.constants)
        plan = replace(call.plan, main=main_runner(self.runners), draft_target=target)
        self.call = replace(call, plan=plan)
        self.stats.calls += 1
        nothing = Proposal.empty(call.batch, call.device)
        return self.finish_round(nothing, self.guided(nothing, outputs))

    def begin(self, main: BranchOutput) -> DraftSession:
        """Opens the drafter's session; where nothing is left to draft, an empty one."""
        if self.call.request.max_new_tokens == 1 or self.seen_to_end():
            return DraftSession(self.call)
        return checks.refuse_no_session(self.drafter, self.drafter.begin(self.call, main))

    def step(self) -> Callable[[Proposal], RoundResult]:
        """`round`, or a function that replays captured rounds."""
        captured = self.call.plan.static_shapes and capture.available(self.call.device)
        return capture.step(self) if captured else self.round

    def score(self, proposal: Proposal) -> TargetScores:
        """Runs the branches over root and nodes, stage by stage, and the guide on their outputs."""
        outputs: dict[str, BranchOutput] = {}
        for runner in self.runners:
            outputs |= runner.score(self.call, proposal, outputs)
        return self.guided(proposal, outputs)

    def guided(self, proposal: Proposal, outputs: Mapping[str, BranchOutput]) -> TargetScores:
        """The main branch's outputs, and the guide's combination of all branches."""
        logits = outputs["main"].logits
        if self.guide:
            logits = self.guide.apply(self.constants, self.call, proposal, outputs)
        details = self.trace.details(self.constants, self.call, proposal, outputs, logits)
        return TargetScores(main_output(outputs), logits, details)

    def accept(self, proposal: Proposal, target: TargetLogits) -> Outcome:
        """The accepted path and the token after it; with a Jacobi drafter, its next window too."""
        call = self.call
        outcome = checks.refuse_no_outcome(self.rule, self.rule(proposal, target, call))
        outcome = outcome if call.rows.full else outcome.of_active(call.rows.active)
        if call.plan.window_mode is None:
            return outcome
        return replace(outcome, window=window.continued(outcome, proposal, target, call))

    def commit(
        self, proposal: Proposal, scores: TargetScores, target: TargetLogits, outcome: Outcome
    ) -> Block:
        """Cuts the block where a row ends, writes it, and moves the branches' caches."""
        rows, first = self.call.rows, self.session is None
        tokens, count = outcome.tokens(proposal), outcome.num_accepted + 1
        count = count if rows.full else torch.where(rows.active, count, 0)
        count, ended = self.stopping.cut(self.call, tokens, count)
        block = Block.of(outcome, proposal, tokens, count, ended)
        for listener in self.listeners:
            listener.add(Committed(proposal, scores, target, block, first))
        if not first:
            for runner in self.runners:
                runner.commit(outcome.path, count, proposal.is_chain)
        rows.append(tokens, count, self.call.prompt_length)
        rows.active &= ~ended
        return block

    def propose(self, block: Block) -> RoundResult:
        """The drafter's next proposal, without nodes beyond the row's last token."""
        call, rows, most = self.call, self.call.rows, self.call.request.max_new_tokens
        # levels of tokens that could still be committed: each active row has grown by one at least
        budget = MAX_NODES if call.plan.static_shapes else most - self.shortest - 2
        proposal = Proposal.empty(call.batch, call.device)
        if budget > 0 and not self.seen_to_end():
            assert self.session is not None, "opened in round 0"
            proposal = self.session.propose(min(budget, MAX_NODES))
        if proposal.size:
            checks.refuse_proposal(proposal, call.plan.kind, self.drafter, self.rule)
            _, depths, _ = proposal.structure()
            room = (most - rows.length)[:, None]  # for a node and the token after it
            used = (depths < room) & rows.active[:, None] & (proposal.tokens >= 0)
            proposal = proposal.masked(used)
        return RoundResult(proposal, block.counts(), self.sync_vector(proposal))

    def may_read(self) -> bool:
        """Whether the host can read rows without a transfer."""
        return not self.call.plan.static_shapes and host.may_read(self.call.device)

    def seen_to_end(self) -> bool:
        """Whether no row is active, as far as the host can read without a transfer."""
        return self.may_read() and not any(self.call.rows.active.tolist())

    def sync_vector(self, proposal: Proposal) -> Tensor | list[int]:
        """Active rows, length of the longest and of the shortest active one, nodes in use."""
        rows, most = self.call.rows, self.call.request.max_new_tokens
        width = proposal.width() if proposal.size else None
        if self.may_read():
            lengths, active = rows.length.tolist(), rows.active.tolist()
            shortest = min((n for n, on in zip(lengths, active, strict=True) if on), default=most)
            return [sum(active), max(lengths), shortest, 0 if width is None else int(width)]
        least = torch.where(rows.active, rows.length, most).amin()
        nodes = rows.length.new_zeros(()) if width is None else width
        return torch.stack([rows.active.sum(), rows.length.amax(), least, nodes])

    def sync(self, result: RoundResult, count: Callable[[Tensor], None]) -> HostState:
        """The one transfer of a round; ``count`` is called with its counts."""
        call, vector, static = self.call, result.sync_vector, self.call.plan.static_shapes
        count(result.counts.clone() if static else result.counts)  # a replay overwrites them
        numbers: list[int] = vector.tolist() if isinstance(vector, Tensor) else vector
        active, longest, self.shortest, width = numbers
        rows, most, proposal = call.rows, call.request.max_new_tokens, result.proposal
        rows.cur_len = min(capture.coarse(longest), most) if static else longest
        if not static:  # a captured round holds for rows that end later
            rows.full, rows.even = active == call.batch, longest == self.shortest
        return HostState(active, longest, proposal.narrow(width_bucket(width, proposal.size)))
