"""Draft-length control: cut another draft to the depth that measured fastest, or switch it off.

Each call runs with one depth. Tokens per round and seconds per round are measured over the call,
and the next call takes the depth with the most tokens per second so far; now and then it tries the
one that was not measured for longest, since texts and loads change. Depth 0 asks the draft for
nothing, so that a draft that would lose costs nothing but these trials.

Source: goodput in place of acceptance, as in Liu et al. 2024 (SmartSpec), arXiv:2406.14066, section
4, by measurement alone and without its model of step times.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmdecode import registry
from mmdecode.engine.contracts import Context, Draft, Needs, Outcome, Scores
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import OptionError


@dataclass
class Depth:
    """What was measured at one depth.

    Attributes:
        levels: Levels that the draft may propose; ``None``: as many as it likes.
        speed: Tokens per row and second, a running mean in which the last call counts a third.
        asked: Number of the call in which it was last used; 0: never. A call of one token measures
            nothing, and counts.
    """

    levels: int | None
    speed: float = 0.0
    asked: int = 0


class Adaptive:
    """Wraps a draft and chooses its depth from call to call.

    Args:
        draft: The draft, or its name with options.
        depths: Levels to choose from; ``None`` leaves the draft as it is, 0 switches it off.
            ``(None,)`` is neutral.
        every: Each so manieth call tries the depth that was not measured for longest.
        sampled: Control the draft under every rule. Off, because only the greedy and the coupled
            rule generate the same tokens whatever is drafted; under others the sample for a seed,
            though not its law, would depend on measured times.

    Lossless under every exact rule. Nothing is read from the device during a call. The calls should
    be alike: of one batch size, and of similar inputs. It looks at a clock in each round, so rounds
    are not captured as wholes, whatever the draft says of its own.
    """

    def __init__(
        self,
        draft: Draft | str,
        depths: Sequence[int | None] = (None, 3, 1, 0),
        every: int = 16,
        sampled: bool = False,
    ) -> None:
        self.draft: Draft = registry.create("draft", draft) if isinstance(draft, str) else draft
        if not depths or any(levels is not None and levels < 0 for levels in depths) or every < 2:
            raise OptionError(
                f"depths={tuple(depths)}, every={every}; expected at least one depth, each None or "
                ">= 0, and every >= 2"
            )
        self._measured = [Depth(levels) for levels in depths]
        self.every, self.sampled = every, sampled
        self.kinds: tuple[Kind, ...] = self.draft.kinds
        self.needs: Needs = self.draft.needs
        self._calls = 0
        self._now: Depth | None = None
        self._times: list[float] = []
        self._end: tuple[Tensor, Tensor] | None = None
        self._last: tuple[Depth, Tensor, Tensor, float] | None = None

    @classmethod
    def from_options(
        cls, draft: str, every: int = 16, model_id: str | None = None, target: Any = None
    ) -> Adaptive:
        """From a string: ``adaptive:draft=medusa``; ``model_id`` and ``target`` go to the draft.

        The draft may have one option, as in ``adaptive:draft=lookup:length=8``, since a comma
        begins an option of this one; with more, build the draft and wrap it in Python.
        """
        return cls(registry.create("draft", draft, model_id=model_id, target=target), every=every)

    def begin(self, ctx: Context, prefill: Scores, kind: Kind) -> None:
        """Chooses the depth of this call."""
        self._now = None
        if self.sampled or ctx.draft_free:
            self._now = self._choose()
        self._times, self._end = [], None
        if not self._off:
            self.draft.begin(ctx, prefill, kind)

    @property
    def _off(self) -> bool:
        return self._now is not None and self._now.levels == 0

    @property
    def measured(self) -> list[Depth]:
        """What is known of each depth, the last call included."""
        if self._last is not None:  # read here, where a call begins, and not where one ends
            now, length, rounds, seconds = self._last
            # round 0 is the prompt's: one token and one round per row that cost no pass
            tokens, passes = int((length - 1).sum()), int((rounds - 1).sum())
            speed = tokens / max(passes, 1) / max(seconds, 1e-9)
            now.speed = now.speed + (speed - now.speed) / 3 if now.speed else speed
            self._last = None
        return self._measured

    def _choose(self) -> Depth:
        """A depth never tried, else the stalest in its turn, else the fastest."""
        measured = self.measured
        self._calls += 1
        stalest = min(measured, key=lambda depth: depth.asked)
        look_around = stalest.asked == 0 or self._calls % self.every == 0
        chosen = stalest if look_around else max(measured, key=lambda depth: depth.speed)
        chosen.asked = self._calls
        return chosen

    def propose(self, ctx: Context, budget: int) -> Proposal:
        """What the draft proposes, without the levels below the depth."""
        if self._now is None or self._now.levels is None:
            return self.draft.propose(ctx, budget)
        if self._off:
            return Proposal.empty(ctx.batch, ctx.device)
        levels = min(budget, self._now.levels)
        proposal = self.draft.propose(ctx, levels)  # a fixed tree may take no notice of the levels
        return proposal.masked(proposal.structure()[1] <= levels)

    def observe(self, ctx: Context, proposal: Proposal, scores: Scores, outcome: Outcome) -> None:
        """Notes the time; the draft learns what it learns."""
        self._times.append(time.perf_counter())
        self._end = (ctx.length, ctx.rounds)
        if not self._off:
            self.draft.observe(ctx, proposal, scores, outcome)

    def reorder(self, rows: Tensor) -> None:
        """Moves the draft's rows."""
        self.draft.reorder(rows)

    def reset(self) -> None:
        """Keeps what was measured, and forgets the call."""
        times = self._times
        if self._now is not None and self._end is not None and len(times) > 1:
            gaps = [after - before for before, after in itertools.pairwise(times)]
            self._last = (self._now, *self._end, statistics.median(gaps))
        self._now, self._end, self._times = None, None, []
        self.draft.reset()
