"""`Stream`: transcribes one recording while its audio arrives, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np

from mmdecode.asr.decoding.repetition import first_round_end
from mmdecode.asr.results import Transcript, Word
from mmdecode.asr.streaming.commits import Commits, bare
from mmdecode.asr.streaming.hypothesis import Hypothesis, evidence_of, following, words_of
from mmdecode.asr.streaming.policies import LOGIT, TIME, CommitPolicy, Stable, policy_of
from mmdecode.asr.streaming.setting import (
    continuing,
    options_for,
    redrafting,
    refuse_no_transcriber,
)
from mmdecode.asr.transcriber import Transcriber
from mmdecode.errors import InputError, OptionError


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
        appeared_s: For each committed word, seconds of audio after which it first appeared in a
            hypothesis and stayed: its emission time without the wait for the commit.
        error: Always ``None``, so that updates can be checked like a `Failure`.
    """

    audio_s: float
    ready_s: float
    committed: list[str]
    provisional: list[str]
    words: list[Word] | None = None
    appeared_s: list[float] = field(default_factory=list)
    error: ClassVar[None] = None

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
            "appeared_s": self.appeared_s,
        }


class Stream:
    """Transcribes one recording while its audio arrives.

    Args:
        transcriber: Transcriber that every step calls, with its options. With voice activity
            detection (``vad``) pauses are not transcribed. With word timestamps audio can also be
            dropped up to a boundary between two words.
        policy: A commit policy, or its name with options, such as ``agreement:n=3``, see
            `mmdecode.asr.streaming.policies.POLICIES`. Word timestamps are turned on for a policy
            that needs them.
        step_s: Seconds of audio between updates.
        longest_s: Most seconds of audio in the buffer; ``None``: `Recognizer.kept_s` of the model's
            family, which for Whisper is one window.
        redraft: Whether each step drafts from the last hypothesis, where it has the audio in
            common with it, before the transcriber's own drafter. The text is the same without.

    The text depends on the samples and on ``step_s``, but not on how the samples are divided into
    blocks.

    Attributes:
        policy: The commit policy.
        rate: Sampling rate of the samples, in Hz.
        transcriber: Transcriber that every step calls, with the options that a stream needs.
        ended: Whether the stream was closed and its last words are committed.

    Raises:
        OptionError: A value is out of range, or the model has no evidence that the policy needs.
        UnknownNameError: There is no such policy.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        policy: CommitPolicy | str = "agreement",
        step_s: float = 1.0,
        longest_s: float | None = None,
        redraft: bool = True,
    ) -> None:
        refuse_no_transcriber(transcriber)
        self.policy, self.rate = policy_of(policy), transcriber.sampling_rate
        ours = transcriber.recognizer
        longest_s = ours.kept_s if longest_s is None else longest_s
        options = options_for(transcriber, self.policy, longest_s)
        if not 1 / self.rate <= step_s <= longest_s / 2:
            raise OptionError(
                f"a step of {step_s} s (step_s); expected more than 0 and at most "
                f"{longest_s / 2:g} s, half of the audio that a stream keeps (longest_s)"
            )
        if isinstance(self.policy, Stable):
            transcriber = continuing(transcriber, self.policy)
            redraft = True
        decoder = redrafting(transcriber) if redraft else transcriber.decoder
        if options != transcriber.options or decoder is not transcriber.decoder:
            transcriber = transcriber.with_options(decoder, **vars(options))
        self.transcriber = transcriber
        self._redraft, self._encoder_cache = redraft, transcriber.recognizer.encoder_cache()
        self._commits = Commits(self.policy)
        self._step, self._longest = round(step_s * self.rate), int(longest_s * self.rate)
        self._waiting, self._taken = np.zeros(0, np.float32), 0  # audio not transcribed yet
        self._asked = 0  # samples of the step that is being decoded
        self._audio = np.zeros(0, np.float32)  # kept audio, which the next step transcribes again
        self._received = 0  # samples, those that were cut off included
        self._ready_s = 0.0
        self._language: str | None = None
        self._draft: list[int] = []  # tokens of the last hypothesis in the kept audio
        self._open: tuple[list[str], list[Word] | None] = (
            [],
            [] if options.word_timestamps else None,
        )
        self._appeared: list[tuple[str, float]] = []  # open words, and when they first appeared
        self._undelivered: list[Update] = []  # of steps before one that raised an error
        self._finished = False
        self.ended = False

    @property
    def audio_s(self) -> float:
        """Seconds of audio transcribed so far, in whole steps."""
        return self._received / self.rate

    @property
    def waiting_s(self) -> float:
        """Seconds of audio received that no step has taken yet."""
        return (len(self._waiting) - self._taken) / self.rate

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

        An error of a step loses nothing: the next call takes the step again, and also returns the
        updates of the steps before it.
        """
        self.check(samples, rate)
        self.put(samples)
        return self._updates()

    def finish(self) -> Update:
        """Transcribes the rest of the audio, commits all words and closes the stream.

        Raises:
            OptionError: The stream is finished already.
        """
        self.close()
        *before, update = self._updates()
        committed = [word for one in (*before, update) for word in one.committed]
        appeared_s = [at for one in (*before, update) for at in one.appeared_s]
        words = None
        if update.words is not None:
            words = [word for one in (*before, update) for word in one.words or ()]
        return replace(update, committed=committed, words=words, appeared_s=appeared_s)

    def _updates(self) -> list[Update]:
        """Takes all steps that are due."""
        found = self._undelivered
        while self.is_due:
            began = time.perf_counter()
            request = self.request()
            if request is None:
                found.append(self.advance(None, lambda: self._ready_s))
            else:
                transcript = self.transcriber(request)
                found.append(self.advance(transcript, partial(self._ready_since, began)))
        self._undelivered = []
        return found

    def _ready_since(self, began: float) -> float:
        """Time at which a step ends that began with the clock at ``began``."""
        return max(self._ready_s, self.audio_s) + time.perf_counter() - began

    # ---- one step, in parts that a pool of streams calls; call `feed` and `finish` otherwise

    def put(self, samples: np.ndarray) -> None:
        """Adds samples that were checked, and transcribes nothing; see `feed`."""
        self._waiting = np.concatenate([self._waiting[self._taken :], samples])
        self._taken = 0

    def close(self, discard: bool = False) -> None:
        """Ends the audio, and transcribes nothing; see `finish`.

        Args:
            discard: Whether only one more step is taken; waiting audio after it is discarded.
        """
        if self.ended:
            raise OptionError("the stream is finished already")
        self._finished = True
        if discard:
            self._waiting = self._waiting[: self._taken + self._step]

    @property
    def is_due(self) -> bool:
        """Whether a step can be taken: its audio is complete, or the stream was closed."""
        left = len(self._waiting) - self._taken
        return left >= self._step or (self._finished and not self.ended)

    def check(self, samples: np.ndarray, rate: int | None) -> None:
        """Raises the errors of `feed`."""
        if self._finished:
            raise OptionError("the stream is finished; make a new Stream for another recording")
        if rate not in (None, self.rate):
            raise InputError(
                f"samples at {rate} Hz; the model takes {self.rate} Hz: resample the whole stream "
                "with one resampler, such as soxr.ResampleStream"
            )
        if getattr(samples, "dtype", None) != np.float32 or np.ndim(samples) != 1:
            kind = getattr(samples, "dtype", type(samples).__name__)
            raise InputError(
                f"samples are {kind} of shape {np.shape(samples)}; expected a float32 array in "
                "[-1, 1] of one channel: convert others by .astype('float32'), divide 16-bit "
                "integers by 32768, average channels"
            )
        if not np.isfinite(samples).all():
            raise InputError(
                f"samples are NaN or infinite, after {self.audio_s:g} s; expected finite numbers"
            )

    def request(self) -> dict[str, Any] | None:
        """Returns the input of the transcriber for the next step; changes nothing.

        Returns:
            The buffered audio with what is known of it; ``None``: the stream was closed, and all
            of its audio is transcribed, so that its last words are committed without another pass.
        """
        samples = self._waiting[self._taken : self._taken + self._step]
        self._asked = len(samples)
        if not self._asked:
            return None
        kind = self.policy.evidence
        return {
            "audio": np.concatenate([self._audio, samples]),
            "language": self._language,
            "of_stream": {
                "draft": self._draft if self._redraft else (),
                "evidence": None if kind == TIME else kind,
                "encoder_cache": self._encoder_cache,
            },
        }

    def _take(self) -> None:
        """Moves the audio of the step that was decoded from the waiting to the kept audio."""
        samples = self._waiting[self._taken : self._taken + self._asked]
        self._audio = np.concatenate([self._audio, samples])
        self._taken += len(samples)
        self._received += len(samples)
        if len(self._waiting) - self._taken < self._step:  # a view would keep the whole block
            self._waiting, self._taken = self._waiting[self._taken :].copy(), 0

    def advance(self, found: Transcript | None, ready: Callable[[], float]) -> Update:
        """Takes the audio of a step, commits its stable words and drops audio.

        Args:
            found: Transcript of the `request` of the step; ``None``: there was none.
            ready: Function that returns the time at which the step ended, see `Update`.
        """
        self._take()
        last = self._finished and not self.waiting_s
        if found is None:
            words, timed = self._open
            committed, provisional = words, list[str]()
        else:
            hypothesis = self._hypothesis(found)
            begin, end = self._commits.offer(hypothesis.words, hypothesis.evidence)
            end = len(hypothesis.words) if last else self._drop(hypothesis, end)
            committed, provisional = hypothesis.words[begin:end], hypothesis.words[end:]
            self._appear(hypothesis.words[begin:])
            timed = hypothesis.timed and hypothesis.timed[begin:end]
            self._open = provisional, hypothesis.timed and hypothesis.timed[end:]
        if last:
            self.ended = True
            self.release()
        appeared_s = [at for _, at in self._appeared[: len(committed)]]
        del self._appeared[: len(committed)]
        self._ready_s = max(self._ready_s, self.audio_s, ready())  # words come in order
        return Update(
            audio_s=self.audio_s,
            ready_s=round(self._ready_s, 6),
            committed=committed,
            provisional=provisional,
            words=timed,
            appeared_s=appeared_s,
        )

    def _appear(self, words: Sequence[str]) -> None:
        """Notes the open words of a hypothesis; those after a change appear now."""
        keys = [bare(word) for word in words]
        before = [key for key, _ in self._appeared]
        same = len(
            list(takewhile(lambda pair: pair[0] == pair[1], zip(keys, before, strict=False)))
        )
        new = [(key, self.audio_s) for key in keys[same:]]
        self._appeared = [*self._appeared[:same], *new]

    def release(self) -> None:
        """Drops all audio and encoder states, at the end of the stream."""
        empty = np.zeros(0, np.float32)
        self._audio, self._waiting, self._taken = empty, empty, 0
        self._encoder_cache, self._draft = None, []

    def _drop(self, hypothesis: Hypothesis, end: int) -> int:
        """Drops audio from the start of the buffer, and returns how many words are committed.

        Args:
            hypothesis: Hypothesis of this step.
            end: How many of its words are stable; if the buffer is full, more are committed.
        """
        cut, count = self._cut(hypothesis, end)
        self._audio = self._audio[cut:].copy()
        self._draft = [
            int(token) if cut else token  # without evidence it only drafts
            for (end_s, _), own in zip(hypothesis.ends, hypothesis.tokens, strict=True)
            if end_s * self.rate > cut
            for token in own
        ]
        if isinstance(self.policy, Stable):  # timestamps that close the text are decided again
            is_text = self.transcriber.recognizer.is_text
            while self._draft and not is_text(self._draft[-1]):
                self._draft.pop()
        if count > end:
            self._commits.commit(count - end)
            end = count
        if cut:
            self._commits.forget(hypothesis.words[:count])
        return end

    def _hypothesis(self, found: Transcript) -> Hypothesis:
        """Makes the hypothesis of a transcript of the buffered audio."""
        start_s = (self._received - len(self._audio)) / self.rate
        words: list[str] = []
        timed: list[Word] = []
        evidence: list[float] = []
        ends, tokens = [], []
        weighed: Sequence[Sequence[Any]] = [segment.tokens for segment in found.segments]
        if self.policy.evidence == LOGIT:
            weighed = following(weighed, self.transcriber.recognizer.is_text)
        for segment, given in zip(found.segments, weighed, strict=True):
            own = words_of(segment, found.language)
            words += own
            timed += [
                replace(word, start_s=start_s + word.start_s, end_s=start_s + word.end_s)
                for word in segment.words or ()
            ]
            if self.policy.evidence == TIME:
                evidence += [self.audio_s - word.end_s for word in timed[len(evidence) :]]
            elif self.policy.evidence is not None:
                evidence += evidence_of(given, own, self.transcriber.recognizer.text)
            ends.append((segment.end_s, len(words)))
            tokens.append(list(segment.tokens))
        if self._commits.count:  # language detection is unreliable on the first seconds
            self._language = found.language
        once = first_round_end([bare(word) for word in words])
        if once is not None:
            words, timed, evidence = words[:once], timed[:once], evidence[:once]
            ends = [(end_s, min(count, once)) for end_s, count in ends]
        return Hypothesis(
            words,
            timed if self.transcriber.options.word_timestamps else None,
            found.segments[0].start_s if found.segments else 0.0,
            ends,
            evidence if self.policy.evidence is not None else None,
            tokens,
        )

    def _cut(self, found: Hypothesis, end: int) -> tuple[int, int]:
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
