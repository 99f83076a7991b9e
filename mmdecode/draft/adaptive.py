"""Draft-length control: limits another drafter to the depth that measured fastest.

Each generation call uses one depth, the maximum number of levels in the draft tree. Tokens and
seconds are measured over the whole call, including what the drafter does once per call. The next
call uses the depth with the highest upper confidence bound: the measured speed v in tokens per
second plus v * exploration / sqrt(n), with n the number of calls measured at that depth. Old
measurements decay exponentially, n included, so every depth is tried again from time to time,
because texts and machine loads change; slow depths are tried rarely. At depth 0 nothing is drafted,
so a drafter that would slow decoding down is only used in these trials.

Sources: Liu et al. 2024 (SmartSpec), arXiv:2406.14066, section 4, for goodput as the objective
instead of acceptance; here it is measured, not predicted by a model of step times. The choice is
discounted UCB, Garivier and Moulines 2011, arXiv:0805.3415, with 1 / sqrt(n) alone as the bonus.
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
"""Rounds longer than this many median rounds count as this long: other work delayed them."""


@dataclass
class Depth:
    """Measurements at one depth; all except ``levels`` decay from call to call.

    Attributes:
        levels: Maximum number of tree levels that the drafter may propose; ``None``: no limit.
        calls: Number of calls measured; calls without a verification pass do not count.
        tokens: Tokens per row in these calls, without each call's first token, which the prompt's
            pass yields.
        seconds: Total duration of these calls.
    """

    levels: int | None
    calls: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Returns tokens per row and second; 0 before anything was measured."""
        return self.tokens / self.seconds if self.calls else 0.0


class Adaptive(Drafter):
    """Wraps a drafter and chooses its depth from call to call, separately for each batch size.

    Args:
        draft: The drafter, or its name with options.
        depths: Maximum numbers of tree levels to choose from; ``None`` sets no limit, 0 switches
            drafting off. With ``(None,)`` the wrapped drafter is never limited.
        memory: Number of calls after which the weight of a measurement has decayed to 1/e.
        exploration: Width of the confidence bound after one call, as a share of the speed. Larger
            values try other depths more often; with 0 the fastest depth is always chosen.
        any_rule: Whether depths are chosen under every acceptance rule. Off by default: only the
            greedy and the coupled rule generate the same tokens with any draft; under others the
            sample for a seed, though not its distribution, would depend on measured times.

    Lossless under every exact acceptance rule. Measuring does not synchronise with the device.
    Calls should have similar inputs. Batch sizes are grouped by the next power of two, since the
    cost of a wider pass depends on the number of rows. The host's clock is read in each round, so
    rounds are not captured as CUDA graphs, even if the wrapped drafter would allow it.
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
        self.capabilities = replace(self.draft.capabilities, graph_safe=False, repeatable=False)
        self._lock = Lock()  # guards all attributes below
        self._by_size: dict[int, list[Depth]] = {}
        self._size = 1  # rows of the last call
        self._unread: list[Measured] = []
        self._warm = False

    @classmethod
    def from_options(
        cls,
        draft: str,
        memory: int = 100,
        model_id: str | None = None,
        target: Any = None,
        tokenizer: Any = None,
    ) -> Adaptive:
        """Builds the drafter from a string's options, for example ``adaptive:draft=medusa``.

        The wrapped drafter may have one option, as in ``adaptive:draft=lookup:length=8``: a comma
        begins the next option of ``adaptive``. To set more, build the wrapped drafter in Python.
        ``model_id``, ``target`` and ``tokenizer`` are passed to the wrapped drafter.
        """
        known = {"model_id": model_id, "target": target, "tokenizer": tokenizer}
        inner = registry.create("draft", draft, **known)
        return cls(inner, memory=memory)

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns the model internals that the wrapped drafter needs."""
        return self.draft.needs(adapter)

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Chooses the depth of this call and opens a session of the wrapped drafter."""
        began, depth = time.perf_counter(), None
        if self.any_rule or call.plan.drafter_invariant:
            depth = self._choose(call.batch)
        off = depth is not None and depth.levels == 0
        inner = DraftSession(call) if off else self.draft.begin(call, prefill)
        return AdaptiveSession(call, inner, depth, began, self._note)

    @property
    def measured(self) -> list[Depth]:
        """Returns the measurements of each depth at the batch size of the last call."""
        with self._lock:
            self._read()
            return self._of_size(self._size)

    def _of_size(self, rows: int) -> list[Depth]:
        """Returns the measurements for ``rows`` rows, grouped by the next power of two."""
        size = 1 << (rows - 1).bit_length()
        return self._by_size.setdefault(size, [Depth(levels) for levels in self._depths])

    def _note(self, call: Measured) -> None:
        """Stores the times of a call; they are evaluated when the next call begins."""
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
        """Returns the depth with the highest confidence bound; unmeasured depths come first."""
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
    """Clock times, tokens and rounds of one generation call.

    Attributes:
        depth: Depth of the call; ``None``: no depth was chosen, the drafter was not limited.
        length: Number of generated tokens of each row, ``(B,)``.
        rounds: Number of rounds of each row, ``(B,)``.
        times: Clock times in seconds: at the start, after every round and at the end.
    """

    depth: Depth | None
    length: Tensor
    rounds: Tensor
    times: list[float]


class AdaptiveSession(DraftSession):
    """A session of another drafter, limited to one depth and timed.

    Args:
        call: The generation call.
        inner: Session of the wrapped drafter.
        depth: The chosen depth; ``None``: no limit.
        began: Clock time at which the session was opened, in seconds.
        note: Function that is called with the measurements when the call ends.
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
        self.unguided, self.paths = inner.unguided, inner.paths
        self.times = [began]

    def propose(self, budget: int) -> Proposal:
        """Returns the wrapped drafter's proposal, without levels beyond the chosen depth."""
        if self.depth is None or self.depth.levels is None:
            return self.inner.propose(budget)
        levels = min(budget, self.depth.levels)
        proposal = self.inner.propose(levels)  # a fixed tree may ignore the limit
        return proposal.masked(proposal.structure()[1] <= levels)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Records the clock time, and passes the round to the wrapped session."""
        self.times.append(time.perf_counter())
        self.inner.observe(proposal, output, block)

    def close(self) -> None:
        """Closes the wrapped session and reports the measured times."""
        times, rows = [*self.times, time.perf_counter()], self.call.rows
        self.inner.close()
        if len(times) > 2:
            self.note(Measured(self.depth, rows.length, rows.rounds, times))
