"""Speed of speech recognisers: every drafter in every precision, on the same windows in turns.

The windows are those that the model in float32 decodes without a drafter, so that all ways of
decoding read the same audio whatever they write. In a turn each precision encodes a batch of
windows, and then each way decodes it from the encoder states of its precision; the order within a
turn is random. Undrafted float32 decoding takes part twice: the difference between its two rows is
the noise of the measurement. Ratios are of seconds of whole turns, encoder included, with a paired
bootstrap over turns, see `mmdecode.evaluation.speed.stopwatch.Cost.over`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from mmdecode import registry
from mmdecode.asr.decoding.fallback import Attempts
from mmdecode.asr.decoding.job import Job
from mmdecode.asr.decoding.long_form import LongForm
from mmdecode.asr.recognizers.generic import read_from
from mmdecode.decoder import Decoder
from mmdecode.engine.encoding import grouped
from mmdecode.errors import MMDecodeError, one_line
from mmdecode.evaluation.speed.draft_speed import AGAIN, PLAIN, reason_of
from mmdecode.evaluation.speed.stopwatch import Cost, timed, turn
from mmdecode.evaluation.stats.intervals import Estimate
from mmdecode.quantization.models import weight_bytes

if TYPE_CHECKING:
    from mmdecode.asr.audio.reading import Source
    from mmdecode.asr.recognizers.base import Recognizer
    from mmdecode.asr.recognizers.contract import Encoded

FP32 = "fp32"
"""Precision of the reference, which is decoded without a drafter."""
GENERATE = "generate"
"""Name of transformers' own loop."""
EXACT = (FP32, "int8")
"""Precisions in which a CPU computes a drafted token as an undrafted one."""


@dataclass(frozen=True)
class Spoken:
    """A window of a recording as a recogniser decodes it.

    Attributes:
        recording: Index of the recording.
        prompt: Prompt tokens of the decoder.
        inputs: Input of the encoder.
        seconds: Length in seconds, padding not counted.
        name: String that identifies the window.
        source: Token ids that a drafter may copy from.
    """

    recording: int
    prompt: list[int]
    inputs: Any
    seconds: float
    name: str
    source: list[int]


class _Recorded(Attempts):
    """Attempts whose windows are appended to ``windows``, for the recording numbered ``at``."""

    at: int
    windows: list[Spoken]

    def __call__(
        self,
        prompt: Tensor,
        encoded: Encoded,
        temperature: float,
        names: list[str],
        sources: list[list[int]],
    ) -> Any:
        rows = zip(prompt.tolist(), encoded.inputs, encoded.seconds, names, sources, strict=True)
        self.windows += [Spoken(self.at, *row) for row in rows]
        return super().__call__(prompt, encoded, temperature, names, sources)


def windows_of(
    recognizer: Recognizer,
    sources: Sequence[Source],
    done: Callable[[], object] = lambda: None,
) -> tuple[list[Spoken], dict[int, str]]:
    """Transcribes recordings without a drafter, and returns the windows that were decoded.

    Args:
        recognizer: Recogniser of the reference.
        sources: Recordings.
        done: Called after each recording.

    Returns:
        The windows of all recordings in order; and the error of each recording that cannot be
        transcribed, by its index.
    """
    loop = LongForm(recognizer, Decoder())
    loop.attempts = recorded = _Recorded(recognizer, loop.attempts.decoder, recognizer.options)
    recorded.windows = []
    failed: dict[int, str] = {}
    for recorded.at, source in enumerate(sources):
        for found in loop.run([source]):
            if not isinstance(found, Job):
                failed[recorded.at] = found[1].error
        done()
    return [window for window in recorded.windows if window.recording not in failed], failed


def batches_of(windows: Sequence[Spoken], size: int) -> list[list[int]]:
    """Splits windows into batches of up to ``size`` with prompts of one length, as indices."""
    groups = grouped([len(window.prompt) for window in windows])
    return [group[at : at + size] for group in groups for at in range(0, len(group), size)]


