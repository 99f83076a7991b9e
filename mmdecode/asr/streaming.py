"""Streaming transcription: words while audio arrives; committed words are never taken back.

`Stream` keeps the last seconds of the audio. Every ``step_s`` seconds it transcribes them again,
with an ordinary `Transcriber`: any model, draft, guide or option. Text that a policy of `POLICIES`
finds stable is committed: it is returned once, and does not change any more. The rest is
provisional: returned too, and free to change with the next step.

* ``agreement``: words that the last ``n`` hypotheses agree on (LocalAgreement-n; Liu et al. 2020,
  arXiv:2005.11185, section 2.2; for Whisper Macháček et al. 2023, arXiv:2307.14743, section 2.1).
* ``hold``: all words but the last ``n`` (hold-n; Liu et al. 2020).

Kept audio is dropped up to the end of a segment whose words are all committed, and always fits into
one window of the model: if nothing is stable when the window is full, words are committed up to the
first segment or word boundary that makes room. So neither memory nor the time of a step grows with
the recording, and no pause or noise delays the text.

Models without timestamps decode the kept audio in windows that are cut at pauses, half as long as
the kept audio: each window is a segment, and is decoded alike at every step until it is dropped.

Differs from Macháček et al. 2023: the end of the committed words in a new hypothesis is found by
aligning the texts, so that word times are not needed; words are compared without case and
punctuation; the text before the kept audio is not part of the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmdecode import registry
from mmdecode.asr.alignment.words import SPACELESS, is_marks
from mmdecode.asr.decoding.repetition import first_round_end
from mmdecode.asr.options import LEAST_WINDOW_S
from mmdecode.asr.results import Segment, Transcript, Word
from mmdecode.asr.transcriber import Transcriber
from mmdecode.errors import InputError, OptionError, UnknownNameError

Policy = Callable[[Sequence[Sequence[str]], int], int]
"""``policy(hypotheses, n)``: how many words of the newest hypothesis are stable.

``hypotheses`` are the last ones, newest last: their words after the committed ones, without case
and punctuation.
"""


def agreement(hypotheses: Sequence[Sequence[str]], n: int) -> int:
    """Length of the longest common prefix of the last ``n`` hypotheses; 0 while there are fewer."""
    if len(hypotheses) < n:
        return 0
    last = hypotheses[-n:]
    for index, words in enumerate(zip(*last, strict=False)):
        if len(set(words)) > 1:
            return index
    return min(map(len, last))


def hold(hypotheses: Sequence[Sequence[str]], n: int) -> int:
    """Number of words of the newest hypothesis without its last ``n``."""
    return max(0, len(hypotheses[-1]) - n)


POLICIES: Mapping[str, tuple[Policy, int, int]] = {
    "agreement": (agreement, 2, 1),
    "hold": (hold, 3, 0),
}
"""Policies by name, with the default ``n`` and the least possible."""


def policy_of(spec: str) -> tuple[Policy, int]:
    """Parses a policy and its ``n``, as ``agreement`` or ``hold:n=4``.

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
    """Decides which words of successive hypotheses are committed, by their texts alone.

    Args:
        policy: Policy that decides what is stable.
        n: Its parameter.
    """

    def __init__(self, policy: Policy, n: int) -> None:
        self.policy, self.n = policy, n
        self._committed: list[str] = []  # committed words whose audio is still kept
        self._open: list[list[str]] = []  # of the last hypotheses, after the committed words

    def offer(self, words: Sequence[str]) -> tuple[int, int]:
        """Adds a hypothesis and commits its stable words.

        Returns:
            Indices of the first newly committed word and after the last one; words after these are
            provisional.
        """
        keys = [bare(word) for word in words]
        begin = covered(self._committed, keys)
        self._open = [*self._open, keys[begin:]][-max(self.n, 1) :]
        count = self.policy(self._open, self.n)
        self.commit(count)
        return begin, begin + count

    def commit(self, count: int) -> None:
        """Commits the next ``count`` words of the newest hypothesis."""
        taken = self._open[-1][:count]
        self._committed += taken
        self._open = [words[count:] for words in self._open if words[:count] == taken]

    def forget(self, words: Sequence[str]) -> None:
        """Drops committed words whose audio is no longer kept.

        Args:
            words: First words of the newest hypothesis, all committed.
        """
        del self._committed[: covered([bare(word) for word in words], self._committed)]


