"""START HERE for long audio: `LongForm`, the loop over the windows of many recordings.

A recording is read window by window. For a model with timestamps, the next window starts at the end
of the last predicted segment. For other models windows are cut at pauses before decoding, so that a
step can take several windows of a recording (`mmdecode.asr.recognizers`). In ``chunked`` mode
windows begin at fixed times, a step takes several of a recording, and their texts are merged by
`mmdecode.asr.decoding.chunks`.

Each step takes windows of several recordings, encodes them once and decodes them together. Windows
that fail a threshold are decoded again at the next temperature. The text of a recording does not
depend on the other recordings of the batch: prompts of different lengths are decoded in separate
calls, and sampling noise is derived from recording, window and attempt. transformers' batched
long-form generation does not tell which of these a row belongs to, hence a loop of our own. For
Whisper the loop follows transformers' ``generation_whisper.py`` for one recording at a time; a
test compares tokens and segments with it.

Read on: `fallback` (one attempt at a window), `segmentation` (segments of a window), `chunks`
(merging of overlapping windows), `n_best`, `mmdecode.asr.alignment` (word times).

Drafters that copy tokens from a text get that text per row, as ``mm_inputs["source_ids"]``. It is
the unfinished segment of the last window, with timestamps relative to the new window, followed by
the finished segments. For a window that is decoded again, it is the failed attempt.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmdecode.asr.alignment.cross_attention import Spoken, Timer
from mmdecode.asr.alignment.evidence import Evidence
from mmdecode.asr.alignment.words import Token, timed_words
from mmdecode.asr.audio.blanks import detector_for
from mmdecode.asr.audio.vad import Timeline
from mmdecode.asr.decoding import hallucinations
from mmdecode.asr.decoding.chunks import join, join_windows
from mmdecode.asr.decoding.fallback import Attempts, Result
from mmdecode.asr.decoding.hallucinations import Verdict, WindowTimes
from mmdecode.asr.decoding.job import Job, Window
from mmdecode.asr.decoding.n_best import Alternatives
from mmdecode.asr.decoding.segmentation import without_repetition
from mmdecode.asr.recognizers.base import Recognizer
from mmdecode.asr.recognizers.contract import Encoded, Span, changes_audio
from mmdecode.asr.results import Piece
from mmdecode.draft.none import NoDraft
from mmdecode.engine.encoding import grouped
from mmdecode.errors import OptionError
from mmdecode.runs.items import Failed, Watch, each, tried

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmdecode.asr.audio.reading import Source
    from mmdecode.asr.audio.recording import Recording
    from mmdecode.decoder import Decoder


HINT = "lower batch_size or n_best, or load the model in half precision"
"""Hint of the error that is raised if a single recording does not fit into memory."""


class LongForm:
    """Transcribes recordings with one model, window by window.

    Args:
        recognizer: Recogniser of the model.
        decoder: Decoder of the windows.

    Raises:
        OptionError: The overlap is not shorter than a window, or beam search is combined with a
            draft or guide.
        IncompatibleError: The model cannot be decoded with the draft or guide.
    """

    def __init__(self, recognizer: Recognizer, decoder: Decoder) -> None:
        self.recognizer, self.options = recognizer, recognizer.options
        recognizer.check(decoder)
        self.overlap = self._overlap()
        if self.options.beams > 1:
            _check_plain(decoder)
        self.attempts = Attempts(recognizer, decoder, self.options)
        self.alternatives = Alternatives(self.attempts) if self.options.n_best else None
        self.voice = detector_for(self.options, recognizer)
        self.needs_waveforms = changes_audio(decoder.guide)
        self.timer = recognizer.timer()

    def _overlap(self) -> int:
        """Returns the overlap of windows in frames, rounded to whole timestamp steps."""
        ours, seconds = self.recognizer, self.options.overlap_s
        whole = ours.window_frames
        frames = whole // 2 if seconds is None else round(seconds / ours.frame_s)
        if frames >= whole:
            raise OptionError(
                f"overlap_s={seconds}; expected less than a window, {whole * ours.frame_s:g} s"
            )
        return frames - frames % ours.stride

    @torch.no_grad()
    def run(
        self,
        sources: Iterable[Source],
        progress: Callable[[float], None] | None = None,
        watch: Watch | None = None,
        batch_size: int | None = None,
        steps: bool = False,
    ) -> Iterator[Job | tuple[int, Failed]]:
        """Yields each recording when it is transcribed, or its index and error when it failed.

        Args:
            sources: The recordings; up to ``batch_size`` of them are open at a time. An iterator is
                asked for more after each step, also if it had none left before.
            progress: Called after each step with the seconds of audio that it transcribed.
            watch: Notes which recordings are being decoded, in case the process crashes.
            batch_size: Batch size; ``None``: that of the options.
            steps: Whether unfinished recordings are also yielded, after each step.
        """
        size = batch_size or self.options.batch_size
        waiting = iter(enumerate(sources))
        jobs: list[Job] = []
        while True:
            while len(jobs) < size and (entry := next(waiting, None)):
                job = tried(partial(self._open, *entry), HINT)
                if isinstance(job, Failed):
                    yield entry[0], job
                else:
                    jobs.append(job)
            if not jobs:
                return
            before = {job.index: job.done_s if job.seek else 0.0 for job in jobs}
            failed: dict[int, Failed] = {}
            windows: list[tuple[Window, Any]] = []
            for job in jobs:  # one may have changed or vanished since it was measured
                read = tried(partial(self._windows, job, size - len(windows)), HINT)
                if isinstance(read, Failed):
                    failed[job.index] = read
                else:
                    windows += read
            for (window, _), result in each(
                windows,
                self._step,
                hint=HINT,
                name=lambda one: one[0].job.name,
                watch=watch,
                attempt=self._attempt,
            ):
                if isinstance(result, Failed):
                    failed.setdefault(window.job.index, result)
                elif window.job.index not in failed:
                    moved = tried(partial(self._advance, window, result), HINT)
                    if isinstance(moved, Failed):
                        failed[window.job.index] = moved
            yield from failed.items()
            jobs = [job for job in jobs if job.index not in failed]
            if progress is not None:
                progress(sum(job.done_s - before[job.index] for job in jobs))
            ended = [job for job in jobs if job.seek >= job.frames]
            jobs = [job for job in jobs if job.seek < job.frames]
            if steps:
                yield from jobs
            yield from ended

    def _open(self, index: int, source: Source) -> Job:
        """Reads a recording once for its length and hash; with ``vad`` cuts out its silence."""
        language = self.recognizer.language_of(source)
        if self.options.allow_truncated:
            source = replace(source, allow_truncated=True)
        speech: Recording | None = None
        if self.voice is None:
            speech = self.recognizer.open(source)
            timeline = Timeline.whole(speech.duration_s)
        else:
            source, timeline = self.voice.cut(source, self.recognizer.rate)
            if timeline.stretches or not timeline.duration_s:  # no samples are still an error
                speech = self.recognizer.open(source)
        return Job(
            index=index,
            name=source.name,
            speech=speech,
            frame_s=self.recognizer.frame_s,
            timeline=timeline,
            language=language,
            conditioned=self.options.condition_on_prev_tokens,
            context=self.recognizer.initial_context,
            missing=source.missing,
            draft=source.draft,
            evidence=source.evidence,
        )

    def _attempt(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the decoder's counters ignore calls that raise an error."""
        decoder = self.attempts.decoder
        return decoder.stats.attempt() if decoder is not None else contextlib.nullcontext()

    def _windows(self, job: Job, room: int) -> list[tuple[Window, Any]]:
        return list(self._read(job, room))

    def _read(self, job: Job, room: int) -> Iterator[tuple[Window, Any]]:
        """Yields the windows of a recording that can be decoded now, at most ``room`` of them."""
        ours = self.recognizer
        for _ in range(room):
            if job.speech is None or job.seek >= job.frames:
                return
            span = self._span(job)
            if span.following is not None and ours.is_silent(job.speech, job.seek, span.frames):
                job.seek, job.joins = span.following, span.joined
                continue
            inputs = ours.read(job.speech, job.seek, span.frames)
            reads = self.timer is not None and self.timer.reads_samples
            samples = ours.samples(job.speech, job.seek, span.frames) if reads else None
            waveform = (
                ours.waveform(job.speech, job.seek, span.frames) if self.needs_waveforms else None
            )
            joined = job.joins or self.options.mode == "chunked"
            window = Window(job, job.windows, job.seek, span.frames, joined, samples, waveform)
            job.windows += 1
            if span.following is not None:
                job.seek, job.joins = span.following, span.joined
            yield window, inputs
            if span.following is None:
                return

    def _span(self, job: Job) -> Span:
        """Returns length and successor of the next window of a recording."""
        assert job.speech is not None, "it has frames"
        if self.options.mode != "chunked":
            return self.recognizer.span(job.speech, job.seek, job.timeline.seams)
        whole = self.recognizer.window_frames
        count = min(job.frames - job.seek, whole)
        # what a last window would hold alone is less than the overlap
        last = job.seek + whole >= job.frames
        following = job.frames if last else job.seek + count - self.overlap
        return Span(count, following, joined=True)

    def _step(self, read: Sequence[tuple[Window, Any]]) -> list[Result]:
        """Encodes and decodes windows; decodes windows that fail a threshold again."""
        ours = self.recognizer
        windows = [window for window, _ in read]
        seconds = [window.count * ours.frame_s for window in windows]
        encoded = ours.encode([inputs for _, inputs in read], seconds)
        waveforms = [window.waveform for window in windows if window.waveform is not None]
        encoded = replace(encoded, waveforms=waveforms)
        self._detect_languages(windows, encoded)
        ids = [self._prompt(window.job) for window in windows]
        device = ours.model.device
        results = self._decode(windows, ids, encoded)
        if self.alternatives is not None:
            for rows, prompt in _by_length(ids, range(len(windows)), device):
                names = [self._request(windows[row], "n-best") for row in rows]
                found = self.alternatives(prompt, encoded.rows(rows), names)
                for row, tries in zip(rows, found, strict=True):
                    results[row].n_best = tries
        if self.timer is not None:
            self._time(self.timer, windows, ids, results, encoded)
        self._weigh(windows, ids, results, encoded)
        return results

    def _decode(
        self, windows: list[Window], ids: list[list[int]], encoded: Encoded
    ) -> list[Result]:
        """Returns the result of each window: the first attempt that did not fail, else the last."""
        results: dict[int, Result] = {}
        sources = [window.job.source or list(window.job.draft) for window in windows]
        pending = list(range(len(windows)))
        for attempt, temperature in enumerate(self.options.temperatures):
            for rows, prompt in _by_length(ids, pending, self.recognizer.model.device):
                found = self.attempts(
                    prompt,
                    encoded.rows(rows),
                    temperature,
                    [self._request(windows[row], attempt) for row in rows],
                    [sources[row] for row in rows],
                )
                for row, result in zip(rows, found, strict=True):
                    results[row] = replace(result, attempts=attempt + 1)
            pending = [row for row in pending if results[row].failed]
            for row in pending:
                sources[row] = results[row].tokens
        return [results[row] for row in range(len(windows))]

    def _time(
        self,
        timer: Timer,
        windows: list[Window],
        ids: list[list[int]],
        results: list[Result],
        encoded: Encoded,
    ) -> None:
        """Replaces the tokens of results by `Token`, which have times and probabilities."""
        ours, states = self.recognizer, encoded.states
        assert states is not None, "only families that encode windows time words"
        spoken = [
            Spoken(
                prompt=ids[row],
                tokens=[] if results[row].silent else results[row].tokens,
                rules=ours.rules(len(ids[row])),
                offset_s=window.seek * ours.frame_s,
                frames=-(-window.count // ours.stride),
                features=encoded.inputs[row],
                samples=window.samples,
            )
            for row, window in enumerate(windows)
        ]
        for result, tokens in zip(results, timer(spoken, states), strict=True):
            if tokens:
                result.tokens = [*tokens]

    def _weigh(
        self,
        windows: list[Window],
        ids: list[list[int]],
        results: list[Result],
        encoded: Encoded,
    ) -> None:
        """Adds evidence to the tokens of recordings that ask for it, by one more pass."""
        ours = self.recognizer
        rows = [
            row
            for row, window in enumerate(windows)
            if window.job.evidence and results[row].tokens and not results[row].silent
        ]
        if not rows:
            return
        kinds = [windows[row].job.evidence or "" for row in rows]
        prompts, tokens = [ids[row] for row in rows], [results[row].tokens for row in rows]
        found = Evidence(ours)(kinds, prompts, tokens, encoded.rows(rows))
        for row, kind, numbers in zip(rows, kinds, found, strict=True):
            window, result = windows[row], results[row]
            timeline = window.job.timeline
            end_s = timeline.at((window.seek + window.count) * ours.frame_s)
            if kind == "attention":
                numbers = [number + timeline.duration_s - end_s for number in numbers]
            elif kind == "ending" and window.seek + window.count < window.job.frames:
                numbers = [1.0] * len(numbers)  # another window goes on with the text
            result.tokens = list(map(Token.weighed, result.tokens, numbers))

    def _request(self, window: Window, attempt: int | str) -> str:
        """Returns the string that the sampling noise of an attempt is derived from."""
        assert window.job.speech is not None
        return f"{window.job.speech.key}/{window.number}/{attempt}"

    def _detect_languages(self, windows: list[Window], encoded: Encoded) -> None:
        """Detects the language of recordings that have none yet, by their first window."""
        first: dict[int, int] = {}
        for row, window in enumerate(windows):
            if window.job.language is None and self.recognizer.detects:
                first.setdefault(window.job.index, row)
        rows = list(first.values())
        if not rows:
            return
        found = self.recognizer.detected(encoded.rows(rows))
        for row, language in zip(rows, found, strict=True):
            windows[row].job.language = language

    def _prompt(self, job: Job) -> list[int]:
        """Returns the decoder prompt of the next window of a recording."""
        context = job.context if job.conditioned else self.recognizer.initial_context
        return self.recognizer.prompt(job.language, context)

    def _advance(self, window: Window, result: Result) -> None:
        """Adds a window's segments to its recording, and sets start and context of the next one."""
        job, count, ours = window.job, window.count, self.recognizer
        job.results.append(result)
        job.attempts += result.attempts
        job.conditioned = self.options.condition_on_prev_tokens and result.temperature < 0.5
        job.source = []
        follows = self._follows(window)
        if result.silent:
            job.seek += count if follows else 0
            return
        offset = window.seek * ours.stamp_s / ours.stride
        whole = ours.steps(count)
        segments, stamps, rest = ours.split(result.tokens, whole, self.options.mode == "sequential")
        if result.repetitive and self.options.loop_guard == "cut":
            segments = without_repetition(segments, ours.is_text)
        pieces = [
            Piece(
                offset + first * ours.stamp_s, offset + last * ours.stamp_s, tokens, result, offset
            )
            for first, last, tokens in segments
        ]
        if not follows:
            self._join(window, pieces, offset)
            return
        forward = count if stamps is None else stamps * ours.stride
        verdict = self._hallucination_verdict(window, pieces)
        if verdict is not None:
            pieces, segments, rest = pieces[: verdict.keep], segments[: verdict.keep], []
            forward = self._forward(window, verdict.next_start)
        job.pieces += pieces
        for piece in pieces:
            # of two timestamps at the end the second only opens the next segment
            double = len(piece.tokens) > 2 and not ours.is_text(piece.tokens[-2])
            job.context += piece.tokens[:-1] if double else piece.tokens
        job.context = job.context[-ours.max_context :]
        if result.repetitive and self.options.loop_guard != "report":
            job.context, job.conditioned = ours.initial_context, False
        job.seek += forward if forward > 0 else count  # never stand still
        job.source = rest + [token for _, _, tokens in segments for token in tokens]

    def _follows(self, window: Window) -> bool:
        """Whether this window's tokens determine the start of the next one."""
        return self.options.mode == "sequential" and self.recognizer.capabilities.timestamps

    def _join(self, window: Window, pieces: list[Piece], offset: float) -> None:
        """Adds the segments of a window that may overlap the window before, merging the texts."""
        job, ours = window.job, self.recognizer
        if not window.joined:
            job.pieces += pieces
            return
        given = job.pieces, pieces, offset, ours.is_text
        if ours.capabilities.timestamps:
            job.pieces = join(*given)
        else:
            job.pieces = join_windows(*given, ours.starts_word)

    def _hallucination_verdict(self, window: Window, pieces: list[Piece]) -> Verdict | None:
        """Decides which segments are kept as not hallucinated; ``None``: all of them."""
        job, threshold = window.job, self.options.hallucination_silence_threshold
        ours = self.recognizer
        if threshold is None:
            return None
        recording_end = job.frames * ours.frame_s
        words = timed_words(
            [ours.text_tokens(piece.tokens) for piece in pieces],
            ours.tokenizer,
            ours.code_of(job.language),
            lambda start, end: (start, end),
            recording_end,
        )
        start = window.seek * ours.frame_s
        times = WindowTimes(
            start=start,
            end=start + ours.window_frames * ours.frame_s,
            audio_end=start + window.count * ours.frame_s,
            recording_end=recording_end,
            previous_end=job.last_word_end_s,
        )
        verdict = hallucinations.judge(words, times, threshold)
        kept = words if verdict is None else words[: verdict.keep]
        ends = (word.end_s for segment in kept for word in segment)
        job.last_word_end_s = max(ends, default=job.last_word_end_s)
        return verdict

    def _forward(self, window: Window, start_s: float) -> int:
        """Returns the frames from a window's start to ``start_s``, rounded down to a timestamp.

        It is at least one timestamp step, so that the loop makes progress.
        """
        if start_s == math.inf:
            return window.job.frames - window.seek
        ours = self.recognizer
        at = math.floor(start_s / ours.stamp_s + 1e-6) * ours.stride
        return max(at - window.seek, ours.stride)


def _check_plain(decoder: Decoder) -> None:
    if decoder.guide is not None or not isinstance(decoder.draft, NoDraft):
        raise OptionError(
            "beams cannot be combined with a draft or a guide: beam search is done by "
            "transformers, which supports neither; leave them out, or set beams=1"
        )


def _by_length(
    ids: list[list[int]], rows: Iterable[int], device: torch.device
) -> Iterator[tuple[list[int], Tensor]]:
    """Groups rows by prompt length; yields row indices and prompts ``(B, P)``, shortest first."""
    for group in grouped([len(one) for one in ids], rows):
        yield group, torch.tensor([ids[row] for row in group], device=device)
