"""Streaming transcription: words while audio arrives; committed words are never taken back.

`Stream` keeps the last seconds of the audio in a buffer. Every ``step_s`` seconds it transcribes
the buffer again, with an ordinary `Transcriber` (any model, draft, guide or option). The result is
a hypothesis. A policy of `POLICIES` decides which of its first words are stable. Stable words are
committed: they are returned once, and do not change any more. The other words are provisional: they
are returned too, and may change with the next step.

* ``agreement``: commits words that the last ``n`` hypotheses agree on (LocalAgreement-n; Liu et al.
  2020, arXiv:2005.11185, section 2.2; for Whisper Macháček et al. 2023, arXiv:2307.14743, section
  2.1).
* ``hold``: commits all words but the last ``n`` (hold-n; Liu et al. 2020).

The audio of a segment is dropped from the buffer once all its words are committed. The buffer
always fits into one window of the model: if nothing is stable when it is full, words are committed
up to the first segment or word boundary that makes room. So neither memory nor the time of a step
grows with the recording, and a pause or noise cannot hold up the text.

Models without timestamps decode the buffer in windows that are cut at pauses and are at most half
as long as the buffer. Each window is a segment, and gives the same text at every step.

Differs from Macháček et al. 2023: the end of the committed words in a new hypothesis is found by
aligning the texts, so that word times are not needed; words are compared without case and
punctuation; the text before the buffered audio is not part of the prompt.
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
"""Function ``policy(hypotheses, n)`` that returns how many words can be committed.

``hypotheses`` holds the latest hypotheses, newest last, each as the list of its uncommitted words
without case and punctuation. The result counts from the first word of the newest hypothesis.
"""


def agreement(hypotheses: Sequence[Sequence[str]], n: int) -> int:
    """Returns the common prefix length of the last ``n`` hypotheses; 0 if there are fewer."""
    if len(hypotheses) < n:
        return 0
    last = hypotheses[-n:]
    for index, words in enumerate(zip(*last, strict=False)):
        if len(set(words)) > 1:
            return index
    return min(map(len, last))


def hold(hypotheses: Sequence[Sequence[str]], n: int) -> int:
    """Returns the number of words of the newest hypothesis minus ``n``, at least 0."""
    return max(0, len(hypotheses[-1]) - n)


POLICIES: Mapping[str, tuple[Policy, int, int]] = {
    "agreement": (agreement, 2, 1),
    "hold": (hold, 3, 0),
}
"""Policies by name, each with the default and the smallest allowed value of ``n``."""


def policy_of(spec: str) -> tuple[Policy, int]:
    """Parses a policy's name with an optional ``n``, such as ``agreement`` or ``hold:n=4``.

    Raises:
        UnknownNameError: There is no such policy.
        OptionError: The policy has no such option, or the value is out of range.
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
    """Decides which words of successive hypotheses are committed; needs their texts only.

    Args:
        policy: Policy that decides which words are stable.
        n: Parameter of the policy.
    """

    def __init__(self, policy: Policy, n: int) -> None:
        self.policy, self.n = policy, n
        self._committed: list[str] = []  # committed words whose audio is still kept
        self._open: list[list[str]] = []  # of the last hypotheses, after the committed words

    def offer(self, words: Sequence[str]) -> tuple[int, int]:
        """Adds a hypothesis and commits its stable words.

        Returns:
            Start and end index of the newly committed words, the end excluded. Words from the end
            index on are provisional.
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
            words: The words to drop: the first words of the newest hypothesis, all committed.
        """
        del self._committed[: covered([bare(word) for word in words], self._committed)]


def bare(word: str) -> str:
    """Returns the word without case and punctuation; a word of punctuation alone is kept."""
    return "".join(c for c in word.casefold() if not is_marks(c)) or word.strip()


