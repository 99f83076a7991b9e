"""START HERE for long audio: `LongForm`, Whisper's sequential algorithm over many recordings.

A recording is read window by window; where the model says a segment ended decides where the next
window starts. Inside transformers' batched long form nothing can know which recording, window and
attempt a row is, so the loop is here: each step takes one window of every open recording, encodes
them once, decodes them together, and redoes those that fail a threshold at the next temperature. A
recording's text depends on nothing but the recording: rows of unequal prompt length are decoded in
separate calls, and noise is keyed by (recording, window, attempt).

The rules follow transformers' ``generation_whisper.py`` for one recording at a time; a test holds
tokens and segments to it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.asr import prompts
from mmdecode.asr.features import Mel, Speech
from mmdecode.errors import MMDecodeError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mmdecode.asr.audio import Source
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.engine.decoder import Decoder


@dataclass
class Result:
    """One attempt at a window."""

    tokens: list[int]
    temperature: float
    avg_logprob: float | None = None
    no_speech_prob: float | None = None
    failed: bool = False
    silent: bool = False


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
        speech: Its features.
        language: Its language token.
        seek: First frame not yet transcribed.
        window: Windows begun.
        attempts: Windows decoded, repeats included.
        conditioned: Whether the next window is shown the text so far.
        pieces: Segments so far.
    """

    index: int
    speech: Speech
    language: int | None
    conditioned: bool
    seek: int = 0
    window: int = 0
    attempts: int = 0
    pieces: list[Piece] = field(default_factory=list)

    @property
    def done_s(self) -> float:
        """Seconds transcribed."""
        mel = self.speech.mel
        return min(self.seek * mel.hop / mel.rate, self.speech.duration_s)


