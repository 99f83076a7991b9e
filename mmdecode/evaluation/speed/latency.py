"""Latency of streaming recognition: lag of the words, and how often provisional ones change.

Everything is computed per recording, from when each word was committed: in seconds of audio
received by then, which does not depend on the machine, or in wall-clock seconds, which does.
With d_i for word i of n (i from 1), T for the length of the source and r = T / m for an ideal
speaker who spreads m words evenly over it:

* `average_lagging`: AL = mean over i = 1..k of d_i - (i - 1) r, where k is the first word that was
  committed after the whole source (n if there is none). Ma et al. 2019, arXiv:1810.08398,
  for text; Ma et al. 2020, arXiv:2011.02048, for speech, with the reference's number of words as m.
  A text that is longer than that has too small an AL, even a negative one.
* LAAL, the length-adaptive one, takes n for m where n is larger: Papi et al. 2022,
  arXiv:2206.05807.
* `differentiable_average_lagging`: DAL = mean over all i of e_i - (i - 1) r with m = n, e_1 = d_1
  and e_i = max(d_i, e_{i-1} + r): a word takes its time to say. Cherry and Foster 2019,
  arXiv:1906.00048.

In a recording with pauses nobody speaks evenly: where the times of words are known, `lag_s`, from a
word's own end to when it was committed, says more.

Committed words never change. `provisional_change_rate` is the share of all shown words that were
provisional and changed before they were committed. Between two displays those are the words of the
first after what both begin with (erasure; Arivazhagan et al. 2020, arXiv:1912.03393); their
normalised erasure, per final word, is rate / (1 - rate).
"""

from __future__ import annotations

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
    """AL; with the larger of both numbers of words, LAAL.

    Args:
        delays: How much of the source had been received when each word was committed, in order.
            Delays that include computation may be longer than the source.
        source: Length of the source, in the same unit.
        words: Number of words of the ideal speaker, such as the reference's; ``None``: as many
            as delays.

    Returns:
        In the unit of the source; ``None``: there are no words.

    Raises:
        OptionError: A delay is shorter than the one before, or a number is out of range.
    """
    pace = _pace(delays, source, words)
    if pace is None:
        return None
    before = sum(1 for _ in takewhile(lambda delay: delay < source, delays))
    counted = delays[: before + 1]
    return sum(delay - i * pace for i, delay in enumerate(counted)) / len(counted)


def differentiable_average_lagging(delays: Sequence[float], source: float) -> float | None:
    """DAL; arguments, result and errors as of `average_lagging`."""
    pace = _pace(delays, source)
    if pace is None:
        return None
    total, delayed = 0.0, delays[0] - pace
    for i, delay in enumerate(delays):
        delayed = max(delay, delayed + pace)
        total += delayed - i * pace
    return total / len(delays)


def _pace(delays: Sequence[float], source: float, words: int | None = None) -> float | None:
    """Length of the source per word; ``None``: there are no words."""
    if source <= 0 or (words is not None and words < 1):
        raise OptionError(f"source={source}, words={words}; expected more than 0")
    if any(later < delay for delay, later in pairwise(delays)):
        raise OptionError("a word was committed before the one before it; give delays in order")
    return source / (words or len(delays)) if delays else None


@dataclass(frozen=True, kw_only=True)
class Lagging:
    """Seconds by which the words of one recording lag.

    Attributes:
        al: Average lagging, against even speech of the reference's words; without a reference of
            the committed ones.
        laal: Length-adaptive; ``None``: there is no reference, or it has no words.
        dal: Differentiable.
    """

    al: float | None
    laal: float | None
    dal: float | None


@dataclass(frozen=True, kw_only=True)
class StreamReport:
    """Report on one recording's stream.

    Attributes:
        committed_words: Number of committed words; they never change.
        received: Lagging in seconds of audio received: the part that the policy causes.
        ready: Lagging in wall-clock time, computation included.
        lag_s: Mean seconds of audio from a word's end to when it was committed; ``None``: no word
            has times.
        provisional_change_rate: Share of shown words that were provisional and changed; the others
            were committed as they were shown.
        delay_s: Most seconds that a step was ready after its audio.
    """

    committed_words: int
    received: Lagging
    ready: Lagging
    lag_s: float | None
    provisional_change_rate: float
    delay_s: float

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON; ``received`` is under ``heard``."""
        return {{"received": "heard"}.get(key, key): value for key, value in asdict(self).items()}


@dataclass
class StreamMeter:
    """Measures a stream update by update; keeps two numbers per word.

    Attributes:
        shown: Words that were provisional at the last update.
        changed: Provisional words that changed later.
    """

    shown: list[str] = field(default_factory=list)
    changed: int = 0
    _received: list[float] = field(default_factory=list)
    _ready: list[float] = field(default_factory=list)
    _lags: list[float] = field(default_factory=list)
    _delay_s: float = 0.0
    _end_s: float = 0.0

    def add(self, update: Update) -> None:
        """Takes the next update; the last one is that of ``finish``."""
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
        """The recording's numbers.

        Args:
            reference_words: Number of words of the reference; ``None``: not known.
        """
        shown = len(self._received) + self.changed
        return StreamReport(
            committed_words=len(self._received),
            received=lagging(self._received, self._end_s, reference_words),
            ready=lagging(self._ready, self._end_s, reference_words),
            lag_s=sum(self._lags) / len(self._lags) if self._lags else None,
            provisional_change_rate=self.changed / shown if shown else 0.0,
            delay_s=self._delay_s,
        )


def lagging(delays: Sequence[float], source: float, reference_words: int | None = None) -> Lagging:
    """AL, LAAL and DAL; arguments as of `average_lagging`."""
    if not delays:
        return Lagging(al=None, laal=None, dal=None)
    longer = max(reference_words, len(delays)) if reference_words else None
    return Lagging(
        al=average_lagging(delays, source, reference_words or None),
        laal=None if longer is None else average_lagging(delays, source, longer),
        dal=differentiable_average_lagging(delays, source),
    )
