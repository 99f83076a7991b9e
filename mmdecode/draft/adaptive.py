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
from threading import Lock
from typing import Any, NamedTuple

from torch import Tensor

from mmdecode import registry
from mmdecode.draft.composed import drafter_of
from mmdecode.engine.adapter import Adapter
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import (
    Block,
    BranchOutput,
    Drafter,
    DraftSession,
    Requirements,
)
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
        exploration: By what share the speed of a single call may be off. More tries other depths
            more often; at 0 the fastest so far stays until it measures slower.
        any_rule: Control the draft under every rule. Off, because only the greedy and the coupled
            rule generate the same tokens whatever is drafted; under others the sample for a seed,
            though not its distribution, would depend on measured times.

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
        exploration: float = 0.3,
        any_rule: bool = False,
    ) -> None:
        self.draft = drafter_of(draft)
        if not depths or any(levels is not None and levels < 0 for levels in depths):
            raise OptionError(
                f"depths={tuple(depths)}; expected at least one depth, each None or >= 0"
            )
        if memory < 2 or exploration < 0:
            raise OptionError(
                f"memory={memory}, exploration={exploration}; expected memory >= 2 and "
                "exploration >= 0"
            )
        self._depths = tuple(depths)
        self.memory, self.exploration, self.any_rule = memory, exploration, any_rule
        self.kinds: tuple[Kind, ...] = self.draft.kinds
        self.capabilities = replace(self.draft.capabilities, graph_safe=False)
        self._lock = Lock()  # of all below
        self._by_size: dict[int, list[Depth]] = {}
        self._size = 1  # rows of the last call
        self._unread: list[Measured] = []
        self._warm = False

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

    def needs(self, adapter: Adapter) -> Requirements:
        """What the draft wants."""
        return self.draft.needs(adapter)

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Chooses the depth of this call."""
        began, depth = time.perf_counter(), None
        if self.any_rule or call.plan.drafter_invariant:
            depth = self._choose(call.batch)
        off = depth is not None and depth.levels == 0
        inner = DraftSession(call) if off else self.draft.begin(call, prefill)
        return AdaptiveSession(call, inner, depth, began, self._note)

    @property
    def measured(self) -> list[Depth]:
        """What is known of each depth at the last call's batch size, that call included."""
        with self._lock:
            self._read()
            return self._of_size(self._size)

    def _of_size(self, rows: int) -> list[Depth]:
        """What was measured with so many rows, up to the next power of two."""
        size = 1 << (rows - 1).bit_length()
        return self._by_size.setdefault(size, [Depth(levels) for levels in self._depths])

    def _note(self, call: Measured) -> None:
        """Keeps a call's times; they are read where another begins, and not where one ends."""
        with self._lock:
            if self._warm and call.depth is not None:
                self._unread.append(call)
            self._warm = True  # a first call warms up: memory, kernels, and weights are placed

    def _read(self) -> None:
        for call in self._unread:
            # round 0 is the prompt's: one token and one round per row that cost no pass
            tokens, passes = int((call.length - 1).sum()), int((call.rounds - 1).sum())
            gaps = [after - before for before, after in itertools.pairwise(call.times)]
            if passes and call.depth is not None:
                # the last gap is no round: what ends a call
                longest = STALL * statistics.median(gaps[1:-1])
                call.depth.calls += 1
                call.depth.tokens += tokens / passes * (len(gaps) - 2)
                call.depth.seconds += gaps[0] + sum(min(gap, longest) for gap in gaps[1:])
        self._unread = []

    def _choose(self, rows: int) -> Depth:
        """The depth that may be the fastest; one that was never measured may be anything."""
        kept = 1 - 1 / self.memory

        def hope(depth: Depth) -> float:
            if not depth.calls:
                return math.inf
            return depth.speed * (1 + self.exploration / math.sqrt(depth.calls))

        with self._lock:
            self._read()
            self._size, depths = rows, self._of_size(rows)
            for depth in depths:
                depth.calls, depth.tokens = depth.calls * kept, depth.tokens * kept
                depth.seconds *= kept
            return max(depths, key=hope)


class Measured(NamedTuple):
    """The times of a call.

    Attributes:
        depth: What it drafted; ``None``: it was not chosen.
        length: Tokens of its rows, ``(B,)``.
        rounds: Rounds of its rows, ``(B,)``.
        times: Of its begin, of every round and of its end, in seconds.
    """

    depth: Depth | None
    length: Tensor
    rounds: Tensor
    times: list[float]


class AdaptiveSession(DraftSession):
    """A session that is cut to one depth, and its times.

    Args:
        call: The call.
        inner: Of the draft.
        depth: Chosen; ``None``: nothing is cut.
        began: When it was opened.
        note: Called with the times in the end.
    """

    def __init__(
        self,
        call: Call,
        inner: DraftSession,
        depth: Depth | None,
        began: float,
        note: Callable[[Measured], None],
    ) -> None:
        super().__init__(call)
        self.inner, self.depth, self.note = inner, depth, note
        self.unguided = inner.unguided
        self.times = [began]

    def propose(self, budget: int) -> Proposal:
        """What the draft proposes, without the levels below the depth."""
        if self.depth is None or self.depth.levels is None:
            return self.inner.propose(budget)
        levels = min(budget, self.depth.levels)
        proposal = self.inner.propose(levels)  # a fixed tree may take no notice of the levels
        return proposal.masked(proposal.structure()[1] <= levels)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Notes the time; the draft learns what it learns."""
        self.times.append(time.perf_counter())
        self.inner.observe(proposal, output, block)

    def close(self) -> None:
        """Hands over the times."""
        times, rows = [*self.times, time.perf_counter()], self.call.rows
        self.inner.close()
        if len(times) > 2:
            self.note(Measured(self.depth, rows.length, rows.rounds, times))
