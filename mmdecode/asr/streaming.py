"""Streams: words while somebody speaks; committed ones are never taken back.

`Stream` hears a recording that is still going on. Every ``step_s`` seconds of audio it transcribes
what it keeps of it again, with a `Transcriber` as it is: any model, draft, guide or option. Text
that a policy of `POLICIES` finds stable is committed: it is returned once, and does not change any
more. The rest is provisional: shown, and free to change with the next step.

* ``agreement``: words that the last ``n`` hypotheses agree on (LocalAgreement-n; Liu et al. 2020,
  arXiv:2005.11185, section 2.2; for Whisper Macháček et al. 2023, arXiv:2307.14743, section 2.1).
* ``hold``: all words but the last ``n`` (hold-n; Liu et al. 2020).

The audio that is kept is cut where a segment ends that is committed as a whole, and fits into one
window of the model always: where nothing is agreed on until the window is full, words are committed
up to the first safe place that makes room. So neither memory nor the time of a step grows with the
recording, and no pause or noise holds the text up.

Models without timestamps of their own hear the kept audio in windows that are cut at pauses, half
as long as what is kept: such a window is a segment, and is heard alike until it is cut off.

Differs from Macháček et al. 2023: where the committed words end in a new hypothesis is found by
aligning the texts, so that times of words are not needed; words agree whatever their case and
marks; hypotheses are not shown the text before the kept audio.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmdecode import registry
from mmdecode.asr.alignment.words import SPACELESS, is_marks
from mmdecode.asr.decoding.repetition import first_round_end
from mmdecode.asr.options import LEAST_WINDOW_S
from mmdecode.asr.results import Segment, Transcript, Word
from mmdecode.asr.transcriber import Transcriber
from mmdecode.errors import InputError, OptionError, UnknownNameError

Policy = Callable[[Sequence[Sequence[str]], int], int]
"""Open words of the last hypotheses, newest last, and ``n``, to how many of the newest are stable.

