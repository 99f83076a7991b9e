"""Counters of a decoder, and rates computed from them.

Counts of rounds are kept as tensors and added up when a rate is asked for: reading them in every
round would cost another synchronisation with the device, adding them up there would cost kernel
launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import zip_longest
from threading import RLock
from typing import Any

import torch
from torch import Tensor


class Stats:
    """Counters of a `Decoder` since the last `reset`; they accumulate over calls.

    Attributes:
        calls: Calls of the decoder.
        passes: Scoring passes after the prompt was read, each over the whole batch.
        paths: Passes by the way that they took: ``prefill causal``, one pass without a mask;
            ``prefill by rows``; ``prefill in chunks``; ``prefill masked``; ``step unmasked``, of
            one token in rows of equal length; ``step masked``; ``processors at all nodes``;
            ``processors on the host``; ``drafter prefill causal`` and so on, of drafters that read
            the target's states of the prompt. Replayed rounds are not counted. With
            ``compile=True`` also ``storage allocated``, tensors of caches, and on CUDA ``graph
            captured`` and ``storage reused``, calls that took over an earlier one's storage and
            graphs.
        prompt_tokens: Tokens of prompts, padding not counted, over all branches: ``read``, and
            ``reused`` from a prompt cache.
        unguided: Reasons why drafters that can follow the guide did not; see
            `mmdecode.engine.contracts.DraftSession`.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._sums: list[int] = []
        self._counts: list[int] = []
        self.reset()

    def of_call(self) -> Stats:
        """New counters for one call, which `merge` adds when it ends."""
        return Stats()

    def merge(self, call: Stats) -> None:
        """Adds the counters of a call that has ended; calls may end in several threads."""
        if call is self:
            return
        with self._lock:
            self.calls += call.calls
            self.passes += call.passes
            self.paths.update(call.paths)
            self.prompt_tokens.update(call.prompt_tokens)
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
        self.paths: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.unguided: set[str] = set()
        self._first: list[Tensor] = []
        self._rounds: list[Tensor] = []
        self._sums = [0, 0, 0, 0, 0]  # first tokens, row passes, drafted, accepted, tokens
        self._counts = []

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Discards the counts made inside the context if it raises."""
        before = {n: copy(v) for n, v in vars(self).items() if n != "_lock"}
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    def ran(self, parts: Iterable[Any]) -> None:
        """Adds what the parts of a call counted as their ``paths``."""
        for part in parts:
            if part is not None:
                self.paths.update(part.paths)
                self.prompt_tokens.update(vars(part).get("prompt_tokens", ()))

    def prefilled(self, counts: Tensor) -> None:
        """Counts round 0 of a call, which needs no scoring pass; see `scored`."""
        if self._first and self._first[-1].device != counts.device:
            self._reduce()
        self._first.append(counts)

    def scored(self, counts: Tensor) -> None:
        """Counts one round; counts are not added up before a rate is asked for.

        Args:
            counts: ``(B, 4)``: whether the row took part, nodes proposed, nodes accepted, tokens
                committed after stop rules.
        """
        self.passes += 1
        self._rounds.append(counts)
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
        """Row passes: the sum over rows of the rounds in which each row was active."""
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
        """All counters and rates, as plain numbers."""
        return {
            "calls": self.calls,
            "prompt_tokens": self.prompt_tokens["read"],
            "prompt_tokens_reused": self.prompt_tokens["reused"],
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
