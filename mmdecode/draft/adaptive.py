"""Draft-length control: cut another draft to the depth that measured fastest, or switch it off.

Each call runs with one depth. Tokens and seconds are counted over the whole call, what a draft does
once per call included, and the next call takes the depth whose speed is highest, given the benefit
of the doubt: a depth that was measured in n calls may be faster than it looks by a share that falls
with the root of n. What is known fades, so that n falls too and every depth is tried again, a bad
one seldom: texts and loads change. Depth 0 asks the draft for nothing, so that a draft that would
lose costs nothing but these trials.

Sources: goodput in place of acceptance, as in Liu et al. 2024 (SmartSpec), arXiv:2406.14066,
section 4, by measurement alone and without its model of step times; the choice is discounted UCB,
Garivier and Moulines 2011, arXiv:0805.3415, with the root of n alone in the bonus.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mmdecode import registry
from mmdecode.engine.adapter import Adapter
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Drafter, Outcome, Requirements
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import OptionError

STALL = 4.0
"""A round that takes longer than so many usual ones was held up by something else."""


@dataclass
class Depth:
    """What was measured at one depth; all but ``levels`` fades.

    Attributes:
        levels: Levels that the draft may propose; ``None``: as many as it likes.
        calls: Calls that it was measured in. One that costs no pass measures nothing.
        tokens: Tokens per row in these calls, without the first of a call, which costs no pass.
        seconds: What they took.
    """

    levels: int | None
    calls: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per row and second; 0 before anything was measured."""
        return self.tokens / self.seconds if self.calls else 0.0


