"""Latency of streaming recognition: lag of words, and how often provisional words change.

Everything is computed per recording from the delay d_i of each word i = 1..n: the time at which it
was committed, in seconds of audio received by then (independent of the machine), or in wall-clock
seconds. T is the length of the source, and r = T / m the time per word of an ideal speaker who
spreads m words evenly over it:

* `average_lagging`: AL = mean over i = 1..k of d_i - (i - 1) r, where k is the first word that was
  committed after the whole source (n if there is none). Ma et al. 2019, arXiv:1810.08398,
  for text; Ma et al. 2020, arXiv:2011.02048, for speech, with m words in the reference. If the
  recognised text is longer than the reference, AL is too small and may be negative.
* LAAL, length-adaptive average lagging: AL with m = n if n is larger than the number of reference
  words. Papi et al. 2022, arXiv:2206.05807.
* `differentiable_average_lagging`: DAL = mean over all i of e_i - (i - 1) r with m = n, e_1 = d_1
  and e_i = max(d_i, e_{i-1} + r). Cherry and Foster 2019, arXiv:1906.00048.

* `average_proportion`: AP = mean of d_i / T, the share of the source that had been received, on
  average, when a word was committed. Cho and Esipova 2016, arXiv:1606.02012. It depends on the
  length of the source: compare it only on the same recordings.

These measures assume even speech. If the times of words are known, `StreamReport.lag_s`, the time
from a word's end to its commit, is more accurate for recordings with pauses.

Committed words never change. `StreamReport.provisional_change_rate` is the share of all shown words
that were provisional and changed. From one update to the next, all provisional words after the
common prefix of the two count as changed (erasure; Arivazhagan et al. 2020, arXiv:1912.03393). The
normalised erasure of that paper, per final word, is rate / (1 - rate).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Any

from mmdecode.errors import OptionError

if TYPE_CHECKING:
    from mmdecode.asr.streaming import Update


def average_lagging(
    delays: Sequence[float], source: float, words: int | None = None
) -> float | None:
    """Computes average lagging (AL), or LAAL, depending on ``words``.

    Args:
        delays: Amount of the source that had been received when each word was committed, in order.
            Delays that include computation may exceed the length of the source.
        source: Length of the source, in the same unit.
        words: Number of words of the ideal speaker. For AL: the number of reference words; for
            LAAL: the larger of this and the number of delays. ``None``: the number of delays.

    Returns:
        Lagging in the unit of the source; ``None``: there are no words.

    Raises:
        OptionError: A delay is shorter than the previous delay, or a number is out of range.
    """
    pace = _pace(delays, source, words)
    if pace is None:
        return None
    before = sum(1 for _ in takewhile(lambda delay: delay < source, delays))
    counted = delays[: before + 1]
    return sum(delay - i * pace for i, delay in enumerate(counted)) / len(counted)


def differentiable_average_lagging(delays: Sequence[float], source: float) -> float | None:
    """Computes differentiable average lagging (DAL); see `average_lagging` for the arguments."""
    pace = _pace(delays, source)
    if pace is None:
        return None
    total, delayed = 0.0, delays[0] - pace
    for i, delay in enumerate(delays):
        delayed = max(delay, delayed + pace)
        total += delayed - i * pace
    return total / len(delays)


def average_proportion(delays: Sequence[float], source: float) -> float | None:
    """Computes average proportion (AP), 0..1; see `average_lagging` for the arguments."""
    if _pace(delays, source) is None:
        return None
    return sum(min(delay, source) for delay in delays) / (len(delays) * source)


def _pace(delays: Sequence[float], source: float, words: int | None = None) -> float | None:
    """Length of the source per word; ``None``: there are no words."""
    if source <= 0 or (words is not None and words < 1):
        raise OptionError(f"source={source}, words={words}; expected values above 0")
    if any(later < delay for delay, later in pairwise(delays)):
        raise OptionError("a delay is shorter than the delay before it; give delays in order")
    return source / (words or len(delays)) if delays else None


@dataclass(frozen=True, kw_only=True)
class Lagging:
    """Seconds by which the words of one recording lag.

    Attributes:
        al: Average lagging with the number of reference words; without a reference, with the number
            of committed words. ``None``: there are no words.
        laal: Length-adaptive average lagging; ``None``: there is no reference, or no words.
        dal: Differentiable average lagging; ``None``: there are no words.
        ap: Average proportion, a share and no time; ``None``: there are no words.
    """

    al: float | None
    laal: float | None
    dal: float | None
    ap: float | None


@dataclass(frozen=True, kw_only=True)
class StreamReport:
    """Report on one recording's stream.

    Attributes:
        committed_words: Number of committed words; they never change.
        received: Lagging in seconds of audio received, without computation time.
        ready: Lagging in wall-clock time, computation included.
        lag_s: Mean seconds of audio from a word's end to its commit; ``None``: no word has times.
        lag_p95_s: The 95th percentile of the same seconds, for the words that come latest.
        provisional_change_rate: Share of shown words that were provisional and changed, 0..1.
        delay_s: Largest delay between the end of an update's audio and the update, in seconds.
    """

    committed_words: int
    received: Lagging
    ready: Lagging
    lag_s: float | None
    lag_p95_s: float | None
    provisional_change_rate: float
    delay_s: float

    def as_dict(self) -> dict[str, Any]:
        """The fields as a JSON object, in which ``received`` has the key ``heard``."""
        return {{"received": "heard"}.get(key, key): value for key, value in asdict(self).items()}


@dataclass
class StreamMeter:
    """Measures a stream update by update; keeps two numbers per word.

    Attributes:
        shown: Words that were provisional at the last update.
        changed: Number of provisional words that changed later.
    """

    shown: list[str] = field(default_factory=list)
    changed: int = 0
    _received: list[float] = field(default_factory=list)
    _ready: list[float] = field(default_factory=list)
    _lags: list[float] = field(default_factory=list)
    _delay_s: float = 0.0
    _end_s: float = 0.0

    def add(self, update: Update) -> None:
        """Adds the next update; the last update is the result of the stream's ``finish``."""
        now = [*update.committed, *update.provisional]
        pairs = zip(self.shown, now, strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.changed += len(self.shown) - kept
        self.shown = list(update.provisional)
        count = len(update.committed)
        self._received += [update.audio_s] * count
        self._ready += [update.ready_s] * count
        self._lags += [update.audio_s - word.end_s for word in update.words or ()]
        self._delay_s = max(self._delay_s, update.ready_s - update.audio_s)
        self._end_s = update.audio_s

    def report(self, reference_words: int | None = None) -> StreamReport:
        """Returns the report on the recording.

        Args:
            reference_words: Number of words of the reference; ``None``: not known.
        """
        shown = len(self._received) + self.changed
        return StreamReport(
            committed_words=len(self._received),
            received=lagging(self._received, self._end_s, reference_words),
            ready=lagging(self._ready, self._end_s, reference_words),
            lag_s=sum(self._lags) / len(self._lags) if self._lags else None,
            lag_p95_s=percentile(self._lags, 0.95),
            provisional_change_rate=self.changed / shown if shown else 0.0,
            delay_s=self._delay_s,
        )


def lagging(delays: Sequence[float], source: float, reference_words: int | None = None) -> Lagging:
    """Computes AL, LAAL and DAL.

    Args:
        delays: See `average_lagging`.
        source: See `average_lagging`.
        reference_words: Number of words of the reference; ``None``: not known.
    """
    if not delays:
        return Lagging(al=None, laal=None, dal=None, ap=None)
    longer = max(reference_words, len(delays)) if reference_words else None
    return Lagging(
        al=average_lagging(delays, source, reference_words or None),
        laal=None if longer is None else average_lagging(delays, source, longer),
        dal=differentiable_average_lagging(delays, source),
        ap=average_proportion(delays, source),
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns the smallest value that is at least as large as a share of all; ``None``: no values.

    Args:
        values: The values, in any order.
        share: Share of the values, above 0 and at most 1.
    """
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else None
