"""Counters of a decoder, and the rates that follow from them.

Counters are kept on the device and read when a rate is asked for: reading them per round would be
one synchronisation more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DEEPEST = 64  # longer accepted paths are counted here


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
        self._tokens: Tensor | int = 0
        self._first: Tensor | int = 0
        self._rounds: Tensor | int = 0
        self._drafted: Tensor | int = 0
        self._accepted: Tensor | int = 0
        self._histogram: Tensor | None = None

    def prefilled(self, committed: Tensor) -> None:
        """Round 0 of a call: ``committed (B,)`` tokens that no scoring pass was needed for."""
        self._first = self._first + committed.sum()

    def scored(self, open_rows: Tensor, drafted: Tensor, accepted: Tensor, kept: Tensor) -> None:
        """One round.

        Args:
            open_rows: Rows that took part, ``(B,)`` bool.
            drafted: Nodes in use per row, ``(B,)``.
            accepted: Nodes on the accepted path, ``(B,)``.
            kept: Tokens committed after stop rules, ``(B,)``.
        """
        self.passes += 1
        self._rounds = self._rounds + open_rows.sum()
        self._drafted = self._drafted + drafted.sum()
        self._accepted = self._accepted + (accepted * open_rows).sum()
        self._tokens = self._tokens + kept.sum()
        counts = torch.zeros(_DEEPEST + 1, dtype=torch.long, device=accepted.device)
        counts.scatter_add_(0, accepted.clamp(0, _DEEPEST), open_rows.long())
        self._histogram = counts if self._histogram is None else self._histogram + counts

    @property
    def tokens(self) -> int:
        """Tokens committed, those of round 0 included."""
        return int(self._tokens) + int(self._first)

    @property
    def rounds(self) -> int:
        """Sum over rows of the rounds each was open for: row passes."""
        return int(self._rounds)

    @property
    def drafted(self) -> int:
        """Nodes proposed."""
        return int(self._drafted)

    @property
    def accepted(self) -> int:
        """Nodes accepted, before stop rules cut the block."""
        return int(self._accepted)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per row pass; prefill excluded, bonus or correction included."""
        return int(self._tokens) / max(self.rounds, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed nodes."""
        return self.accepted / max(self.drafted, 1)

    @property
    def histogram(self) -> list[int]:
        """Row passes that accepted 0, 1, 2, ... nodes; trailing zeros cut."""
        counts = [] if self._histogram is None else self._histogram.tolist()
        while counts and not counts[-1]:
            counts.pop()
        return counts

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