class Adaptive(Drafter):
    """Wraps a draft and chooses its depth from call to call, for each batch size on its own.

    Args:
        draft: The draft, or its name with options.
        depths: Levels to choose from; ``None`` leaves the draft as it is, 0 switches it off.
            ``(None,)`` is neutral.
        memory: Calls after which what was measured has faded to about a third.
        doubt: By what share the speed of a single call may be off. More tries other depths more
            often; at 0 the fastest so far stays until it measures slower.
        sampled: Control the draft under every rule. Off, because only the greedy and the coupled
            rule generate the same tokens whatever is drafted; under others the sample for a seed,
            though not its law, would depend on measured times.

    Lossless under every exact rule. Nothing is read from the device during a call. The calls should
    be alike, of similar inputs; batches count as alike up to the next power of two rows, since what
    a wider pass costs depends on how many there are. It looks at a clock in each round, so rounds
    are not captured as wholes, whatever the draft says of its own.
    """

    summary = "another draft, cut to the depth that measured fastest, or switched off"
    source = "goodput control as in SmartSpec, Liu et al. 2024"

    def __init__(
        self,
        draft: Drafter | str,
        depths: Sequence[int | None] = (None, 3, 1, 0),
        memory: int = 100,
        doubt: float = 0.3,
        sampled: bool = False,
    ) -> None:
        self.draft: Drafter = registry.create("draft", draft) if isinstance(draft, str) else draft
        if not depths or any(levels is not None and levels < 0 for levels in depths):
            raise OptionError(
                f"depths={tuple(depths)}; expected at least one depth, each None or >= 0"
            )
        if memory < 2 or doubt < 0:
            raise OptionError(
                f"memory={memory}, doubt={doubt}; expected memory >= 2 and doubt >= 0"
            )
        self._depths = tuple(depths)
        self._by_size: dict[int, list[Depth]] = {}
        self._measured = self._of_size(1)
        self.memory, self.doubt, self.sampled = memory, doubt, sampled
        self.kinds: tuple[Kind, ...] = self.draft.kinds
        self.needs: Requirements | Callable[[Adapter], Requirements] = self.draft.needs
        self.capabilities = replace(self.draft.capabilities, graph_safe=False)
        self._warm = False
        self._now: Depth | None = None
        self._times: list[float] = []
        self._end: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Depth, Tensor, Tensor, list[float]] | None = None

    @classmethod
    def from_options(
        cls, draft: str, memory: int = 100, model_id: str | None = None, target: Any = None
    ) -> Adaptive:
        """From a string: ``adaptive:draft=medusa``; ``model_id`` and ``target`` go to the draft.

        The draft may have one option, as in ``adaptive:draft=lookup:length=8``, since a comma
        begins an option of this one; with more, build the draft and wrap it in Python.
        """
        inner = registry.create("draft", draft, model_id=model_id, target=target)
        return cls(inner, memory=memory)

    def begin(self, call: Call, prefill: BranchOutput, kind: Kind) -> None:
        """Chooses the depth of this call."""
        self._now, self._measured = None, self._of_size(len(call.rows.length))
        if self.sampled or call.plan.drafter_invariant:
            self._now = self._choose()
        self._times, self._end = [time.perf_counter()], None
        if not self._off:
            self.draft.begin(call, prefill, kind)

    def _of_size(self, rows: int) -> list[Depth]:
        """What was measured with so many rows, up to the next power of two."""
        size = 1 << (rows - 1).bit_length()
        return self._by_size.setdefault(size, [Depth(levels) for levels in self._depths])

    @property
    def _off(self) -> bool:
        return self._now is not None and self._now.levels == 0

    @property
    def measured(self) -> list[Depth]:
        """What is known of each depth at the last call's batch size, that call included."""
        if self._last is not None:  # read here, where a call begins, and not where one ends
            now, length, rounds, gaps = self._last
            # round 0 is the prompt's: one token and one round per row that cost no pass
            tokens, passes = int((length - 1).sum()), int((rounds - 1).sum())
            if passes:
                # the last gap is no round: the draft proposes once more before the end is seen
                longest = STALL * statistics.median(gaps[1:-1])
                now.calls += 1
                now.tokens += tokens / passes * (len(gaps) - 2)
                now.seconds += gaps[0] + sum(min(gap, longest) for gap in gaps[1:])
            self._last = None
        return self._measured

    def _choose(self) -> Depth:
        """The depth that may be the fastest; one that was never measured may be anything."""
        kept = 1 - 1 / self.memory
        for depth in self.measured:
            depth.calls, depth.tokens = depth.calls * kept, depth.tokens * kept
            depth.seconds *= kept

        def hope(depth: Depth) -> float:
            if not depth.calls:
                return math.inf
            return depth.speed * (1 + self.doubt / math.sqrt(depth.calls))

        return max(self._measured, key=hope)

    def propose(self, call: Call, budget: int) -> Proposal:
        """What the draft proposes, without the levels below the depth."""
        if self._now is None or self._now.levels is None:
            return self.draft.propose(call, budget)
        if self._off:
            return Proposal.empty(call.batch, call.device)
        levels = min(budget, self._now.levels)
        proposal = self.draft.propose(call, levels)  # a fixed tree may take no notice of the levels
        return proposal.masked(proposal.structure()[1] <= levels)

    def observe(
        self, call: Call, proposal: Proposal, scores: BranchOutput, outcome: Outcome
    ) -> None:
        """Notes the time; the draft learns what it learns."""
        self._times.append(time.perf_counter())
        self._end = (call.rows.length, call.rows.rounds)
        if not self._off:
            self.draft.observe(call, proposal, scores, outcome)

    def reorder(self, rows: Tensor) -> None:
        """Moves the draft's rows."""
        self.draft.reorder(rows)

    def reset(self) -> None:
        """Keeps what was measured, and forgets the call."""
        times = [*self._times, time.perf_counter()]
        # a first call warms up: memory, kernels and weights are put in their places
        if self._now is not None and self._end is not None and self._warm:
            gaps = [after - before for before, after in itertools.pairwise(times)]
            self._last = (self._now, *self._end, gaps)
        self._warm = self._warm or self._end is not None
        self._now, self._end, self._times = None, None, []
        self.draft.reset()