@dataclass
class Way:
    """A way of decoding: a drafter, or none, on the model in one precision.

    Attributes:
        name: Name of the drafter, or `PLAIN`, `AGAIN` or `GENERATE`.
        precision: Precision of the model.
        recognizer: Recogniser of the model.
        decoder: Decoder; ``None``: transformers' own loop.
        problem: Reason why it could not decode; ``None``: it could.
        tokens: Token ids by index of a window, without the end token.
        seconds: Seconds of decoding, by turn.
    """

    name: str
    precision: str
    recognizer: Recognizer
    decoder: Decoder | None
    problem: str | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def drafted(cls, draft: str, precision: str, recognizer: Recognizer, model_id: str) -> Way:
        """Builds the way of a drafter by its name; one that cannot be built has a ``problem``."""
        try:
            at_hand = registry.context_of(recognizer.model, recognizer.tokenizer, model_id)
            drafter = registry.create("draft", draft, **at_hand)
            return cls(draft, precision, recognizer, Decoder(drafter))
        except MMDecodeError as error:
            return cls(draft, precision, recognizer, Decoder(), one_line(error))

    def decode(self, windows: Sequence[Spoken], encoded: Encoded) -> list[list[int]]:
        """Returns the token ids of each window; after an error none, and ``problem`` is set."""
        ours = self.recognizer
        if self.problem is not None:
            return []
        try:
            prompt = torch.tensor([window.prompt for window in windows], device=ours.model.device)
            names = [window.name for window in windows]
            sources = [window.source for window in windows]
            attempts = Attempts(ours, self.decoder or Decoder(), ours.options)
            if self.decoder is None:
                return self._generated(prompt, encoded, attempts.limits(encoded))
            return [one.tokens for one in attempts(prompt, encoded, 0.0, names, sources)]
        except Exception as error:  # another drafter may work all the same
            self.problem = reason_of(error) if self.decoder is None else one_line(error)
            return []

    def _generated(
        self, prompt: Tensor, encoded: Encoded, limits: Sequence[int]
    ) -> list[list[int]]:
        """Decodes windows greedily by plain ``generate``, from encoder states."""
        ours, width = self.recognizer, prompt.shape[1]
        config = ours.generation(width, max(limits))
        # max_new_tokens of the checkpoint would take precedence over max_length
        config.max_new_tokens, config.max_length = config.max_length - width, None
        # generate adds the other rules of the checkpoint's settings itself
        stamps = [
            one for one in ours.rules(width) if isinstance(one, WhisperTimeStampLogitsProcessor)
        ]
        found = GenerationMixin.generate(
            ours.model,
            decoder_input_ids=prompt,
            **read_from(encoded),
            generation_config=config,
            logits_processor=LogitsProcessorList(stamps),
        )
        rows = zip(found[:, width:].tolist(), limits, strict=True)
        return [
            list(takewhile(lambda token: token not in ours.eos_token_ids, ids[:limit]))
            for ids, limit in rows
        ]


@dataclass(frozen=True, kw_only=True)
class Errors(Estimate):
    """Word error rate of one way of decoding, next to that of undrafted float32.

    The rate is a fraction; its interval is by bootstrap over recordings.

    Attributes:
        more: ``value`` minus the rate of undrafted float32.
        more_low, more_high: 95 % interval of ``more``, by a bootstrap that draws the same
            recordings for both.
    """

    more: float
    more_low: float
    more_high: float


@dataclass(frozen=True, kw_only=True)
class RecogniserSpeed:
    """Measurements of one way of decoding; times are means over turns.

    Attributes:
        draft: Name of the drafter, or `PLAIN`, `AGAIN` or `GENERATE`.
        precision: Precision of the model.
        ms_per_token: Milliseconds of decoding over the number of tokens of all rows, end tokens
            included; decoding begins with the encoder states, so the prompt counts.
        encoder_ms: Milliseconds of the encoder per window.
        rtfx: Seconds of audio per second of encoding and decoding.
        tokens_per_pass: Tokens committed per row and pass after the prefill; ``None``: passes were
            not counted.
        speedup: Seconds of undrafted float32, encoder included, over those of this way, with the
            low and high end of its interval.
        decoding_speedup: The same without the encoder.
        same_as_undrafted: Share of windows with the tokens of the undrafted loop in the same
            precision.
        exact: Whether a drafter promises that share to be 1: on a CPU in float32 and int8.
        same_as_fp32: Share of windows with the tokens of undrafted float32.
        other_texts: Number of recordings whose text is not that of undrafted float32.
        megabytes: Megabytes of the model's weights, without the drafter's.
        texts: Text of each recording in `Measurement.complete`.
        errors: Word errors; ``None``: there are no reference texts.
        problem: Reason why it was not measured; the other fields are then empty or 0.
    """

    draft: str
    precision: str
    ms_per_token: float = 0.0
    encoder_ms: float = 0.0
    rtfx: float = 0.0
    tokens_per_pass: float | None = None
    speedup: tuple[float, float, float] = (0.0, 0.0, 0.0)
    decoding_speedup: tuple[float, float, float] = (0.0, 0.0, 0.0)
    same_as_undrafted: float = 0.0
    exact: bool = False
    same_as_fp32: float = 0.0
    other_texts: int = 0
    megabytes: float = 0.0
    texts: tuple[str, ...] = ()
    errors: Errors | None = None
    problem: str | None = None


