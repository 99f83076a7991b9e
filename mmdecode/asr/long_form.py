"""START HERE for long audio: `LongForm`, Whisper's sequential algorithm over many recordings.

A recording is read window by window; where the model says a segment ended decides where the next
window starts. Inside transformers' batched long form nothing can know which recording, window and
attempt a row is, so the loop is here: each step takes one window of every open recording, encodes
them once, decodes them together, and redoes those that fail a threshold at the next temperature. A
recording's text depends on nothing but the recording: rows of unequal prompt length are decoded in
separate calls, and noise is keyed by (recording, window, attempt).

Read on: `attempts` (how a window is decoded and judged), `cuts` (where its segments end), `chunks`
(how windows are joined), `n_best`, `alignment` (when words were said).

The rules follow transformers' ``generation_whisper.py`` for one recording at a time; a test holds
tokens and segments to it. In ``chunked`` mode windows are at fixed places instead, several of one
recording in a step, and joined at the end by `mmdecode.asr.chunks`.

A draft that copies from a text gets one per row, as ``mm_inputs["source_ids"]``: what the last
window left unfinished, its times counted from the new window's start, then what it finished; and
for a window that is redone, the attempt that failed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmdecode.asr import hallucinations, prompts
from mmdecode.asr.alignment import Spoken, Timer
from mmdecode.asr.attempts import Attempts, Result
from mmdecode.asr.chunks import join
from mmdecode.asr.cuts import split_segments, unfinished, without_loop
from mmdecode.asr.features import Heard, Mel, Speech
from mmdecode.asr.hallucinations import Place, Verdict
from mmdecode.asr.n_best import Alternatives
from mmdecode.asr.voice import Timeline, VoiceActivity
from mmdecode.asr.words import timed_words
from mmdecode.engine.decoder import NoDraft
from mmdecode.errors import OptionError, UnsupportedModelError
from mmdecode.runs.items import Failed, Watch, each, tried

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmdecode.asr.audio import Source
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.engine.decoder import Decoder


ADVICE = "lower batch_size or n_best, or load the model in half precision"
"""What to do where one recording needs more memory than there is."""


@dataclass(frozen=True)
class Piece:
    """One segment, times in seconds; ``window`` is where the window began that it is of."""

    start: float
    end: float
    tokens: list[int]
    result: Result
    window: float = 0.0


@dataclass
class Job:
    """One recording on its way.

    Attributes:
        index: Its place in the input.
        name: What it is called.
        speech: Its features; ``None``: nobody speaks.
        timeline: Where the stretches that are transcribed stand in the recording.
        language: Its language token.
        conditioned: Whether the next window is shown the text so far.
        shown: The last tokens of the text so far.
        source: What a draft may copy from in the next window.
        seek: First frame not yet read.
        windows: Windows begun.
        attempts: Windows decoded, repeats included.
        results: What each window that ended came to.
        pieces: Segments so far.
        said_s: End of the last word so far, where the options ask for it.
        missing: What is missing of the recording, where that is allowed.
    """

    index: int
    name: str
    speech: Speech | None
    timeline: Timeline
    language: int | None
    conditioned: bool
    shown: list[int]
    source: list[int] = field(default_factory=list)
    seek: int = 0
    windows: int = 0
    attempts: int = 0
    results: list[Result] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    said_s: float = 0.0
    missing: list[str] = field(default_factory=list)

    @property
    def frames(self) -> int:
        """Feature frames to transcribe."""
        return self.speech.frames if self.speech else 0

    @property
    def done_s(self) -> float:
        """Seconds of the recording behind which nothing is transcribed yet."""
        if self.speech is None or self.seek >= self.frames:
            return self.timeline.duration_s
        mel = self.speech.mel
        return self.timeline.at(self.seek * mel.hop / mel.rate)


@dataclass(frozen=True)
class Window:
    """A part of a recording that the model hears at once.

    Attributes:
        job: The recording.
        number: Which of its windows, from 0.
        seek: Its first frame.
        count: Frames of the recording in it.
        samples: What it was made of, where words are timed by it.
        heard: The same as a guide may change it, where one does.
    """

    job: Job
    number: int
    seek: int
    count: int
    samples: np.ndarray | None = None
    heard: Heard | None = None


class LongForm:
    """The window loop of one model.

    Args:
        model: A ``WhisperForConditionalGeneration``.
        extractor: Its feature extractor.
        decoder: How windows are decoded.
        options: Settings.
        tokenizer: Its tokenizer; needed where the options show it a text or ask for words.
    """

    def __init__(
        self,
        model: Any,
        extractor: Any,
        decoder: Decoder,
        options: TranscribeOptions,
        tokenizer: Any = None,
    ) -> None:
        self.model, self.options = model, options
        self.encoder = model.get_encoder()
        self.stride = self.encoder.conv1.stride[0] * self.encoder.conv2.stride[0]
        self.mel = Mel(extractor, self.stride * model.config.max_source_positions)
        if len(self.mel.filters) != model.config.num_mel_bins:
            raise UnsupportedModelError(
                f"the feature extractor makes {len(self.mel.filters)} mel bands, the model takes "
                f"{model.config.num_mel_bins}; load the processor that belongs to the model"
            )
        self.frame_s = self.mel.hop / self.mel.rate
        self.stamp_s = self.stride * self.mel.hop / self.mel.rate
        self.config = model.generation_config
        self.prompts = prompts.Prompts.of(self.config, options, tokenizer)
        self.most_shown = model.config.max_target_positions // 2 - 1
        given = len(self.prompts.hotwords) + len(self.prompts.prompt)
        if given > self.most_shown:
            raise OptionError(
                f"prompt and hotwords have {given} tokens; the model can be shown "
                f"{self.most_shown}: shorten them"
            )
        if options.beams > 1:
            _check_plain(decoder)
        self.attempts = Attempts(model, decoder, options, self.prompts)
        self.alternatives = Alternatives(self.attempts) if options.n_best else None
        self.voice = VoiceActivity(options) if options.vad else None
        branches = getattr(getattr(decoder, "guide", None), "branches", ())
        self.hears = any(spec.view == "audio" for spec in branches)
        self.overlap = self._overlap()
        self.timer: Timer | None = None
        if options.word_timestamps:
            self.timer = Timer(
                model,
                tokenizer,
                options.word_timestamps,
                stamps=self.prompts.timestamp_begin,
                frame_s=self.stamp_s,
                rate=self.mel.rate,
            )

    def _overlap(self) -> int:
        """Frames that two windows share; timestamps then stay on the grid of the encoder."""
        whole = self.mel.window_frames
        seconds = self.options.overlap_s
        frames = whole // 2 if seconds is None else round(seconds / self.frame_s)
        if frames >= whole:
            raise OptionError(
                f"overlap_s={seconds}; expected less than a window, {whole * self.frame_s:g} s"
            )
        return frames - frames % self.stride

    @torch.no_grad()
    def run(
        self,
        sources: Sequence[Source],
        progress: Callable[[float], None] | None = None,
        watch: Watch | None = None,
        batch_size: int | None = None,
        steps: bool = False,
    ) -> Iterator[Job | tuple[int, Failed]]:
        """Yields each recording as it ends, and why one failed: whatever error it raised.

        Args:
            sources: The recordings; as many are open at a time as the batch holds.
            progress: Called with the seconds of audio each step has transcribed.
            watch: Keeps a note of the recordings that are decoded.
            batch_size: In the place of the options'.
            steps: Whether open recordings are yielded after each step too.
        """
        size = batch_size or self.options.batch_size
        waiting = iter(enumerate(sources))
        jobs: list[Job] = []
        while True:
            while len(jobs) < size and (entry := next(waiting, None)):
                job = tried(partial(self._open, *entry), ADVICE)
                if isinstance(job, Failed):
                    yield entry[0], job
                else:
                    jobs.append(job)
            if not jobs:
                return
            before = {job.index: job.done_s if job.seek else 0.0 for job in jobs}
            failed: dict[int, Failed] = {}
            windows: list[tuple[Window, Tensor]] = []
            for job in jobs:  # one may have changed or vanished since it was measured
                read = tried(partial(self._windows, job, size - len(windows)), ADVICE)
                if isinstance(read, Failed):
                    failed[job.index] = read
                else:
                    windows += read
            for (window, _), result in each(
                windows,
                self._step,
                advice=ADVICE,
                name=lambda one: one[0].job.name,
                watch=watch,
                attempt=self._attempt,
            ):
                if isinstance(result, Failed):
                    failed.setdefault(window.job.index, result)
                elif window.job.index not in failed:
                    moved = tried(partial(self._advance, window, result), ADVICE)
                    if isinstance(moved, Failed):
                        failed[window.job.index] = moved
            yield from failed.items()
            jobs = [job for job in jobs if job.index not in failed]
            if progress is not None:
                progress(sum(job.done_s - before[job.index] for job in jobs))
            if steps:
                yield from jobs
            ended = [job for job in jobs if job.seek >= job.frames]
            jobs = [job for job in jobs if job.seek < job.frames]
            yield from ended

    def _open(self, index: int, source: Source) -> Job:
        """A recording, measured; with ``vad`` without its silence."""
        language = self.prompts.language_of(source)
        if self.options.allow_truncated:
            source = replace(source, allow_truncated=True)
        speech: Speech | None = None
        if self.voice is None:
            speech = Speech(source, self.mel, self.options.padding)
            timeline = Timeline.whole(speech.duration_s)
        else:
            source, timeline = self.voice.cut(source, self.mel.rate)
            if timeline.stretches or not timeline.duration_s:  # no samples are still an error
                speech = Speech(source, self.mel, self.options.padding)
        return Job(
            index=index,
            name=source.name,
            speech=speech,
            timeline=timeline,
            language=language,
            conditioned=self.options.condition_on_prev_tokens,
            shown=self._first_shown(),
            missing=source.missing,
        )

    def _first_shown(self) -> list[int]:
        everywhere = self.options.prompt_condition_type == "all-segments"
        return [] if everywhere else list(self.prompts.prompt)

    def _attempt(self) -> contextlib.AbstractContextManager[None]:
        """What fails in here is not counted."""
        decoder = self.attempts.decoder
        return decoder.stats.attempt() if decoder is not None else contextlib.nullcontext()

    def _windows(self, job: Job, room: int) -> list[tuple[Window, Tensor]]:
        return list(self._read(job, room))

    def _read(self, job: Job, room: int) -> Iterator[tuple[Window, Tensor]]:
        """The windows of a recording that can be decoded now, at most ``room``."""
        chunked = self.options.mode == "chunked"
        for _ in range(room if chunked else 1):
            if job.speech is None or job.seek >= job.frames:
                return
            count = min(job.frames - job.seek, self.mel.window_frames)
            mel = job.speech.window(job.seek)
            reads = self.timer is not None and self.timer.reads_samples
            samples = job.speech.samples(job.seek) if reads else None
            heard = job.speech.heard(job.seek) if self.hears else None
            window = Window(job, job.windows, job.seek, count, samples, heard)
            job.windows += 1
            if chunked:  # what a last window would hold alone is less than the overlap
                last = job.seek + self.mel.window_frames >= job.frames
                job.seek = job.frames if last else job.seek + count - self.overlap
            yield window, mel

    def _step(self, read: Sequence[tuple[Window, Tensor]]) -> list[Result]:
        """Some windows: encode, decode, repeat where needed."""
        windows = [window for window, _ in read]
        features = torch.stack([mel for _, mel in read])
        features = features.to(self.model.device, self.encoder.conv1.weight.dtype)
        audio = self.encoder(features).last_hidden_state
        self._detect_languages(windows, audio)
        ids = [self._prompt(window.job) for window in windows]
        results = self._decode(windows, ids, audio, features)
        if self.alternatives is not None:
            for rows, prompt in _by_length(ids, range(len(windows)), audio.device):
                names = [self._request(windows[row], "n-best") for row in rows]
                found = self.alternatives(
                    prompt, audio[rows], features[rows], names, _heard(windows, rows)
                )
                for row, tries in zip(rows, found, strict=True):
                    results[row].n_best = tries
        if self.timer is not None:
            self._time(self.timer, windows, ids, results, audio, features)
        return results

    def _decode(
        self, windows: list[Window], ids: list[list[int]], audio: Tensor, features: Tensor
    ) -> list[Result]:
        """The last attempt at each window: the first that did not fail, if any."""
        results: dict[int, Result] = {}
        sources = [window.job.source for window in windows]
        pending = list(range(len(windows)))
        for attempt, temperature in enumerate(self.options.temperatures):
            for rows, prompt in _by_length(ids, pending, audio.device):
                found = self.attempts(
                    prompt,
                    audio[rows],
                    features[rows],
                    temperature,
                    [self._request(windows[row], attempt) for row in rows],
                    [sources[row] for row in rows],
                    _heard(windows, rows),
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
        audio: Tensor,
        features: Tensor,
    ) -> None:
        """Has the tokens of windows know when they were said."""
        spoken = [
            Spoken(
                prompt=ids[row],
                tokens=[] if results[row].silent else results[row].tokens,
                rules=prompts.processors(self.config, len(ids[row]), self.options, 0.0),
                offset_s=window.seek * self.frame_s,
                frames=-(-window.count // self.stride),
                features=features[row],
                samples=window.samples,
            )
            for row, window in enumerate(windows)
        ]
        for result, tokens in zip(results, timer(spoken, audio), strict=True):
            if tokens:
                result.tokens = [*tokens]

    def _request(self, window: Window, attempt: int | str) -> str:
        """What the noise of an attempt is keyed by."""
        assert window.job.speech is not None
        return f"{window.job.speech.key}/{window.number}/{attempt}"

    def _detect_languages(self, windows: list[Window], audio: Tensor) -> None:
        """By the first window of each recording whose language is not known."""
        first: dict[int, int] = {}
        for row, window in enumerate(windows):
            if window.job.language is None and self.prompts.languages:
                first.setdefault(window.job.index, row)
        rows = list(first.values())
        if not rows:
            return
        start = torch.full((len(rows), 1), self.prompts.start, device=audio.device)
        logits = self.attempts.logits_at_end(start, audio[rows])
        choices = torch.tensor(self.prompts.languages, device=audio.device)
        best = choices[logits[:, choices].argmax(1)].tolist()
        for row, language in zip(rows, best, strict=True):
            windows[row].job.language = language

    def _prompt(self, job: Job) -> list[int]:
        """What the decoder reads before it writes: texts shown to it, then the window's start."""
        head = list(self.prompts.hotwords)
        if self.options.prompt_condition_type == "all-segments":
            head += self.prompts.prompt
        shown = job.shown if job.conditioned else self._first_shown()
        before = head + shown[max(0, len(shown) + len(head) - self.most_shown) :]
        initial = self.prompts.initial(job.language)
        return [int(self.prompts.previous or 0), *before, *initial] if before else initial

    def _advance(self, window: Window, result: Result) -> None:
        """Takes a window's segments over, and says where and how the next one begins."""
        job, count, begin = window.job, window.count, self.prompts.timestamp_begin
        job.results.append(result)
        job.attempts += result.attempts
        job.conditioned = self.options.condition_on_prev_tokens and result.temperature < 0.5
        job.source = []
        sequential = self.options.mode == "sequential"
        if result.silent:
            job.seek += count if sequential else 0
            return
        offset = window.seek * self.stamp_s / self.stride
        whole = int(count * self.frame_s / self.stamp_s)
        if self.options.timestamps:
            cuts, stamps = split_segments(result.tokens, begin, whole)
        else:
            cuts, stamps = [(0, whole, result.tokens)], None
        rest = unfinished(result.tokens, cuts) if stamps is not None else []
        if rest and not sequential:
            cuts[-1][2].pop()  # the timestamp that opens the rest
            cuts.append((rest[0] - begin, whole, rest))
        if result.looped and self.options.loop_guard == "cut":
            cuts = without_loop(cuts, begin)
        pieces = [
            Piece(
                offset + first * self.stamp_s, offset + last * self.stamp_s, tokens, result, offset
            )
            for first, last, tokens in cuts
        ]
        if not sequential:
            job.pieces = join(job.pieces, pieces, offset, begin)
            return
        forward = count if stamps is None else stamps * self.stride
        verdict = self._doubt(window, pieces)
        if verdict is not None:
            pieces, cuts, rest = pieces[: verdict.keep], cuts[: verdict.keep], []
            forward = self._forward(window, verdict.next_start)
        job.pieces += pieces
        for piece in pieces:
            # of two timestamps at the end the second only says that the next segment follows
            double = len(piece.tokens) > 2 and piece.tokens[-2] >= begin
            job.shown += piece.tokens[:-1] if double else piece.tokens
        job.shown = job.shown[-self.most_shown :]
        if result.looped and self.options.loop_guard != "report":
            job.shown, job.conditioned = self._first_shown(), False
        job.seek += forward if forward > 0 else count  # never stand still
        moved = [max(begin, t - (stamps or 0)) if t >= begin else t for t in rest]
        job.source = moved + [token for _, _, tokens in cuts for token in tokens]

    def _doubt(self, window: Window, pieces: list[Piece]) -> Verdict | None:
        """What becomes of a window in which text may be made up; ``None``: all of it stays."""
        job, threshold = window.job, self.options.hallucination_silence_threshold
        if threshold is None:
            return None
        assert self.timer is not None, "the options ask for word times too"
        recording_end = job.frames * self.frame_s
        words = timed_words(
            [self.timer.text(piece.tokens) for piece in pieces],
            self.timer.tokenizer,
            self.prompts.code_of(job.language),
            lambda start, end: (start, end),
            recording_end,
        )
        start = window.seek * self.frame_s
        place = Place(
            start=start,
            end=start + self.mel.window_frames * self.frame_s,
            heard_end=start + window.count * self.frame_s,
            recording_end=recording_end,
            said=job.said_s,
        )
        verdict = hallucinations.judge(words, place, threshold)
        kept = words if verdict is None else words[: verdict.keep]
        job.said_s = max((word.end_s for said in kept for word in said), default=job.said_s)
        return verdict

    def _forward(self, window: Window, start_s: float) -> int:
        """Frames from a window to the timestamp step at or before a time; one step at least."""
        if start_s == math.inf:
            return window.job.frames - window.seek
        at = math.floor(start_s / self.stamp_s + 1e-6) * self.stride
        return max(at - window.seek, self.stride)


def _check_plain(decoder: Decoder) -> None:
    if decoder.guide is not None or not isinstance(decoder.draft, NoDraft):
        raise OptionError(
            "beams= is given with a draft or a guide, and beams are searched by transformers, "
            "without either; leave these out, or set beams=1"
        )


def _heard(windows: Sequence[Window], rows: Iterable[int]) -> list[Heard]:
    """Waveforms of some windows; none where nobody asked for them."""
    return [heard for row in rows if (heard := windows[row].heard) is not None]


def _by_length(
    ids: list[list[int]], rows: Iterable[int], device: torch.device
) -> Iterator[tuple[list[int], Tensor]]:
    """Rows whose prompts have one length, and these prompts; shortest first."""
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(len(ids[row]), []).append(row)
    for _, group in sorted(groups.items()):
        yield group, torch.tensor([ids[row] for row in group], device=device)