def bare(word: str) -> str:
    """The word without case and punctuation; punctuation alone is kept."""
    return "".join(c for c in word.casefold() if not is_marks(c)) or word.strip()


def covered(committed: Sequence[str], words: Sequence[str]) -> int:
    """Number of first words of a new hypothesis that repeat the committed words.

    The prefix of ``words`` with the fewest word errors against ``committed``; among equals the one
    nearest in length. 0 where two or more words are committed and all of them would be errors: the
    new hypothesis no longer has them, as happens with words hallucinated in a pause.

    Args:
        committed: Committed words whose audio is still kept.
        words: Words of the new hypothesis.
    """
    errors = list(range(len(words) + 1))
    for row, word in enumerate(committed, 1):
        above, errors[0] = errors[0], row
        for column, other in enumerate(words, 1):
            best = min(above + (word != other), errors[column] + 1, errors[column - 1] + 1)
            above, errors[column] = errors[column], best
    if len(committed) > 1 and min(errors) == len(committed):
        return 0
    return min(range(len(errors)), key=lambda count: (errors[count], abs(count - len(committed))))


@dataclass(frozen=True, kw_only=True)
class Update:
    """Result of one step.

    Attributes:
        audio_s: Seconds of audio received so far; the JSON key is ``heard_s``.
        ready_s: When the step would have ended had its audio come live, in seconds from the
            beginning of the stream: no step begins before its audio is there and the one before has
            ended.
        committed: Newly committed words, each with the space before it: they never change.
        provisional: Words after them in the current hypothesis.
        words: The committed words with times and confidences; ``None``: words are not timed.
    """

    audio_s: float
    ready_s: float
    committed: list[str]
    provisional: list[str]
    words: list[Word] | None = None

    @property
    def text(self) -> str:
        """Committed text; the texts of all updates, joined, are the transcript."""
        return "".join(self.committed)

    def as_dict(self) -> dict[str, Any]:
        """JSON object of the update, as ``mmdecode stream --json`` prints it."""
        return {
            "heard_s": self.audio_s,
            "ready_s": self.ready_s,
            "committed": self.committed,
            "provisional": self.provisional,
            "words": self.words,
        }


@dataclass(frozen=True)
class _Hypothesis:
    """Hypothesis for the kept audio.

    Attributes:
        words: Words, each with the space before it.
        timed: The same with times in the stream; ``None``: words are not timed.
        start_s: Start of the first segment, from the start of the kept audio; 0 where there is
            none.
        ends: Ends of segments: seconds from the start of the kept audio, and words up to there.
    """

    words: list[str]
    timed: list[Word] | None
    start_s: float
    ends: list[tuple[float, int]]