class Measurement:
    """Times ways of decoding on the same windows; can be stopped between two turns.

    Args:
        recognizers: Recogniser of each precision; `FP32` is one of them.
        windows: The windows.
        batch_size: Most windows of a batch.
        recordings: Indices of the recordings whose texts are reported.
    """

    def __init__(
        self,
        recognizers: Mapping[str, Recognizer],
        windows: Sequence[Spoken],
        batch_size: int,
        recordings: Iterable[int],
    ) -> None:
        self.recognizers, self.windows = recognizers, windows
        self.batches, self.recordings = batches_of(windows, batch_size), list(recordings)
        self.device = recognizers[FP32].model.device
        self.encoder: dict[str, list[float]] = {name: [] for name in recognizers}
        self.turns: list[list[int]] = []
        """Windows of each turn that was completed, as indices."""
        self._order = random.Random(0)

    def calls(self, ways: int, repeats: int) -> int:
        """Number of timed calls of `run`."""
        return (len(self.recognizers) + ways) * (1 + len(self.batches) * repeats)

    @torch.no_grad()
    def run(
        self, ways: Sequence[Way], repeats: int, done: Callable[[], object] = lambda: None
    ) -> None:
        """Decodes the first batch untimed, and then all batches ``repeats`` times in turns.

        Results are kept after each turn, so an interrupted run has those of its complete turns.

        Args:
            ways: Ways of decoding; each that fails gets a ``problem``.
            repeats: Number of times that each way decodes each batch.
            done: Called after each timed call.
        """
        self._turn(self.batches[0], ways, done)
        for way in ways:
            if way.decoder is not None:
                way.decoder.stats.reset()
        for _ in range(repeats):
            for batch in self.batches:
                encoder, decoded = self._turn(batch, ways, done)
                for name, spent in encoder.items():
                    self.encoder[name].append(spent)
                for way, (spent, rows) in zip(ways, decoded, strict=True):
                    way.seconds.append(spent)
                    way.tokens.update(zip(batch, rows, strict=False))
                self.turns.append(batch)

    def _turn(
        self, batch: Sequence[int], ways: Sequence[Way], done: Callable[[], object]
    ) -> tuple[dict[str, float], list[tuple[float, list[list[int]]]]]:
        """Encodes and decodes a batch in every way; returns seconds, and seconds with tokens."""
        windows = [self.windows[index] for index in batch]
        encoders = {name: encoding(one, windows) for name, one in self.recognizers.items()}
        encoded = turn(encoders, self._order, self.device, done)
        decoding = {
            str(number): partial(way.decode, windows, encoded[way.precision][1])
            for number, way in enumerate(ways)
        }
        decoded = turn(decoding, self._order, self.device, done)
        return {name: spent for name, (spent, _) in encoded.items()}, [*decoded.values()]

    @torch.no_grad()
    def quickest(
        self, ways: Sequence[Way], count: int, done: Callable[[], object] = lambda: None
    ) -> list[Way]:
        """Tries drafters in one precision on the first batch; returns the quickest, in their order.

        Each decodes the batch twice, and the second time counts. Drafters that fail or of whose
        tokens none is accepted are left out.

        Args:
            ways: Drafted ways of decoding; each that fails gets a ``problem``.
            count: Number of ways to return.
            done: Called for each way.
        """
        windows = [self.windows[index] for index in self.batches[0]]
        spent = {}
        for number, way in enumerate(ways):
            encoded = encoding(way.recognizer, windows)()
            way.decode(windows, encoded)
            seconds, _ = timed(self.device, partial(way.decode, windows, encoded))
            if way.problem is None and way.decoder is not None and way.decoder.stats.accepted:
                spent[number] = seconds
            done()
        return [ways[number] for number in sorted(sorted(spent, key=spent.__getitem__)[:count])]

    def rows(self, ways: Sequence[Way]) -> list[RecogniserSpeed]:
        """Computes the measurements from all complete turns; the first way is the reference."""
        undrafted = {way.precision: way for way in ways if way.name == PLAIN}
        first, first_texts, found = ways[0], self._texts(ways[0]), []
        decoded = [index for turn in self.turns for index in turn]
        audio = sum(self.windows[index].seconds for index in decoded)
        for way in ways:
            named = partial(RecogniserSpeed, draft=way.name, precision=way.precision)
            if way.problem is not None:
                found.append(named(problem=way.problem))
                continue
            plain, texts = undrafted[way.precision], self._texts(way)
            encoder, seconds = sum(self.encoder[way.precision]), sum(way.seconds)
            tokens = sum(len(way.tokens[index]) + 1 for index in decoded)
            stats = None if way.decoder is None else way.decoder.stats
            row = named(
                ms_per_token=round(1e3 * seconds / tokens, 3),
                encoder_ms=round(1e3 * encoder / len(decoded), 2),
                rtfx=round(audio / (encoder + seconds), 2),
                tokens_per_pass=None if stats is None else round(stats.acceptance_length, 3),
                speedup=self._cost(way).over(self._cost(first)),
                decoding_speedup=self._cost(way, False).over(self._cost(first, False)),
                same_as_undrafted=_share(way.tokens, plain.tokens),
                exact=way.name not in (PLAIN, AGAIN, GENERATE)
                and way.precision in EXACT
                and plain.problem is None
                and way.recognizer.model.device.type == "cpu",
                same_as_fp32=_share(way.tokens, first.tokens),
                other_texts=sum(a != b for a, b in zip(texts, first_texts, strict=True)),
                megabytes=round(weight_bytes(way.recognizer.model) / 1e6, 1),
                texts=tuple(texts),
            )
            found.append(row)
        return found

    def _cost(self, way: Way, encoder: bool = True) -> Cost:
        """Seconds and seconds of audio of each turn."""
        spent = np.array(way.seconds) + (np.array(self.encoder[way.precision]) if encoder else 0.0)
        audio = [sum(self.windows[index].seconds for index in turn) for turn in self.turns]
        return Cost(np.maximum(spent, 1e-9), np.array(audio))

    def _texts(self, way: Way) -> list[str]:
        """Text of each recording in `complete`."""
        ours = way.recognizer
        parts: dict[int, list[list[int]]] = {index: [] for index in self.complete}
        for index, window in enumerate(self.windows):
            if window.recording in parts:
                whole = ours.steps(round(window.seconds / ours.frame_s))
                segments = ours.split(way.tokens[index], whole, True).segments
                parts[window.recording] += [tokens for _, _, tokens in segments]
        return [ours.joined(own) for own in parts.values()]

    @property
    def complete(self) -> list[int]:
        """Indices of the recordings all of whose windows were decoded."""
        seen = {index for turn in self.turns for index in turn}
        missing = {w.recording for index, w in enumerate(self.windows) if index not in seen}
        return [index for index in self.recordings if index not in missing]