def covered(committed: Sequence[str], words: Sequence[str]) -> int:
    """Returns how many words at the start of a new hypothesis repeat the committed words.

    The number is the length of the prefix of ``words`` with the smallest edit distance to
    ``committed``; of equally near prefixes, the one nearest in length. It is 0 if two or more words
    are committed and none of them matches: the new hypothesis no longer contains them, as happens
    with words hallucinated in a pause.

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
    """Result of one step of a stream.

    Attributes:
        audio_s: Seconds of audio received so far; the JSON key is ``heard_s``.
        ready_s: Time at which the step would have ended if its audio had arrived in real time, in
            seconds from the beginning of the stream. A step begins when its audio is complete and
            the step before has ended.
        committed: Newly committed words, each with the space before it; they never change.
        provisional: Words after the committed words in the current hypothesis; they may change.
        words: The committed words with times and confidences; ``None``: word timestamps are off.
    """

    audio_s: float
    ready_s: float
    committed: list[str]
    provisional: list[str]
    words: list[Word] | None = None

    @property
    def text(self) -> str:
        """The newly committed text; concatenated over all updates, it is the transcript."""
        return "".join(self.committed)

    def as_dict(self) -> dict[str, Any]:
        """Returns the update as a JSON object, as ``mmdecode stream --json`` prints it."""
        return {
            "heard_s": self.audio_s,
            "ready_s": self.ready_s,
            "committed": self.committed,
            "provisional": self.provisional,
            "words": self.words,
        }


@dataclass(frozen=True)
class _Hypothesis:
    """Transcript of the buffered audio at one step.

    Attributes:
        words: Words, each with the space before it.
        timed: The same words with their times in the stream; ``None``: word timestamps are off.
        start_s: Start of the first segment, in seconds from the start of the buffer; 0 if there is
            no segment.
        ends: For each segment its end in seconds from the start of the buffer, and the number of
            words up to that end.
    """

    words: list[str]
    timed: list[Word] | None
    start_s: float
    ends: list[tuple[float, int]]


class Stream:
    """Transcribes one recording while its audio arrives.

    Args:
        transcriber: Transcriber that every step calls, with its options. With voice activity
            detection (``vad``) pauses are not transcribed. With word timestamps audio can also be
            dropped up to a boundary between two words.
        policy: Name of one of `POLICIES`, with an optional ``n``, such as ``agreement:n=3``.
        step_s: Seconds of audio between updates.
        longest_s: Most seconds of audio in the buffer; ``None``: `Recognizer.kept_s` of the model's
            family, which for Whisper is one window.

    The text depends on the samples and on ``step_s``, but not on how the samples are divided into
    blocks.

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
                f"step_s={step_s}; expected more than 0 and at most half of longest_s, "
                f"{longest_s / 2:g} s"
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
        """Adds the next samples, and transcribes as often as they complete a step.

        Args:
            samples: Mono float32 samples, ``(samples,)``, any number of them.
            rate: Their sampling rate in Hz, which has to be that of the transcriber; ``None``: it
                is not checked.

        Returns:
            One update per completed step: often none, several for a long block.

        Raises:
            InputError: The samples have another data type, shape or rate, or are not finite.
            OptionError: The stream is finished.
        """
        if self._finished:
            raise OptionError("the stream is finished; make a new Stream for another recording")
        self._check(samples, rate)
        waiting = np.concatenate([self._waiting, samples])
        whole = len(waiting) - len(waiting) % self._step
        self._waiting = waiting[whole:].copy()  # a view would keep the whole block
        return [self._update(waiting[at : at + self._step]) for at in range(0, whole, self._step)]

    def finish(self) -> Update:
        """Transcribes the rest of the audio, commits all words and closes the stream."""
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
        """Runs one step: transcribes the buffer, commits stable words, and drops audio."""
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
        """Transcribes the buffered audio."""
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
        """Chooses how much audio is dropped from the start of the buffer.

        Args:
            found: The hypothesis of this step.
            end: How many of its words are committed.

        Returns:
            Number of samples to drop, and number of the hypothesis' words in these samples.
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
    """Returns the words of a segment, each with the space before it."""
    if segment.words is not None:
        return [word.text for word in segment.words]
    if language in SPACELESS:
        return [c for c in segment.text if not c.isspace()]
    return [f" {word}" for word in segment.text.split()]
