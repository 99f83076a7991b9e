"""START HERE for long audio: `LongForm`, Whisper's sequential algorithm over many recordings.

A recording is read window by window; where the model says a segment ended decides where the next
window starts. Inside transformers' batched long form nothing can know which recording, window and
attempt a row is, so the loop is here: each step takes one window of every open recording, encodes
them once, decodes them together, and redoes those that fail a threshold at the next temperature. A
recording's text depends on nothing but the recording: rows of unequal prompt length are decoded in
separate calls, and noise is keyed by (recording, window, attempt).

The rules follow transformers' ``generation_whisper.py`` for one recording at a time; a test holds
tokens and segments to it. In ``chunked`` mode windows are at fixed places instead, several of one
recording in a step, and joined at the end by `mmdecode.asr.chunks`.

A draft that copies from a text gets one per row, as ``mm_inputs["source_ids"]``: what the last
window left unfinished, its times counted from the new window's start, then what it finished; and
for a window that is redone, the attempt that failed.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.asr import prompts
from mmdecode.asr.alignment import Spoken, Timer
from mmdecode.asr.chunks import join
from mmdecode.asr.features import Mel, Speech
from mmdecode.asr.loops import first_round_end
from mmdecode.asr.n_best import beam_search
from mmdecode.asr.voice import Timeline, VoiceActivity
from mmdecode.errors import MMDecodeError, OptionError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmdecode.asr.audio import Source
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.engine.decoder import Decoder


Cut = tuple[int, int, list[int]]
"""Start, end and tokens; in timestamp steps from the start of the window."""


@dataclass
class Result:
    """One attempt at a window.

    Attributes:
        tokens: Without the end token.
        temperature: At which it was decoded.
        avg_logprob: ``None``: nothing asked for it.
        no_speech_prob: ``None``: nothing asked for it.
        failed: Whether it is to be redone.
        silent: Whether it is to be skipped.
        looped: Whether it ends in a loop.
        n_best: Alternatives, tokens and score, best first.
    """

    tokens: list[int]
    temperature: float
    avg_logprob: float | None = None
    no_speech_prob: float | None = None
    failed: bool = False
    silent: bool = False
    looped: bool = False
    n_best: list[tuple[list[int], float]] = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """One segment, times in seconds."""

    start: float
    end: float
    tokens: list[int]
    result: Result


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
        samples: What it was made of, where that is asked for.
    """

    job: Job
    number: int
    seek: int
    count: int
    samples: np.ndarray | None = None


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
        self.model, self.decoder, self.options = model, decoder, options
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
        if options.n_best and options.n_best_method == "beam" and decoder.guide is not None:
            raise OptionError(
                "n_best_method='beam' searches under the model's own law and knows no guide; use "
                "n_best_method='sample', or leave the guide out"
            )
        self.voice = VoiceActivity(options) if options.vad else None
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
        frames = whole // 3 if seconds is None else round(seconds / self.frame_s)
        if frames >= whole:
            raise OptionError(
                f"overlap_s={seconds}; expected less than a window, {whole * self.frame_s:g} s"
            )
        return frames - frames % self.stride

    @torch.no_grad()
    def run(
        self, sources: Sequence[Source], progress: Callable[[float], None] | None = None
    ) -> Iterator[Job | tuple[int, MMDecodeError]]:
        """Yields each recording as it ends, and the error of each that cannot be read.

        Args:
            sources: The recordings; as many are open at a time as the batch holds.
            progress: Called with the seconds of audio each step has transcribed.
        """
        waiting = iter(enumerate(sources))
        jobs: list[Job] = []
        while True:
            while len(jobs) < self.options.batch_size and (entry := next(waiting, None)):
                try:
                    jobs.append(self._open(*entry))
                except MMDecodeError as error:
                    yield entry[0], error
            if not jobs:
                return
            before = {job.index: job.done_s if job.seek else 0.0 for job in jobs}
            windows: list[Window] = []
            features: list[Tensor] = []
            for job in list(jobs):
                try:
                    for window, mel in self._read(job, self.options.batch_size - len(windows)):
                        windows.append(window)
                        features.append(mel)
                except MMDecodeError as error:  # changed or vanished since it was measured
                    jobs.remove(job)
                    yield job.index, error
            if windows:
                self._step(windows, torch.stack(features))
            if progress is not None:
                progress(sum(job.done_s - before[job.index] for job in jobs))
            ended = [job for job in jobs if job.seek >= job.frames]
            jobs = [job for job in jobs if job.seek < job.frames]
            yield from ended

    def _open(self, index: int, source: Source) -> Job:
        """A recording, measured; with ``vad`` without its silence."""
        language = self.prompts.language_of(source.language)
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
        )

    def _first_shown(self) -> list[int]:
        everywhere = self.options.prompt_condition_type == "all-segments"
        return [] if everywhere else list(self.prompts.prompt)

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
            window = Window(job, job.windows, job.seek, count, samples)
            job.windows += 1
            if chunked:  # what a last window would hold alone is less than the overlap
                last = job.seek + self.mel.window_frames >= job.frames
                job.seek = job.frames if last else job.seek + count - self.overlap
            yield window, mel

    def _step(self, windows: list[Window], features: Tensor) -> None:
        """Some windows: encode, decode, repeat where needed, cut into segments."""
        features = features.to(self.model.device, self.encoder.conv1.weight.dtype)
        audio = self.encoder(features).last_hidden_state
        self._detect_languages(windows, audio)
        ids = [self._prompt(window.job) for window in windows]
        sources = [window.job.source for window in windows]
        results: dict[int, Result] = {}
        pending = list(range(len(windows)))
        for attempt, temperature in enumerate(self.options.temperatures):
            for rows in _by_length(ids, pending):
                found = self._decode(
                    torch.tensor([ids[row] for row in rows], device=audio.device),
                    audio[rows],
                    features[rows],
                    temperature,
                    [self._request(windows[row], attempt) for row in rows],
                    [sources[row] for row in rows],
                )
                for row, result in zip(rows, found, strict=True):
                    self._judge(result)
                    results[row] = result
            for row in pending:
                windows[row].job.attempts += 1
            pending = [row for row in pending if results[row].failed]
            if not pending:
                break
            for row in pending:
                sources[row] = results[row].tokens
        if self.options.n_best:
            for rows in _by_length(ids, range(len(windows))):
                prompt = torch.tensor([ids[row] for row in rows], device=audio.device)
                names = [self._request(windows[row], "n-best") for row in rows]
                best = self._alternatives(prompt, audio[rows], features[rows], names)
                for row, texts in zip(rows, best, strict=True):
                    results[row].n_best = texts
        if self.timer is not None:
            self._time(self.timer, windows, ids, results, audio, features)
        for row, window in enumerate(windows):
            self._advance(window, results[row])

    def _time(
        self,
        timer: Timer,
        windows: list[Window],
        ids: list[list[int]],
        results: dict[int, Result],
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
        for row, tokens in enumerate(timer(spoken, audio)):
            if tokens:
                results[row].tokens = [*tokens]

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
        logits = self._logits_at_end(start, audio[rows])
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

    def _decode(
        self,
        prompt: Tensor,
        audio: Tensor,
        features: Tensor,
        temperature: float,
        names: list[str],
        sources: list[list[int]],
        scored: bool = False,
    ) -> list[Result]:
        """One attempt at windows with prompts of one length; ``scored``: with mean scores."""
        options, width = self.options, prompt.shape[1]
        wants_scores = scored or options.logprob_threshold is not None
        config = self._generation(width)
        config.update(
            do_sample=temperature > 0,
            num_beams=1,
            output_scores=wants_scores,
            return_dict_in_generate=wants_scores,
        )
        output = self.decoder(
            self.model,
            prompt,
            logits_processor=prompts.processors(self.config, width, options, temperature),
            stopping_criteria=StoppingCriteriaList(),
            generation_config=config,
            encoder_outputs=BaseModelOutput(last_hidden_state=audio),
            mm_inputs={"input_features": features, "source_ids": sources},
            mm_request=names,
        )
        sequences = (output.sequences if wants_scores else output)[:, width:].tolist()
        no_speech: list[float | None] = [None] * len(sequences)
        if options.no_speech_threshold is not None and not scored:
            at = width - len(self.prompts.initial(self.prompts.language or self._any_language()))
            logits = self._logits_at_end(prompt[:, : at + 1], audio)
            no_speech = logits.float().softmax(-1)[:, self.prompts.no_speech].tolist()
        results = []
        for row, ids in enumerate(sequences):
            end = ids.index(self.prompts.eos) + 1 if self.prompts.eos in ids else len(ids)
            result = Result(ids[:end], temperature, no_speech_prob=no_speech[row])
            if wants_scores:
                scores = torch.stack([step[row] for step in output.scores[:end]])
                chosen = torch.tensor(result.tokens, device=scores.device)
                result.avg_logprob = avg_logprob(scores, chosen, temperature)
            results.append(result)
        return results

    def _alternatives(
        self, prompt: Tensor, audio: Tensor, features: Tensor, names: list[str]
    ) -> list[list[tuple[list[int], float]]]:
        """N-best lists of windows with prompts of one length."""
        count, eos, width = self.options.n_best, self.prompts.eos, prompt.shape[1]
        if self.options.n_best_method == "beam":
            rules = prompts.processors(self.config, width, self.options, 0.0)
            config = self._generation(width)
            found = beam_search(self.model, prompt, audio, rules, count, config)
            return [
                [(ids[: ids.index(eos)] if eos in ids else ids, score) for ids, score in texts]
                for texts in found
            ]
        drawn = self._decode(
            prompt.repeat_interleave(count, 0),
            audio.repeat_interleave(count, 0),
            features.repeat_interleave(count, 0),
            1.0,
            [f"{name}/{number}" for name in names for number in range(count)],
            [[]] * (len(names) * count),
            scored=True,
        )
        lists = []
        for row in range(0, len(drawn), count):
            best: dict[tuple[int, ...], float] = {}
            for result in drawn[row : row + count]:
                tokens = result.tokens[: -1 if result.tokens[-1] == eos else None]
                best[tuple(tokens)] = result.avg_logprob or 0.0
            ranked = sorted(best.items(), key=lambda item: -item[1])
            lists.append([(list(tokens), score) for tokens, score in ranked])
        return lists

    def _any_language(self) -> int | None:
        return self.prompts.languages[0] if self.prompts.languages else None

    def _generation(self, width: int) -> GenerationConfig:
        return GenerationConfig(
            max_length=self._max_length(width),
            eos_token_id=self.config.eos_token_id,
            pad_token_id=self.prompts.pad,
        )

    def _max_length(self, width: int) -> int:
        most = self.model.config.max_target_positions
        if self.options.max_new_tokens is not None:
            return min(width + self.options.max_new_tokens, most)
        if self.config.max_new_tokens is not None:
            return min(width + self.config.max_new_tokens, most)
        if self.config.max_length is not None:
            return min(width + self.config.max_length, most)
        return most

    def _logits_at_end(self, ids: Tensor, audio: Tensor) -> Tensor:
        encoded = BaseModelOutput(last_hidden_state=audio)
        output = self.model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False)
        return output.logits[:, -1]

    def _judge(self, result: Result) -> None:
        """Sets ``failed``, ``silent`` and ``looped``, and takes the end token off."""
        options, tokens = self.options, result.tokens
        if options.compression_ratio_threshold is not None:
            ratio = compression_ratio(tokens, self.model.config.vocab_size)
            result.failed = ratio > options.compression_ratio_threshold
        if options.logprob_threshold is not None and result.avg_logprob is not None:
            unlikely = result.avg_logprob < options.logprob_threshold
            result.failed |= unlikely
            threshold = options.no_speech_threshold
            if threshold is not None and unlikely and (result.no_speech_prob or 0.0) > threshold:
                result.failed, result.silent = False, True
        if tokens[-1] == self.prompts.eos:
            result.tokens = tokens[:-1]
        result.looped = first_round_end(self._words(result.tokens)) is not None

    def _advance(self, window: Window, result: Result) -> None:
        job, count = window.job, window.count
        job.results.append(result)
        job.conditioned = self.options.condition_on_prev_tokens and result.temperature < 0.5
        job.source = []
        sequential = self.options.mode == "sequential"
        if result.silent:
            job.seek += count if sequential else 0
            return
        offset = window.seek * self.stamp_s / self.stride
        whole = int(count * self.frame_s / self.stamp_s)
        if self.options.timestamps:
            cuts, stamps = split_segments(result.tokens, self.prompts.timestamp_begin, whole)
        else:
            cuts, stamps = [(0, whole, result.tokens)], None
        rest = unfinished(result.tokens, cuts) if stamps is not None else []
        if rest and not sequential:
            cuts[-1][2].pop()  # the timestamp that opens the rest
            cuts.append((rest[0] - self.prompts.timestamp_begin, whole, rest))
        if result.looped and self.options.loop_guard == "cut":
            cuts = self._without_loop(cuts)
        pieces = [
            Piece(offset + first * self.stamp_s, offset + last * self.stamp_s, tokens, result)
            for first, last, tokens in cuts
        ]
        if not sequential:
            job.pieces = join(job.pieces, pieces, offset, self.prompts.timestamp_begin)
            return
        job.pieces += pieces
        for piece in pieces:
            # of two timestamps at the end the second only says that the next segment follows
            double = len(piece.tokens) > 2 and piece.tokens[-2] >= self.prompts.timestamp_begin
            job.shown += piece.tokens[:-1] if double else piece.tokens
        job.shown = job.shown[-self.most_shown :]
        if result.looped and self.options.loop_guard != "report":
            job.shown, job.conditioned = self._first_shown(), False
        forward = count if stamps is None else stamps * self.stride
        job.seek += forward if forward > 0 else count  # never stand still
        begin = self.prompts.timestamp_begin
        moved = [max(begin, t - (stamps or 0)) if t >= begin else t for t in rest]
        job.source = moved + [token for _, _, tokens in cuts for token in tokens]

    def _words(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens if token < self.prompts.timestamp_begin]

    def _without_loop(self, cuts: list[Cut]) -> list[Cut]:
        """Segments with the first round of the loop at their end, and none of the others.

        Times are kept: what the model said of them while it looped is all that is known.
        """
        left = first_round_end(self._words([t for _, _, tokens in cuts for t in tokens]))
        if left is None:  # part of it was in a tail that the next window decodes
            return cuts
        kept: list[Cut] = []
        for first, last, tokens in cuts:
            if not left:
                break
            said = []
            for token in tokens:
                is_word = token < self.prompts.timestamp_begin
                if left or not is_word:
                    said.append(token)
                    left -= is_word
            kept.append((first, last, said))
        return kept


