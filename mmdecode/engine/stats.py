"""Counters of a decoder, and the rates that follow from them.

Rounds are kept as tensors and added up when a rate is asked for: reading them per round would be a
synchronisation more, adding them up on the device work for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from itertools import zip_longest
from threading import RLock
from typing import Any

import torch
from torch import Tensor


class Stats:
    """What a `Decoder` has done since `reset`; accumulates over calls.

    Attributes:
        calls: Calls of the decoder.
        passes: Scoring passes after the prompt was read, each over the whole batch.
        unguided: Why drafts did not follow the guide, where they might have.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._sums: list[int] = []
        self._counts: list[int] = []
        self.reset()

    def of_call(self) -> Stats:
        """What a call counts by itself, before `merge` adds it."""
        return Stats()

    def merge(self, call: Stats) -> None:
        """Adds what a call has counted, once it has ended; calls may end in several threads."""
        if call is self:
            return
        with self._lock:
            self.calls += call.calls
            self.passes += call.passes
            self.unguided |= call.unguided
            if self._first and call._first and self._first[0].device != call._first[0].device:
                self._reduce()
            self._first += call._first
            self._rounds += call._rounds
            self._sums = [mine + own for mine, own in zip(self._sums, call._sums, strict=True)]
            self._counts = [
                mine + own for mine, own in zip_longest(self._counts, call._counts, fillvalue=0)
            ]
            if len(self._rounds) >= 4096:
                self._reduce()

    def reset(self) -> None:
        """Back to zero."""
        self.calls = self.passes = 0
        self.unguided: set[str] = set()
        self._first: list[Tensor] = []
        self._rounds: list[Tensor] = []
        self._sums = [0, 0, 0, 0, 0]  # first tokens, row passes, drafted, accepted, tokens
        self._counts = []

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """What fails in here is not counted."""
        before = {n: copy(v) for n, v in vars(self).items() if n != "_lock"}
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    def prefilled(self, counts: Tensor) -> None:
        """Round 0 of a call: tokens that no scoring pass was needed for; see `scored`."""
        if self._first and self._first[-1].device != counts.device:
            self._reduce()
        self._first.append(counts)

    def scored(self, counts: Tensor) -> None:
        """One round; nothing is added up before a rate is asked for.

        Args:
            counts: ``(B, 4)``: whether the row took part, tokens proposed, nodes on the accepted
                path, tokens committed after stop rules.
        """
        self.passes += 1
        self._rounds.append(counts.clone())  # a captured round writes the next ones to its place
        if len(self._rounds) >= 4096:
            self._reduce()

    def _reduce(self) -> None:
        with self._lock:
            first, rounds = self._first, self._rounds
            self._first, self._rounds = [], []
            if first:
                self._sums[0] += int(torch.cat(first)[:, 3].sum())
            if rounds:
                self._add(torch.cat(rounds))

    def _add(self, rounds: Tensor) -> None:
        took_part, drafted, accepted, kept = rounds.unbind(1)
        columns = (took_part, drafted * took_part, accepted * took_part, kept)
        for index, value in enumerate(torch.stack(columns).sum(1).tolist()):
            self._sums[index + 1] += value
        for count in torch.where(took_part > 0, accepted, -1).tolist():
            self._counts += [0] * (count + 1 - len(self._counts))
            if count >= 0:
                self._counts[count] += 1

    def _sum(self, index: int) -> int:
        self._reduce()
        return self._sums[index]

    @property
    def tokens(self) -> int:
        """Tokens committed, those of round 0 included."""
        return self._sum(0) + self._sum(4)

    @property
    def rounds(self) -> int:
        """Sum over rows of the rounds each was open for: row passes."""
        return self._sum(1)

    @property
    def drafted(self) -> int:
        """Nodes proposed."""
        return self._sum(2)

    @property
    def accepted(self) -> int:
        """Nodes accepted, before stop rules cut the block."""
        return self._sum(3)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per row pass; prefill excluded, bonus or correction included."""
        return self._sum(4) / max(self.rounds, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed nodes."""
        return self.accepted / max(self.drafted, 1)

    @property
    def histogram(self) -> list[int]:
        """Row passes that accepted 0, 1, 2, ... nodes."""
        self._reduce()
        return list(self._counts)

    @property
    def by_depth(self) -> list[float]:
        """Share of the row passes that accepted at least 1, 2, ... nodes."""
        counts = self.histogram
        return [sum(counts[depth:]) / max(self.rounds, 1) for depth in range(1, len(counts))]

    def as_dict(self) -> dict[str, Any]:
        """All of it, as plain numbers."""
        return {
            "calls": self.calls,
            "tokens": self.tokens,
            "passes": self.passes,
            "row_passes": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "accepted_histogram": self.histogram,
            **({"unguided": sorted(self.unguided)} if self.unguided else {}),
        }

    def __repr__(self) -> str:
        return "Stats(" + ", ".join(f"{k}={v}" for k, v in self.as_dict().items()) + ")"