class Stream:
    """Transcribes one recording while its audio arrives.

    Args:
        transcriber: Transcriber of the kept audio; its options hold for every step. Voice activity
            detection (``vad``) keeps pauses from being transcribed at all. Where words are timed,
            audio can also be dropped up to a boundary between two words.
        policy: One of `POLICIES`, with ``n``: ``agreement:n=3``.
        step_s: Seconds of audio between updates.
        longest_s: Most seconds of audio that are kept; ``None``: `Recognizer.kept_s` of the model's
            family, for Whisper a window.

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
        self._audio = np.zeros(0, np.float32)  # kept audio, which the next step transcribes again
        self._received = 0  # samples, those that were cut off included
        self._ready_s = 0.0
        self._language: str | None = None
        self._any_committed = False
        self._open: tuple[list[str], list[Word] | None] = [], None
        self._finished = False

    @property
    def audio_s(self) -> float:
        """Seconds of audio transcribed so far, in whole steps."""
        return self._received / self.rate

    def feed(self, samples: np.ndarray, rate: int | None = None) -> list[Update]:
        """Takes the next samples.

        Args:
            samples: Mono float32, ``(samples,)``, any number of them.
            rate: Their sampling rate in Hz; ``None``: the transcriber's, the only one accepted.

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
        """Transcribes the rest and commits all words; the stream takes no more samples."""
        self._finished = True
        if len(self._waiting):
            rest, self._waiting = self._waiting, self._waiting[:0]
            update = self._update(rest, last=True)
        else:
            words, timed = self._open
            update = self._as_update(words, [], timed)
        self._audio, self._open = self._audio[:0], ([], None)
        return update

    def _check(self, samples: np.ndarray, rate: int | None) -> None:
        if rate not in (None, self.rate):
            raise InputError(
                f"samples at {rate} Hz; the model takes {self.rate} Hz: resample the whole stream "
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
                f"samples are NaN or infinite, after {self.audio_s:g} s; expected finite numbers"
            )

    def _update(self, samples: np.ndarray, last: bool = False) -> Update:
        """One step: transcribe the kept audio, commit stable words, drop audio."""
        began = time.perf_counter()
        self._audio = np.concatenate([self._audio, samples])
        self._received += len(samples)
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
        self._any_committed |= end > begin
        timed = found.timed
        self._open = found.words[end:], timed and timed[end:]
        self._ready_s = max(self._ready_s, self.audio_s) + time.perf_counter() - began
        return self._as_update(
            found.words[begin:end], found.words[end:], timed and timed[begin:end]
        )

    def _as_update(
        self, committed: list[str], provisional: list[str], timed: list[Word] | None
    ) -> Update:
        return Update(
            audio_s=self.audio_s,
            ready_s=round(max(self._ready_s, self.audio_s), 6),
            committed=committed,
            provisional=provisional,
            words=timed,
        )

    def _hear(self) -> _Hypothesis:
        """Transcribes the kept audio."""
        item = {"audio": self._audio, "language": self._language}
        found: Transcript = self.transcriber(item)
        start_s = (self._received - len(self._audio)) / self.rate
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
        if self._any_committed:  # language detection is unreliable on the first seconds
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
        """Chooses how much of the kept audio is dropped.

        Args:
            found: The hypothesis.
            end: How many of its words are committed.

        Returns:
            Number of samples to drop, and of words of the hypothesis in them.
        """
        length = len(self._audio)
        full = length + self._step > self._longest
        # a quarter at once, so that a full window is not transcribed again and again
        least = max(length + self._step - self._longest, self._longest // 4) if full else 1

        def cut_points(ends: Sequence[tuple[float, int]]) -> list[tuple[int, int]]:
            candidates = [(min(round(end_s * self.rate), length), count) for end_s, count in ends]
            return [(cut, count) for cut, count in candidates if cut >= least]

        # the end of the last segment may change with the next step
        inner = cut_points(found.ends[:-1])
        closed = [point for point in inner if point[1] <= end]
        if closed and length >= self._longest // 2:
            return closed[-1]
        if not full:
            return 0, 0
        if opening := cut_points([(found.start_s, 0)]) or inner:
            return opening[0]
        count = len(found.words)
        if found.timed is not None:
            start_s = self.audio_s - length / self.rate
            between = cut_points([(w.end_s - start_s, i) for i, w in enumerate(found.timed, 1)])
            committed = [point for point in between if point[1] <= end]
            if between:
                return committed[-1] if committed else between[0]
        # all words are committed: the audio after the last one holds no speech
        quiet = round(found.ends[-1][0] * self.rate) if found.ends else 0
        return min(max(least, length // 2, quiet), length), count


def words_of(segment: Segment, language: str | None) -> list[str]:
    """The words of a segment, each with the space before it."""
    if segment.words is not None:
        return [word.text for word in segment.words]
    if language in SPACELESS:
        return [c for c in segment.text if not c.isspace()]
    return [f" {word}" for word in segment.text.split()]