def encoding(recognizer: Recognizer, windows: Sequence[Spoken]) -> Callable[[], Encoded]:
    """Returns a function that encodes windows, with inputs in the dtype of the model."""
    kind = recognizer.model.dtype
    inputs = [window.inputs for window in windows]
    if inputs and isinstance(inputs[0], Mapping):
        inputs = [
            {name: x.to(kind) if x.is_floating_point() else x for name, x in one.items()}
            for one in inputs
        ]
    return partial(recognizer.encode, inputs, [window.seconds for window in windows])


def _share(first: Mapping[int, list[int]], second: Mapping[int, list[int]]) -> float:
    """Share of windows whose tokens are equal."""
    same = [tokens == second.get(index) for index, tokens in first.items()]
    return round(sum(same) / max(len(same), 1), 4)


def ways_of(
    recognizers: Mapping[str, Recognizer], drafts: Sequence[str], model_id: str, peers: bool
) -> list[Way]:
    """Builds all ways of decoding; the first is undrafted float32, the second the same again.

    Args:
        recognizers: Recogniser of each precision; `FP32` is one of them.
        drafts: Names of drafters.
        model_id: Name of the model, whose shipped drafters are found by it.
        peers: Whether transformers' own loop is added, in float32.
    """
    reference = recognizers[FP32]
    ways = [Way(name, FP32, reference, Decoder()) for name in (PLAIN, AGAIN)]
    if peers:
        ways.append(Way(GENERATE, FP32, reference, None))
    for precision, one in recognizers.items():
        if precision != FP32:
            ways.append(Way(PLAIN, precision, one, Decoder()))
        ways += (
            Way.drafted(draft, precision, one, model_id)
            for draft in drafts
            # an int8 model would draft for itself with its own weights
            if precision != "int8" or draft.partition(":")[0] != "quantized"
        )
    return ways