class LongForm:
    """The window loop of one model.

    Args:
        model: A ``WhisperForConditionalGeneration``.
        extractor: Its feature extractor.
        decoder: How windows are decoded.
        options: Settings.
    """

    def __init__(
        self, model: Any, extractor: Any, decoder: Decoder, options: TranscribeOptions
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
        self.prompts = prompts.Prompts.of(self.config, options)

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
                    speech = Speech(entry[1], self.mel, self.options.padding)
                except MMDecodeError as error:
                    yield entry[0], error
                    continue
                conditioned = self.options.condition_on_prev_tokens
                jobs.append(Job(entry[0], speech, self.prompts.language, conditioned))
            if not jobs:
                return
            read: list[Job] = []
            windows: list[Tensor] = []
            for job in list(jobs):
                try:
                    windows.append(job.speech.window(job.seek))
                    read.append(job)
                except MMDecodeError as error:  # changed or vanished since it was measured
                    jobs.remove(job)
                    yield job.index, error
            before = sum(job.done_s for job in read)
            if read:
                self._step(read, torch.stack(windows))
            if progress is not None:
                progress(sum(job.done_s for job in read) - before)
            ended = [job for job in jobs if job.seek >= job.speech.frames]
            jobs = [job for job in jobs if job.seek < job.speech.frames]
            yield from ended

    def _step(self, jobs: list[Job], features: Tensor) -> None:
        """One window of every job: encode, decode, repeat where needed, cut into segments."""
        features = features.to(self.model.device, self.encoder.conv1.weight.dtype)
        audio = self.encoder(features).last_hidden_state
        self._detect_languages(jobs, audio)
        results: dict[int, Result] = {}
        pending = list(range(len(jobs)))
        for attempt, temperature in enumerate(self.options.temperatures):
            ids = [self._prompt(jobs[row]) for row in pending]
            for width in sorted({len(prompt) for prompt in ids}):
                rows = [r for r, prompt in zip(pending, ids, strict=True) if len(prompt) == width]
                prompt = torch.tensor([p for p in ids if len(p) == width], device=audio.device)
                names = [f"{jobs[r].speech.key}/{jobs[r].window}/{attempt}" for r in rows]
                found = self._decode(prompt, audio[rows], features[rows], temperature, names)
                results.update(zip(rows, found, strict=True))
            for row in pending:
                jobs[row].attempts += 1
            pending = [row for row in pending if results[row].failed]
            if not pending:
                break
        for row, job in enumerate(jobs):
            self._advance(job, results[row])

    def _detect_languages(self, jobs: list[Job], audio: Tensor) -> None:
        rows = [r for r, job in enumerate(jobs) if job.language is None and self.prompts.languages]
        if not rows:
            return
        start = torch.full((len(rows), 1), self.prompts.start, device=audio.device)
        logits = self._logits_at_end(start, audio[rows])
        choices = torch.tensor(self.prompts.languages, device=audio.device)
        best = choices[logits[:, choices].argmax(1)].tolist()
        for row, language in zip(rows, best, strict=True):
            jobs[row].language = language

    def _prompt(self, job: Job) -> list[int]:
        initial = self.prompts.initial(job.language)
        if not (job.conditioned and job.pieces):
            return initial
        text: list[int] = []
        for piece in job.pieces:
            tokens = piece.tokens
            # of two timestamps at the end the second only says that the next segment follows
            double = len(tokens) > 2 and tokens[-2] >= self.prompts.timestamp_begin
            text += tokens[:-1] if double else tokens
        keep = self.model.config.max_target_positions // 2 - 1
        return [int(self.prompts.previous or 0), *text[-keep:], *initial]

    def _decode(
        self,
        prompt: Tensor,
        audio: Tensor,
        features: Tensor,
        temperature: float,
        names: list[str],
    ) -> list[Result]:
        """One attempt at windows with prompts of one length."""
        options, width = self.options, prompt.shape[1]
        wants_scores = options.logprob_threshold is not None
        output = self.decoder(
            self.model,
            prompt,
            logits_processor=prompts.processors(self.config, width, options, temperature),
            stopping_criteria=StoppingCriteriaList(),
            generation_config=GenerationConfig(
                max_length=self._max_length(width),
                do_sample=temperature > 0,
                num_beams=1,
                eos_token_id=self.config.eos_token_id,
                pad_token_id=self.prompts.pad,
                output_scores=wants_scores,
                return_dict_in_generate=wants_scores,
            ),
            encoder_outputs=BaseModelOutput(last_hidden_state=audio),
            mm_inputs={"input_features": features},
            mm_request=names,
        )
        sequences = (output.sequences if wants_scores else output)[:, width:].tolist()
        no_speech: list[float | None] = [None] * len(sequences)
        if options.no_speech_threshold is not None:
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
            self._judge(result)
            results.append(result)
        return results

    def _any_language(self) -> int | None:
        return self.prompts.languages[0] if self.prompts.languages else None

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
        """Sets ``failed`` and ``silent``, and takes the end token off."""
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

    def _advance(self, job: Job, result: Result) -> None:
        job.window += 1
        count = min(job.speech.frames - job.seek, self.mel.window_frames)
        low = result.temperature < 0.5
        job.conditioned = self.options.condition_on_prev_tokens and low
        if result.silent:
            job.seek += count
            return
        offset = job.seek * self.stamp_s / self.stride
        whole = int(count * self.frame_s / self.stamp_s)
        if self.options.timestamps:
            cuts, stamps = split_segments(result.tokens, self.prompts.timestamp_begin, whole)
        else:
            cuts, stamps = [(0, whole, result.tokens)], None
        for first, last, tokens in cuts:
            start = offset + first * self.stamp_s
            job.pieces.append(Piece(start, offset + last * self.stamp_s, tokens, result))
        forward = count if stamps is None else stamps * self.stride
        job.seek += forward if forward > 0 else count  # never stand still


def split_segments(
    tokens: list[int], begin: int, whole: int
) -> tuple[list[tuple[int, int, list[int]]], int | None]:
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
