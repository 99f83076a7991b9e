"""Draft-length control: limit another drafter to the depth that measured fastest, or switch it off.

Each call runs with one depth. Tokens and seconds are counted over the whole call, including the
drafter's work once per call. The next call takes the depth with the highest optimistic speed: the
measured speed plus a share of it that falls with the root of n, the number of calls measured.
Measurements fade, so that n falls too and every depth is tried again, a slow one seldom: texts and
loads change. At depth 0 the drafter does nothing, so that one that would lose costs only trials.

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
"""A round longer than this many median rounds is cut to it: something else held it up."""


@dataclass
class Depth:
    """Measurements at one depth; all but ``levels`` fade.

    Attributes:
        levels: Levels that the drafter may propose; ``None``: no limit.
        calls: Calls in which it was measured; a call without a scoring pass does not count.
        tokens: Tokens per row in these calls, without the first of a call, which costs no pass.
        seconds: Duration of these calls.
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
    """Wraps a drafter and chooses its depth from call to call, separately for each batch size.

    Args:
        draft: The drafter, or its name with options.
        depths: Numbers of levels to choose from; ``None`` sets no limit, 0 switches drafting off.
            ``(None,)`` is neutral.
        memory: Calls after which a measurement has faded to about a third.
        exploration: Share by which the speed of a depth measured in one call may be off. Larger
            values try other depths more often; at 0 the fastest so far stays until it is slower.
        any_rule: Choose depths under every rule. Off by default, because only the greedy and the
            coupled rule generate the same tokens whatever is drafted; under others the sample for a
            seed, though not its distribution, would depend on measured times.

    Lossless under every exact rule. Nothing is read from the device during a call. Calls should
    have similar inputs. Batch sizes are grouped by the next power of two, since the cost of a wider
    pass depends on the number of rows. The clock is read in each round, so that whole rounds are
    not captured, even if the drafter is ``graph_safe``.
    """

    summary = "another drafter, cut to the depth that measured fastest, or switched off"
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
        self._lock = Lock()  # guards all attributes below
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
        """Internals that the drafter needs."""
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
        """Measurements of each depth at the last call's batch size, including that call."""
        with self._lock:
            self._read()
            return self._of_size(self._size)

    def _of_size(self, rows: int) -> list[Depth]:
        """Measurements for a batch of ``rows`` rows, grouped by the next power of two."""
        size = 1 << (rows - 1).bit_length()
        return self._by_size.setdefault(size, [Depth(levels) for levels in self._depths])

    def _note(self, call: Measured) -> None:
        """Keeps a call's times; they are evaluated when the next call begins."""
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
                # the last interval is no round: it is the end of the call
                longest = STALL * statistics.median(gaps[1:-1])
                call.depth.calls += 1
                call.depth.tokens += tokens / passes * (len(gaps) - 2)
                call.depth.seconds += gaps[0] + sum(min(gap, longest) for gap in gaps[1:])
        self._unread = []

    def _choose(self, rows: int) -> Depth:
        """The depth with the highest optimistic speed; depths never measured come first."""
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
        depth: Depth of the call; ``None``: it was not chosen by measurement.
        length: Tokens of its rows, ``(B,)``.
        rounds: Rounds of its rows, ``(B,)``.
        times: Clock at its start, at every round and at its end, in seconds.
    """

    depth: Depth | None
    length: Tensor
    rounds: Tensor
    times: list[float]


class AdaptiveSession(DraftSession):
    """A session of another drafter, limited to one depth and timed.

    Args:
        call: The call.
        inner: Session of the drafter.
        depth: The chosen depth; ``None``: no limit.
        began: Clock when it was opened.
        note: Called with the times at the end.
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
        """The drafter's proposal, without levels beyond the depth."""
        if self.depth is None or self.depth.levels is None:
            return self.inner.propose(budget)
        levels = min(budget, self.depth.levels)
        proposal = self.inner.propose(levels)  # a fixed tree may ignore the limit
        return proposal.masked(proposal.structure()[1] <= levels)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Notes the time, and passes the round on."""
        self.times.append(time.perf_counter())
        self.inner.observe(proposal, output, block)

    def close(self) -> None:
        """Reports the times."""
        times, rows = [*self.times, time.perf_counter()], self.call.rows
        self.inner.close()
        if len(times) > 2:
            self.note(Measured(self.depth, rows.length, rows.rounds, times))