def _by_length(ids: list[list[int]], rows: Iterable[int]) -> Iterator[list[int]]:
    """Rows whose prompts have one length, shortest first."""
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(len(ids[row]), []).append(row)
    for _, group in sorted(groups.items()):
        yield group


def unfinished(tokens: list[int], cuts: list[Cut]) -> list[int]:
    """What a window says behind its last complete segment, from its opening timestamp on.

    Args:
        tokens: Of the window.
        cuts: Its segments, the last one with both timestamps.
    """
    rest = tokens[sum(len(part) for _, _, part in cuts) - 1 :]
    return rest if len(rest) > 1 else []


def split_segments(tokens: list[int], begin: int, whole: int) -> tuple[list[Cut], int | None]:
    """Cuts a window's tokens where two timestamps meet.

    Args:
        tokens: Without the end token.
        begin: The first timestamp's id.
        whole: The window's length, in timestamp steps.

    Returns:
        (start, end, tokens) per segment, in timestamp steps; and where the next window starts, in
        the same unit, ``None`` where it starts behind this one.
    """
    stamped = [token >= begin for token in tokens]
    cuts = [i + 1 for i in range(len(tokens) - 1) if stamped[i] and stamped[i + 1]]
    if not cuts:
        times = [token - begin for token in tokens if token >= begin]
        return [(0, times[-1] if times and times[-1] else whole, tokens)], None
    closed = stamped[-2:] == [False, True]  # nothing is said behind a single timestamp
    if closed:
        cuts.append(len(tokens))
    else:
        cuts[-1] += 1  # the last segment shows both timestamps
    segments, last = [], 0
    for number, cut in enumerate(cuts):
        part = tokens[last:cut]
        ends = -2 if number == len(cuts) - 1 and not closed else -1
        segments.append((part[0] - begin, part[ends] - begin, part))
        last = cut
    return segments, None if closed else tokens[last - 2] - begin


def compression_ratio(tokens: list[int], vocab: int) -> float:
    """Bytes of the ids over their zlib-compressed bytes."""
    size = int(math.log2(vocab) / 8) + 1
    data = b"".join(token.to_bytes(size, "little") for token in tokens)
    return len(data) / len(zlib.compress(data))


def avg_logprob(scores: Tensor, tokens: Tensor, temperature: float) -> float:
    """Mean log-probability of the tokens, end token included, before the temperature.

    Args:
        scores: Processed, ``(L, V)``.
        tokens: ``(L,)``.
        temperature: What the scores were divided by; 0 for none.
    """
    log_p = (scores * (temperature or 1.0)).float().log_softmax(-1)
    return float(log_p.gather(1, tokens[:, None]).mean())
