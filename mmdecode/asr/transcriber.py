"""`Transcriber`: transcripts of recordings of any length."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from transformers import AutoConfig

import mmdecode.models.causal_whisper_config  # noqa: F401, registers it
from mmdecode import registry
from mmdecode.asr.audio.reading import Source, source_of
from mmdecode.asr.decoding.job import Ended, Job
from mmdecode.asr.decoding.long_form import HINT, LongForm
from mmdecode.asr.decoding.n_best import hypotheses
from mmdecode.asr.decoding.segments import SegmentBuilder
from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.recognizers import of_type, refuse_beyond
from mmdecode.asr.results import Failure, Segment, Transcript
from mmdecode.checkpoints import (
    code_trusted,
    dtype_of,
    loading,
    local_path,
    placed,
    trusting_as_asked,
)
from mmdecode.decoder import Decoder
from mmdecode.engine.trace import Round
from mmdecode.errors import InputError, OptionError, refuse_unknown
from mmdecode.model_names import full_name
from mmdecode.runs.items import Failed, OnError, Watch, collected, tried

if TYPE_CHECKING:
    from mmdecode.asr.correction.transcripts import ListCorrection
    from mmdecode.asr.correction.windows import WindowCorrector
    from mmdecode.engine.contracts import AcceptanceRule, Drafter, Guide
    from mmdecode.engine.stats import Stats


class Transcriber:
    """Transcribes recordings of any length in batches; the text does not depend on the batch.

    Args:
        model: A Whisper, a Moonshine, or another encoder-decoder of speech, see
            `mmdecode.asr.recognizers`.
        processor: Its processor.
        decoder: Decoder with drafter, guide and acceptance rule; ``None``: a decoder with neither
            drafter nor guide.
        options: Settings; ``None``: the defaults.
        correct: Corrector of each window's text, or its name with options, see
            `mmdecode.asr.correction.transcripts`; ``None``: the text is not corrected.

    Raises:
        UnsupportedModelError: The model is no recogniser, or the processor is of another model.
        OptionError: The model does not support one of the options, or both word timestamps and a
            correction are asked for.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        decoder: Decoder | None = None,
        options: TranscribeOptions | None = None,
        correct: ListCorrection | str | None = None,
    ) -> None:
        family = of_type(getattr(model.config, "model_type", type(model).__name__))
        self.model, self.processor = model.eval(), processor
        self.decoder = decoder or Decoder(seed=0)
        self.options = options or TranscribeOptions()
        self.recognizer = family(model, processor, self.options)
        self._loop = LongForm(self.recognizer, self.decoder)
        self.corrector: WindowCorrector | None = None
        if correct is not None:
            self.corrector = self._correcting(correct)

    @classmethod
    @trusting_as_asked
    def from_pretrained(
        cls,
        model_id: str | os.PathLike[str],
        draft: Drafter | str | None = None,
        guide: Guide | str | None = None,
        accept: AcceptanceRule | str = "auto",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        quantize: str | None = None,
        seed: int = 0,
        correct: ListCorrection | str | None = None,
        *,
        trust_remote_code: bool = False,
        **options: Any,
    ) -> Transcriber:
        """Loads a model and builds its decoder.

        Args:
            model_id: A folder, a Hub id, a short name such as ``large-v3``, or ``zoo:NAME``.
            draft: A drafter, or its name with options; for a zoo model ``medusa`` loads its heads.
            guide: A guide, or its name with options.
            accept: Acceptance rule, see `mmdecode.Decoder`.
            device: Device of the model; ``None``: CUDA if available.
            dtype: ``None``: float32; ``auto``: see `mmdecode.checkpoints.dtype_of`.
            quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.
            seed: Seed of the noise that sampling uses.
            correct: Corrector of the text, such as ``uadf:model=zoo:lm-synth``; ``None``: none.
            trust_remote_code: Whether to run Python code from the model's folder: read it first.
            **options: Fields of `TranscribeOptions`.

        Raises:
            InputError: The checkpoint cannot be loaded.
            OptionError: An option does not exist or is out of range.
        """
        settings = make_options(options)
        name = full_name(str(model_id))
        model, processor = load(name, device, dtype, quantize, settings)
        at_hand = registry.context_of(model, processor, name)
        if isinstance(draft, str):
            draft = registry.create("draft", draft, **at_hand)
        if isinstance(guide, str):
            guide = registry.create("guide", guide, **at_hand)
        return cls(model, processor, Decoder(draft, guide, accept, seed), settings, correct)

    def with_options(self, decoder: Decoder | None = None, **options: Any) -> Transcriber:
        """Returns a transcriber with the same model and corrector and other options.

        Args:
            decoder: Another decoder; ``None``: the same.
            **options: Fields of `TranscribeOptions` that change.
        """
        method = self.corrector.method if self.corrector else None
        settings = replace(self.options, **options)
        return Transcriber(self.model, self.processor, decoder or self.decoder, settings, method)

    @property
    def sampling_rate(self) -> int:
        """Sampling rate of arrays that come without one, in Hz."""
        return self.recognizer.rate

    @property
    def window_s(self) -> float:
        """Length of a window, in seconds."""
        return self.recognizer.window_frames * self.recognizer.frame_s

    @property
    def stats(self) -> Stats:
        """The decoder's counters, over all calls."""
        return self.decoder.stats

    @overload
    def __call__(
        self, inputs: str | os.PathLike[str] | bytes, *, on_error: None = None
    ) -> Transcript: ...

    @overload
    def __call__(self, inputs: list[Any], *, on_error: Literal["raise"]) -> list[Transcript]: ...

    @overload
    def __call__(
        self,
        inputs: Any,
        *,
        on_error: OnError | None = None,
        trace: list[list[Round]] | None = None,
    ) -> Any: ...

    def __call__(
        self,
        inputs: Any,
        *,
        on_error: OnError | None = None,
        trace: list[list[Round]] | None = None,
    ) -> Any:
        """Transcribes one recording or many.

        Args:
            inputs: A path, the bytes of an audio file, a file that is open for reading, an array,
                ``(array, rate)``, see `mmdecode.asr.audio.reading.source_of`; or a list of these.
            on_error: ``raise`` the first error, or ``return`` a `Failure` for each; ``None``: raise
                for a single recording, return for a list.
            trace: A list to which the rounds of every window are appended, see
                `mmdecode.engine.trace.Round`.

        Returns:
            A `Transcript` for a single recording. For a list, a list in the same order, with a
            `Failure` for each recording that could not be read.

        Raises:
            InputError: A single recording cannot be read.
        """
        self._loop.attempts.trace = trace
        try:
            return collected(self.stream(inputs), is_single(inputs), on_error)
        finally:
            self._loop.attempts.trace = None

    def stream(
        self,
        inputs: Any,
        progress: Callable[[float], None] | None = None,
        *,
        watch: Watch | None = None,
        batch_size: int | None = None,
    ) -> Iterator[Transcript | Failure]:
        """Like a call, but yields each result as soon as its recording ends, and never raises.

        A recording that fails yields a `Failure`, and the other recordings are still transcribed.
        With a correction, results wait until its batch is full or no recording is left.

        Args:
            inputs: Recordings, as for a call.
            progress: Called after each step with the seconds of audio that it transcribed.
            watch: Progress of a job that makes several calls; see `mmdecode.runs.items`.
            batch_size: Batch size; ``None``: that of the options.

        Raises:
            MMDecodeError: A configuration error, which would make every recording fail.
        """
        watch = Watch() if watch is None else watch
        yield from watch.released(self._outcomes(inputs, progress, watch, batch_size))

    def _outcomes(
        self,
        inputs: Any,
        progress: Callable[[float], None] | None,
        watch: Watch,
        batch_size: int | None,
    ) -> Iterator[tuple[Transcript | Failure, Failed | None]]:
        sources = []
        for index, item in enumerate([inputs] if is_single(inputs) else inputs):
            source = tried(partial(source_of, item, self.sampling_rate, index), HINT)
            if isinstance(source, Failed):
                yield failure_of(f"array {index}", index, source), source
            else:
                sources.append((index, source))
        indices = [index for index, _ in sources]
        opened = [source for _, source in sources]
        found = self._transcripts(self._loop.run(opened, progress, watch, batch_size), indices)
        if self.corrector is not None:
            found = self.corrector.corrected(found, watch, batch_size)
        for ended in found:
            if isinstance(ended.result, Failed):
                name = opened[ended.index].name
                yield failure_of(name, indices[ended.index], ended.result), ended.result
            else:
                yield ended.result, None

    def _transcripts(
        self, done: Iterable[Job | tuple[int, Failed]], indices: Sequence[int]
    ) -> Iterator[Ended[Transcript | Failed]]:
        for one in done:
            if isinstance(one, Job):
                made = tried(partial(self._transcript, one, indices[one.index]), HINT)
                yield Ended(one.index, made, one)
            else:
                yield Ended(*one)

    def stream_segments(self, recording: Any) -> Iterator[Segment]:
        """Yields the segments of one recording as soon as each window is decoded.

        They equal the segments of a call. With word timestamps, a segment is yielded once the start
        of the next word is known. Yielded segments and their audio are not kept, so memory does not
        grow with the recording.

        Args:
            recording: One recording, as for a call.

        Raises:
            OptionError: Several recordings are given; or the mode is ``chunked`` or texts are
                corrected, where segments are known only at the end of the recording.
            InputError: The recording cannot be read.
        """
        if not is_single(recording):
            raise OptionError(
                "stream_segments takes one recording; call it for each, or use stream"
            )
        self._refuse_segments("stream_segments")
        return self._segments_of(source_of(recording, self.sampling_rate))

    def _refuse_segments(self, method: str) -> None:
        """Refuses options with which segments are known only at the end of a recording."""
        if self.options.mode != "sequential" or self.corrector is not None:
            raise OptionError(
                f"{method} needs mode='sequential' and no correction: otherwise segments are known "
                "only at the end of the recording; call the transcriber instead"
            )

    def _segments_of(self, source: Source) -> Iterator[Segment]:
        for done, segments in self._by_window([source], keep=False):
            if not isinstance(done, Job):
                raise done[1].problem
            yield from segments

    def stream_windows(
        self,
        sources: Iterable[Source],
        wanted: Callable[[int], bool] = lambda index: True,
        batch_size: int | None = None,
    ) -> Iterator[tuple[int, list[Segment], Transcript | Failure | None]]:
        """Yields new segments of recordings after each step, and their results as they end.

        Args:
            sources: The recordings. After each step as many are taken as the batch has room for;
                an iterator may go on after it had none left, as that of a queue does.
            wanted: Whether a recording is still wanted, by its index; asked after each step. One
                that is not ends without a result.
            batch_size: Batch size; ``None``: that of the options.

        Yields:
            Index, new segments, and result of a recording; ``None``: it goes on.

        Raises:
            OptionError: See `stream_segments`.
        """
        self._refuse_segments("stream_windows")
        names: dict[int, str] = {}
        indices = itertools.count()

        def named(source: Source) -> Source:
            names[next(indices)] = source.name
            return source

        for done, segments in self._by_window(map(named, sources), batch_size):
            index = done.index if isinstance(done, Job) else done[0]
            if not wanted(index):
                names.pop(index, None)
                if isinstance(done, Job):
                    done.seek = done.frames
                continue
            if not isinstance(done, Job):
                yield index, [], failure_of(names.pop(index), index, done[1])
            elif done.seek < done.frames:
                yield index, segments, None
            else:
                del names[index]
                yield index, segments, self._transcript(done, index)

    def _by_window(
        self, sources: Iterable[Source], batch_size: int | None = None, keep: bool = True
    ) -> Iterator[tuple[Job | tuple[int, Failed], list[Segment]]]:
        """Yields recordings after each step, each with its new segments; failed ones with none."""
        builders: dict[int, SegmentBuilder] = {}
        for done in self._loop.run(sources, batch_size=batch_size, steps=True):
            if not isinstance(done, Job):
                builders.pop(done[0], None)
                yield done, []
                continue
            builder = builders.setdefault(done.index, SegmentBuilder(self.recognizer, done, keep))
            ended = done.seek >= done.frames
            segments = builder.advance(last=ended)
            if ended:
                del builders[done.index]
            yield done, segments

    def _transcript(self, job: Job, index: int) -> Transcript:
        tokens = [int(token) for piece in job.pieces for token in piece.tokens]
        building = SegmentBuilder(self.recognizer, job)
        segments: list[Segment] = []
        if self.options.mode == "sequential":  # a result is that of one window
            for _, pieces in itertools.groupby(job.pieces, key=lambda piece: id(piece.result)):
                segments += building.take(list(pieces))
        else:
            building.hold(job.pieces)
        segments += building.take([], last=True)
        return Transcript(
            source=job.name,
            index=index,
            text=self.recognizer.joined([piece.tokens for piece in job.pieces]),
            segments=segments,
            language=self.recognizer.code_of(job.language),
            duration_s=job.timeline.duration_s,
            tokens=tokens,
            stats={
                "windows": job.windows,
                "attempts": job.attempts,
                "looped": sum(result.repetitive for result in job.results),
                "tokens": len(tokens),
            },
            timed_by="model" if self.recognizer.capabilities.timestamps else "windows",
            n_best=[hypotheses(result.n_best, self.recognizer.text) for result in job.results]
            if self.options.n_best
            else None,
            truncated=job.missing[0] if job.missing else None,
        )

    def _correcting(self, correct: ListCorrection | str) -> WindowCorrector:
        """Returns the corrector of this recogniser's transcripts."""
        from mmdecode.asr.correction.fusion import Acoustic
        from mmdecode.asr.correction.windows import WindowCorrector

        if self.options.word_timestamps:
            raise OptionError(
                "word_timestamps cannot be combined with correct: only the words of the recogniser "
                "have times, and correct changes them; leave one of the two out"
            )
        method: Any = correct
        if isinstance(correct, str):
            acoustic = Acoustic(model=self.model, tokenizer=self.processor.tokenizer)
            method = registry.create("correct", correct, recogniser=acoustic)
            method.follow(self.decoder.guide)
        return WindowCorrector(method, self._loop)


