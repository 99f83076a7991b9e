"""Counters of a decoder, and the rates that follow from them.

Rounds are kept as tensors and added up when a rate is asked for: reading them per round would be a
synchronisation more, adding them up on the device work for nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Stats:
    """What a `Decoder` has done since `reset`; accumulates over calls.

    Attributes:
        calls: Calls of the decoder.
        passes: Scoring passes after the prompt was read, each over the whole batch.
        draft_passes: Passes of the drafter's own model or heads.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to zero."""
        self.calls = self.passes = self.draft_passes = 0
        self._first: list[Tensor] = []
        self._rounds: list[tuple[Tensor, ...]] = []
        self._sums = [0, 0, 0, 0, 0]  # first tokens, row passes, drafted, accepted, tokens
        self._counts: list[int] = []

    def prefilled(self, committed: Tensor) -> None:
        """Round 0 of a call: ``committed (B,)`` tokens that no scoring pass was needed for."""
        self._first.append(committed)

    def scored(self, open_rows: Tensor, drafted: Tensor, accepted: Tensor, kept: Tensor) -> None:
        """One round; nothing is computed before a rate is asked for.

        Args:
            open_rows: Rows that took part, ``(B,)`` bool.
            drafted: Proposed tokens, ``(B, N)``, -1 unused.
            accepted: Nodes on the accepted path, ``(B,)``.
            kept: Tokens committed after stop rules, ``(B,)``.
        """
        self.passes += 1
        self._rounds.append((open_rows, drafted, accepted, kept))
        if len(self._rounds) >= 4096:
            self._reduce()

    def _reduce(self) -> None:
        self._sums[0] += sum(int(first.sum()) for first in self._first)
        for open_rows, drafted, accepted, kept in self._rounds:
            for index, value in enumerate(
                (open_rows, ((drafted >= 0).sum(1) * open_rows), accepted * open_rows, kept)
            ):
                self._sums[index + 1] += int(value.sum())
            for count in accepted[open_rows].tolist():
                self._counts += [0] * (count + 1 - len(self._counts))
                self._counts[count] += 1
        self._first, self._rounds = [], []

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

    def as_dict(self) -> dict[str, Any]:
        """All of it, as plain numbers."""
        return {
            "calls": self.calls,
            "tokens": self.tokens,
            "passes": self.passes,
            "row_passes": self.rounds,
            "draft_passes": self.draft_passes,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "accepted_histogram": self.histogram,
        }

    def __repr__(self) -> str:
        return "Stats(" + ", ".join(f"{k}={v}" for k, v in self.as_dict().items()) + ")"