Open are those after the committed words, without case and marks.
"""


def agreement(hypotheses: Sequence[Sequence[str]], n: int) -> int:
    """Length of the beginning that the last ``n`` hypotheses share; 0 while there are fewer."""
    if len(hypotheses) < n:
        return 0
    last = hypotheses[-n:]
    for place, words in enumerate(zip(*last, strict=False)):
        if len(set(words)) > 1:
            return place
    return min(map(len, last))


def hold(hypotheses: Sequence[Sequence[str]], n: int) -> int:
    """All words of the newest hypothesis but the last ``n``."""
    return max(0, len(hypotheses[-1]) - n)


POLICIES: Mapping[str, tuple[Policy, int, int]] = {
    "agreement": (agreement, 2, 1),
    "hold": (hold, 3, 0),
}
"""Policies by name, with the default ``n`` and the least possible."""


def policy_of(spec: str) -> tuple[Policy, int]:
    """A policy and its ``n`` from ``agreement``, ``hold:n=4`` and the like.

    Raises:
        UnknownNameError: There is no such policy.
        OptionError: It has no such option, or the value is out of range.
    """
    [(name, options)] = registry.parse("policy", spec)
    if name not in POLICIES:
        raise UnknownNameError.of("policy", name, POLICIES)
    policy, usual, least = POLICIES[name]
    n = options.pop("n", usual)
    if options or not isinstance(n, int) or n < least:
        raise OptionError(
            f"policy={spec!r}; expected '{name}:n=N' with a whole number N from {least} on"
        )
    return policy, n


class Commits:
    """Decides which words of hypotheses are committed; knows texts and nothing of audio.

    Args:
        policy: Policy that decides what is stable.
        n: Its parameter.
    """

    def __init__(self, policy: Policy, n: int) -> None:
        self.policy, self.n = policy, n
        self._said: list[str] = []  # committed words that are still heard
        self._open: list[list[str]] = []  # of the last hypotheses, after the committed words

    def offer(self, words: Sequence[str]) -> tuple[int, int]:
        """Takes a hypothesis.

        Returns:
            Where in it the newly committed words begin and end; those after are provisional.
        """
        keys = [bare(word) for word in words]
        begin = covered(self._said, keys)
        self._open = [*self._open, keys[begin:]][-max(self.n, 1) :]
        count = self.policy(self._open, self.n)
        self.commit(count)
        return begin, begin + count

    def commit(self, count: int) -> None:
        """Commits as many further words of the newest hypothesis."""
        taken = self._open[-1][:count]
        self._said += taken
        self._open = [words[count:] for words in self._open if words[:count] == taken]

    def forget(self, words: Sequence[str]) -> None:
        """Words at the beginning of the newest hypothesis, all committed, are no longer heard."""
        del self._said[: covered([bare(word) for word in words], self._said)]


def bare(word: str) -> str:
    """Without case and marks; marks alone stay."""
    return "".join(c for c in word.casefold() if not is_marks(c)) or word.strip()


def covered(said: Sequence[str], words: Sequence[str]) -> int:
    """How many of ``words``, from the first on, repeat ``said``.

    The candidates with the fewest word errors; among equals those nearest in number. None of them
    where two words or more were said and all would be errors: what was heard there is heard no
    more, as words made up in a pause.
    """
    errors = list(range(len(words) + 1))
    for row, word in enumerate(said, 1):
        above, errors[0] = errors[0], row
        for column, other in enumerate(words, 1):
            best = min(above + (word != other), errors[column] + 1, errors[column - 1] + 1)
            above, errors[column] = errors[column], best
    if len(said) > 1 and min(errors) == len(said):
        return 0
    return min(range(len(errors)), key=lambda count: (errors[count], abs(count - len(said))))


@dataclass(frozen=True, kw_only=True)
class Update:
    """Update of one step.

    Attributes:
        heard_s: Seconds of audio heard so far.
        ready_s: When the step would have ended had its audio come live, in seconds from the
            beginning of the stream: no step begins before its audio is there and the one before has
            ended.
        committed: New words, each with the space before it: they never change.
        provisional: Words after them as they look now.
        words: The new words with times and confidences; ``None``: the transcriber times no words.
    """

    heard_s: float
    ready_s: float
    committed: list[str]
    provisional: list[str]
    words: list[Word] | None = None

    @property
    def text(self) -> str:
        """Committed text; the texts of all updates, joined, are the transcript."""
        return "".join(self.committed)


@dataclass(frozen=True)
class _Hypothesis:
    """Hypothesis for the kept audio.

    Attributes:
        words: Each with the space before it.
        timed: The same with times of the stream; ``None``: nothing asked for them.
        start_s: Start of the first segment, from the start of the kept audio; 0 where there is
            none.
        ends: Ends of segments: seconds from the start of the kept audio, and words up to there.
    """

    words: list[str]
    timed: list[Word] | None
    start_s: float
    ends: list[tuple[float, int]]


class Stream:
    """One recording that is still going on.

    Args:
        transcriber: How audio is heard; its options hold for every step. Speech detection
            (``vad``) keeps pauses from being transcribed at all. Where it times words, audio can
            also be cut between two of them.
        policy: One of `POLICIES`, with ``n``: ``agreement:n=3``.
        step_s: Seconds between updates.
        longest_s: Most audio that is kept; ``None``: `Recognizer.kept_s` of the model's family, for
            Whisper a window.

    The text depends on the samples and on ``step_s``, not on the blocks that the samples come in.

    Raises:
        OptionError: A value is out of range.
        UnknownNameError: There is no such policy.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        policy: str = "agreement",
        step_s: float = 1.0,
        longest_s: float | None = None,
    ) -> None:
        ours = transcriber.recognizer
        timed = ours.capabilities.timestamps
        longest_s = ours.kept_s if longest_s is None else longest_s
        least = 1 / transcriber.sampling_rate if timed else 2 * LEAST_WINDOW_S
        if not least <= longest_s <= ours.window_s:
            lower = "more than 0" if timed else f"{least:g} s or more"
            raise OptionError(
                f"longest_s={longest_s}; expected {lower} and at most a window of the model, "
                f"{ours.window_s:g} s"
            )
        self.rate = transcriber.sampling_rate
        if not 1 / self.rate <= step_s <= longest_s / 2:
            raise OptionError(
                f"step_s={step_s}; expected more than 0 and at most half of the audio that is "
                f"kept, {longest_s / 2:g} s"
            )
        if not timed:
            usual = transcriber.options.window_s or longest_s
            transcriber = transcriber.with_options(window_s=min(usual, longest_s / 2))
        self.transcriber = transcriber
        self._commits = Commits(*policy_of(policy))
        self._step, self._longest = round(step_s * self.rate), int(longest_s * self.rate)
        self._waiting = np.zeros(0, np.float32)  # less than a step
        self._audio = np.zeros(0, np.float32)  # what the next step hears again
        self._heard = 0  # samples, those that were cut off included
        self._ready_s = 0.0
        self._language: str | None = None
        self._said_any = False
        self._open: tuple[list[str], list[Word] | None] = [], None
        self._finished = False

    @property
    def heard_s(self) -> float:
        """Seconds of audio heard so far, in whole steps."""
        return self._heard / self.rate

    def feed(self, samples: np.ndarray, rate: int | None = None) -> list[Update]:
        """Takes the next samples.

        Args:
            samples: Mono float32, ``(samples,)``, any number of them.
            rate: Theirs; ``None``: the transcriber's.

        Returns:
            An update per step that they complete: often none, several for a long block.

        Raises:
            InputError: The samples are of another kind or rate, or not finite.
            OptionError: The stream is finished.
        """
        if self._finished:
            raise OptionError("the stream is finished; make another for another recording")
        self._check(samples, rate)
        waiting = np.concatenate([self._waiting, samples])
        whole = len(waiting) - len(waiting) % self._step
        self._waiting = waiting[whole:].copy()  # a view would keep the whole block
        return [self._update(waiting[at : at + self._step]) for at in range(0, whole, self._step)]

    def finish(self) -> Update:
        """Hears what is left, and commits everything; the stream takes no more samples."""
        self._finished = True
        if len(self._waiting):
            rest, self._waiting = self._waiting, self._waiting[:0]
            update = self._update(rest, last=True)
        else:
            words, timed = self._open
            update = self._said(words, [], timed)
        self._audio, self._open = self._audio[:0], ([], None)
        return update

    def _check(self, samples: np.ndarray, rate: int | None) -> None:
        if rate not in (None, self.rate):
            raise InputError(
                f"samples at {rate} Hz; the model hears {self.rate} Hz: resample the whole stream "
                "with one resampler, such as soxr.ResampleStream"
            )
        if getattr(samples, "dtype", None) != np.float32 or np.ndim(samples) != 1:
            kind = getattr(samples, "dtype", type(samples).__name__)
            raise InputError(
                f"samples are {kind} of shape {np.shape(samples)}; expected a float32 array in "
                "[-1, 1] of one channel: divide 16-bit integers by 32768, average channels"
            )
        if not np.isfinite(samples).all():
            raise InputError(
                f"samples are NaN or infinite, behind {self.heard_s:g} s; expected finite numbers"
            )

    def _update(self, samples: np.ndarray, last: bool = False) -> Update:
        """One step: hear again, commit, cut."""
        began = time.perf_counter()
        self._audio = np.concatenate([self._audio, samples])
        self._heard += len(samples)
        found = self._hear()
        begin, end = self._commits.offer(found.words)
        if not last:
            cut, count = self._cut(found, end)
            self._audio = self._audio[cut:].copy()
            if count > end:
                self._commits.commit(count - end)
                end = count
            if cut:
                self._commits.forget(found.words[:count])
        else:
            end = len(found.words)
        self._said_any |= end > begin
        timed = found.timed
        self._open = found.words[end:], timed and timed[end:]
        self._ready_s = max(self._ready_s, self.heard_s) + time.perf_counter() - began
        return self._said(found.words[begin:end], found.words[end:], timed and timed[begin:end])

    def _said(
        self, committed: list[str], provisional: list[str], timed: list[Word] | None
    ) -> Update:
        return Update(
            heard_s=self.heard_s,
            ready_s=round(max(self._ready_s, self.heard_s), 6),
            committed=committed,
            provisional=provisional,
            words=timed,
        )

    def _hear(self) -> _Hypothesis:
        """The kept audio, transcribed."""
        item = {"audio": self._audio, "language": self._language}
        found: Transcript = self.transcriber(item)
        start_s = (self._heard - len(self._audio)) / self.rate
        words: list[str] = []
        timed: list[Word] = []
        ends = []
        for segment in found.segments:
            words += words_of(segment, found.language)
            timed += [
                replace(word, start_s=start_s + word.start_s, end_s=start_s + word.end_s)
                for word in segment.words or ()
            ]
            ends.append((segment.end_s, len(words)))
        if self._said_any:  # the first seconds alone tell a language badly
            self._language = found.language
        once = first_round_end([bare(word) for word in words])
        if once is not None:
            words, timed = words[:once], timed[:once]
            ends = [(end_s, min(count, once)) for end_s, count in ends]
        options = self.transcriber.options
        return _Hypothesis(
            words,
            timed if options.word_timestamps else None,
            found.segments[0].start_s if found.segments else 0.0,
            ends,
        )

    def _cut(self, found: _Hypothesis, end: int) -> tuple[int, int]:
        """Where to cut.

        Args:
            found: The hypothesis.
            end: How many of its words are committed.

        Returns:
            Samples that go, and words of the hypothesis said in them.
        """
        length = len(self._audio)
        full = length + self._step > self._longest
        # at once a quarter, so that a full window is not heard again and again
        least = max(length + self._step - self._longest, self._longest // 4) if full else 1

        def places(ends: Sequence[tuple[float, int]]) -> list[tuple[int, int]]:
            cuts = [(min(round(end_s * self.rate), length), count) for end_s, count in ends]
            return [(cut, count) for cut, count in cuts if cut >= least]

        # what the model says of the last segment's end it may not say again
        inner = places(found.ends[:-1])
        closed = [place for place in inner if place[1] <= end]
        if closed and length >= self._longest // 2:
            return closed[-1]
        if not full:
            return 0, 0
        if opening := places([(found.start_s, 0)]) or inner:
            return opening[0]
        count = len(found.words)
        if found.timed is not None:
            start_s = self.heard_s - length / self.rate
            between = places([(w.end_s - start_s, i) for i, w in enumerate(found.timed, 1)])
            committed = [place for place in between if place[1] <= end]
            if between:
                return committed[-1] if committed else between[0]
        # all of it is said with this: what is after the last word is quiet
        quiet = round(found.ends[-1][0] * self.rate) if found.ends else 0
        return min(max(least, length // 2, quiet), length), count


def words_of(segment: Segment, language: str | None) -> list[str]:
    """The words of a segment, each with the space before it."""
    if segment.words is not None:
        return [word.text for word in segment.words]
    if language in SPACELESS:
        return [c for c in segment.text if not c.isspace()]
    return [f" {word}" for word in segment.text.split()]