def failure_of(source: str, index: int, failed: Failed) -> Failure:
    """Makes the `Failure` of a recording."""
    return Failure(source=source, index=index, error=failed.error, kind=failed.kind)


def is_single(inputs: Any) -> bool:
    """Whether the input is one recording rather than a list of recordings.

    Raises:
        InputError: The input is neither.
    """
    if isinstance(inputs, (str, os.PathLike, bytes, bytearray, memoryview, Mapping, Source)):
        return True
    if hasattr(inputs, "ndim") or hasattr(inputs, "read"):
        return True
    if isinstance(inputs, tuple) and len(inputs) == 2 and hasattr(inputs[0], "ndim"):
        return not hasattr(inputs[1], "ndim") or inputs[1].ndim == 0
    if isinstance(inputs, Sequence) and inputs and isinstance(inputs[0], (int, float)):
        return True
    if not isinstance(inputs, Iterable):
        raise InputError(
            f"cannot transcribe {type(inputs).__name__}; expected a path, bytes, an open file, an "
            "array, (array, rate) or a list of these"
        )
    return False


def make_options(options: Mapping[str, Any]) -> TranscribeOptions:
    """Makes `TranscribeOptions` from a mapping of option names to values.

    Raises:
        OptionError: A name is unknown, or a value is out of range.
    """
    refuse_unknown(options, list(TranscribeOptions.__dataclass_fields__))
    return TranscribeOptions(**options)


def load(
    model_id: str,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    quantize: str | None = None,
    options: TranscribeOptions | None = None,
) -> tuple[Any, Any]:
    """Loads the model and the processor of a checkpoint.

    Args:
        model_id: A folder, a Hub id or another name of a checkpoint.
        device: Device of the model; ``None``: CUDA if available.
        dtype: Data type of the weights.
        quantize: ``int8`` or ``fp8``, see `mmdecode.quantize`; ``None``: weights as loaded.
        options: Options that the model family has to support; checked before weights are read.

    Raises:
        InputError: The checkpoint cannot be loaded.
        OptionError: The device or dtype does not exist, or the family does not support an option.
        UnsupportedModelError: The checkpoint is not a supported recogniser.
    """
    kind = dtype_of(dtype, model_id, device)
    path = local_path(model_id)
    with loading(model_id):
        config = AutoConfig.from_pretrained(path, trust_remote_code=code_trusted())
        family = of_type(config.model_type)
        if options is not None:
            refuse_beyond(family.capabilities, options, model_id)
        model, processor = family.load(path, config, kind)
    return placed(model.eval(), device, quantize), processor
