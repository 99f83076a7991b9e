"""`Recognizer`: what the front end of speech has to know of a family of models.

The loop over windows (`mmdecode.asr.decoding.long_form`), the attempts at one and their gates,
streams, jobs and evaluation are the same for all families. The differences are here: at which rate
and in which windows a recording is heard, what the encoder is given, which tokens open a
transcript, which ids are text, how many tokens a window may have, and what the family can do beyond
text.

A family of your own is a class derived from this one, or from
`mmdecode.asr.recognizers.generic.GenericRecognizer`, named under the entry-point group
``mmdecode.recognizers``; `mmdecode.testing.check_recognizer` tries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from mmdecode import registry
from mmdecode.asr.alignment.words import SPACES
from mmdecode.asr.languages import language_code
from mmdecode.asr.recognizers.contract import Capabilities, Encoded, Span, Split
from mmdecode.draft.none import NoDraft
from mmdecode.engine.request import token_ids
from mmdecode.errors import IncompatibleError, InputError, OptionError, UnsupportedModelError

if TYPE_CHECKING:
    from mmdecode.asr.alignment.cross_attention import Timer
    from mmdecode.asr.audio.reading import Source
    from mmdecode.asr.audio.recording import Recording
    from mmdecode.asr.decoding.beams import Scored
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.decoder import Decoder


KEPT_S = 12.0
"""Audio that streams keep where windows are cut at pauses: two windows at least."""


class Recognizer:
    """A model with its processor, as the loop over windows needs it.

    A family supplies `load`, `open`, `span`, `read`, `features`, `encode`, `most_tokens`,
    `generate` and `searched`; with ``audio_transforms`` also `waveform`, and where it `detects`
    languages `detected`. Everything else has a default.

    Args:
        model: The model.
        processor: It has ``tokenizer`` and ``feature_extractor``.
        options: Settings of the transcription.

    Attributes:
        model_types: ``config.model_type`` of the models that the class is for.
        capabilities: Capabilities of the family.
        tokenizer: The processor's.
        config: The checkpoint's ``generation_config``.
        rate: Samples a second that it hears.
        window_s: Most seconds that the model hears at once.
        stride: Frames in a timestamp step.
        eos_token_ids: Ids that end a transcript.
        pad: Id of the padding token.
        language: Code of the only language; ``None``: it has several, or they are not known.

    Raises:
        UnsupportedModelError: The processor lacks a part, or the checkpoint's settings do.
        OptionError: The family cannot do what the options ask for.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    capabilities: Capabilities = Capabilities()
    window_s: float = 30.0
    stride: int = 1

    def __init__(self, model: Any, processor: Any, options: TranscribeOptions) -> None:
        self.model, self.processor, self.options = model, processor, options
        for part in ("tokenizer", "feature_extractor"):
            if getattr(processor, part, None) is None:
                raise UnsupportedModelError(
                    f"the processor is a {type(processor).__name__} without a "
                    f"{part.replace('_', ' ')}; expected one with a tokenizer and a feature "
                    "extractor: load it with AutoProcessor from the model's folder"
                )
        self.tokenizer = processor.tokenizer
        self.config = model.generation_config
        self.rate = int(processor.feature_extractor.sampling_rate)
        self.language: str | None = getattr(self.config, "language", None)
        self.refuse(options)
        eos_token_ids = token_ids(self.config.eos_token_id)
        if not eos_token_ids:
            raise UnsupportedModelError(
                f"{self.name} has no eos_token_id in generation_config.json; expected the id that "
                "ends a transcript: copy the file of the checkpoint it was trained from"
            )
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pad = (token_ids(self.config.pad_token_id) or eos_token_ids)[0]
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        marks = (token for token, one in added.items() if one.special)
        self._special = frozenset((*self.tokenizer.all_special_ids, *marks))

    # ---- what the model is

    @property
    def name(self) -> str:
        """Class of the model, for errors."""
        return type(self.model).__name__

    @classmethod
    def load(cls, path: str, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        """Model and processor of a checkpoint.

        Args:
            path: A folder or a Hub id.
            config: Its configuration.
            dtype: Data type of the weights.
        """
        raise NotImplementedError

    def with_options(self, options: TranscribeOptions) -> Recognizer:
        """The same model with other settings."""
        return type(self)(self.model, self.processor, options)

    def refuse(self, options: TranscribeOptions) -> None:
        """Refuses what the family cannot do.

        Raises:
            OptionError: The options ask for it.
        """
        refuse_beyond(self.capabilities, options, self.name)
        if not self.capabilities.languages and options.language is not None:
            if self.language is None:
                raise OptionError(
                    f"language={options.language!r} is given to {self.name}, which has one and "
                    f"does not say which; leave it out, or {_INSTEAD[False]}"
                )
            try:
                self.language_of_name(options.language)
            except ValueError as error:
                raise OptionError(f"language={options.language!r}: {error}") from error
        if options.window_s is not None and options.window_s > self.window_s:
            raise OptionError(
                f"window_s={options.window_s}; {self.name} hears at most {self.window_s:g} s at "
                "once: give as much or less, or leave it out"
            )

    def check(self, decoder: Decoder) -> None:
        """Refuses a draft or guide that the model cannot be decoded with.

        Raises:
            IncompatibleError: The engine has no adapter for the model, or the guide changes the
                waveform and the family cannot read a changed one.
        """
        can, guide = self.capabilities, decoder.guide
        if not can.drafts and (guide is not None or not isinstance(decoder.draft, NoDraft)):
            raise IncompatibleError.between(
                "a draft or a guide",
                self.name,
                "the engine has no adapter for this model, which plain generate decodes",
                "leave them out, or register an adapter under the entry-point group "
                "mmdecode.adapters",
            )
        if not can.audio_transforms and changes_audio(guide):
            raise IncompatibleError.between(
                f"guide {type(guide).__name__}",
                self.name,
                "the guide changes the waveform, and this family cannot read a changed one",
                f"leave the guide out, or {_INSTEAD[False]}",
            )

    # ---- windows

    @property
    def frame_s(self) -> float:
        """Seconds in a frame, the step by which windows are counted."""
        return 1 / self.rate

    @property
    def stamp_s(self) -> float:
        """Seconds in a timestamp step."""
        return self.frame_s * self.stride

    @property
    def kept_s(self) -> float:
        """Most seconds that a stream keeps and hears again at each step."""
        return min(self.window_s, KEPT_S)

    @property
    def window_frames(self) -> int:
        """Most frames of a window, as the options have it."""
        return round((self.options.window_s or self.window_s) / self.frame_s)

    def steps(self, count: int) -> int:
        """Whole timestamp steps in so many frames."""
        return count // self.stride

    def open(self, source: Source) -> Recording:
        """A recording, measured.

        Raises:
            InputError: It cannot be read.
        """
        raise NotImplementedError

    def span(self, recording: Recording, seek: int, seams: Sequence[float]) -> Span:
        """The window that begins at a frame, in sequential mode.

        Args:
            recording: The recording; ``seek`` never goes back.
            seek: First frame of the window.
            seams: Seconds at which stretches of speech meet that were cut out of a recording.
        """
        raise NotImplementedError

    def read(self, recording: Recording, seek: int, count: int) -> Any:
        """Encoder input of a window; ``seek`` never goes back."""
        raise NotImplementedError

    def is_silent(self, recording: Recording, seek: int, count: int) -> bool:
        """Whether a window holds no sound at all, so that it is not decoded; before its `read`."""
        return False

    def features(self, waves: Sequence[Any]) -> Sequence[Any]:
        """Encoder inputs of samples ``(T,)`` by themselves, for each of several."""
        raise NotImplementedError

    def samples(self, recording: Recording, seek: int, count: int) -> Any:
        """A window as samples ``(T,)``, for timing words; right after `read` of that window."""
        return None

    def waveform(self, recording: Recording, seek: int, count: int) -> Any:
        """A window as a waveform that guides may change: `mmdecode.adapters.audio.transforms`."""
        raise NotImplementedError

    def encode(self, windows: Sequence[Any], seconds: Sequence[float]) -> Encoded:
        """Reads windows.

        Args:
            windows: Each as `read` gave it.
            seconds: Length of each.
        """
        raise NotImplementedError

    # ---- languages

    def language_of_name(self, name: str) -> int | None:
        """The token of a language by name; ``None``: the family has none.

        Raises:
            ValueError: The model does not know it; says what it knows.
        """
        if self.language is not None and language_code(name) != self.language:
            raise ValueError(
                f"{self.name} transcribes {self.language!r} alone; leave the language out, or name "
                "a model of that language, with --model or model_id"
            )
        return None

    def language_of(self, source: Source) -> int | None:
        """The token of a recording's language, its own or that of the options.

        Raises:
            InputError: The model does not know it.
        """
        if source.language is None:
            return None
        try:
            return self.language_of_name(source.language)
        except ValueError as error:
            raise InputError(f"{source.name}: language {source.language!r}: {error}") from error

    def code_of(self, token: int | None) -> str | None:
        """Code of a language token; ``None``: the model has one language, or it is not known."""
        return None

    @property
    def detects(self) -> bool:
        """Whether languages that were not given are detected."""
        return False

    def detected(self, encoded: Encoded) -> list[int]:
        """The language token of each row."""
        raise NotImplementedError

    # ---- prompts, tokens and lengths

    max_context: int = 0
    """How many tokens of the text so far a window can be shown."""

    @property
    def initial_context(self) -> list[int]:
        """Context of the first window."""
        return []

    def prompt(self, language: int | None, context: Sequence[int]) -> list[int]:
        """Decoder prompt of a window.

        Args:
            language: Token of the language; ``None``: the family has none.
            context: Tokens of the text so far, at most `max_context`.
        """
        start = token_ids(self.config.decoder_start_token_id) or token_ids(self.config.bos_token_id)
        if not start:
            raise UnsupportedModelError(
                f"{self.name} has no decoder_start_token_id in generation_config.json; copy the "
                "file of the checkpoint it was trained from"
            )
        return start[:1]

    def is_text(self, token: int) -> bool:
        """Whether an id stands for text, and not for a time, a language or an end."""
        return token not in self._special and token not in self.eos_token_ids and token != self.pad

    def text_tokens(self, tokens: Sequence[int]) -> list[Any]:
        """Segments that are text, unchanged: timed ones stay timed."""
        return [t for t in tokens if self.is_text(t) and t not in self._special]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, those that stand for none left out."""
        decode = self.tokenizer.decode
        return decode(self.text_tokens(tokens), clean_up_tokenization_spaces=False).strip()

    def joined(self, parts: Sequence[Sequence[int]]) -> str:
        """The text of windows that were decoded each by itself, with spaces where texts have them.

        Args:
            parts: Tokens of segments, in order.
        """
        spaced = any(
            self.starts_word(token) for tokens in parts for token in self.text_tokens(tokens)
        )
        texts = (self.text(tokens) for tokens in parts)
        return (" " if spaced else "").join(text for text in texts if text)

    def starts_word(self, token: int) -> bool:
        """Whether a token begins a word, by the mark that its vocabulary has for spaces."""
        name = self.tokenizer.convert_ids_to_tokens(int(token))
        return str(name).startswith((*SPACES, " "))

    def split(self, tokens: list[int], whole: int, sequential: bool) -> Split:
        """Cuts the tokens of a window into segments: here into one.

        Args:
            tokens: Without the end token.
            whole: The window's length, in timestamp steps.
            sequential: Whether the next window begins where this one says.
        """
        return Split([(0, whole, tokens)] if self.text(tokens) else [])

    def most_tokens(self, seconds: float) -> int:
        """The longest transcript of so many seconds, in tokens."""
        raise NotImplementedError

    def generation(self, width: int, most: int) -> GenerationConfig:
        """Lengths and special tokens after a prompt of ``width`` tokens, for ``most`` new ones."""
        return GenerationConfig(
            max_length=width + most, eos_token_id=sorted(self.eos_token_ids), pad_token_id=self.pad
        )

    # ---- decoding

    def generate(
        self,
        decoder: Decoder,
        prompt: Tensor,
        encoded: Encoded,
        config: GenerationConfig,
        temperature: float,
        names: list[str],
        sources: list[list[int]],
    ) -> Any:
        """Decodes windows; returns what ``generate`` would.

        Args:
            decoder: How.
            prompt: Prompts of one length, ``(B, P)``.
            encoded: The windows.
            config: See `generation`; sampling and scores are set.
            temperature: 0 is greedy.
            names: Keys of the noise of each row.
            sources: Texts that a drafter may copy from.
        """
        raise NotImplementedError

    def searched(
        self, prompt: Tensor, encoded: Encoded, config: GenerationConfig, beams: int, keep: int
    ) -> list[list[Scored]]:
        """The ``keep`` best of each window's beams, see `mmdecode.asr.decoding.beams`."""
        raise NotImplementedError

    def no_speech(self, prompt: Tensor, encoded: Encoded) -> list[float | None]:
        """The probability that nobody speaks, of each row; ``None``: it is not known."""
        return [None] * len(encoded.seconds)

    # ---- words

    def rules(self, width: int) -> LogitsProcessorList:
        """Processors after a prompt of ``width`` tokens, without a temperature."""
        return LogitsProcessorList()

    def timer(self) -> Timer | None:
        """Times words, where the options ask for it."""
        return None


_ANOTHER = "name a model that can, with --model or model_id:"
_INSTEAD = {
    True: f"{_ANOTHER} a Moonshine, as moonshine:tiny-en",
    False: f"{_ANOTHER} a Whisper, as openai/whisper-small",
}
"""Advice, by whether the windows of the named model have one length."""


def refuse_beyond(can: Capabilities, options: TranscribeOptions, name: str) -> None:
    """Refuses options that a family cannot serve.

    Args:
        can: Capabilities of the family.
        options: Requested options.
        name: Name of the model, for the error.

    Raises:
        OptionError: The options ask for more.
    """
    usual = type(options)()
    needs = {
        "word_timestamps": (can.word_times, "it cannot time words"),
        "hallucination_silence_threshold": (can.word_times, "it cannot time words"),
        "task": (can.languages or options.task == "transcribe", "it cannot translate"),
        "prompt": (can.prompts, "no text can be shown to it"),
        "hotwords": (can.prompts, "no text can be shown to it"),
        "condition_on_prev_tokens": (can.prompts, "no text can be shown to it"),
        "no_speech_threshold": (can.silence, "it gives no probability of silence"),
        "padding": (can.fixed_windows, "its windows are not filled up"),
        "window_s": (not can.fixed_windows, "the length of its windows is fixed"),
    }
    for option, (able, why) in needs.items():
        given = getattr(options, option)
        if not able and given not in (getattr(usual, option), "auto"):
            raise OptionError(
                f"{option}={given!r} is given to {name}, and {why}; leave it out, or "
                f"{_INSTEAD[can.fixed_windows]}"
            )


def of_type(model_type: str) -> type[Recognizer]:
    """The recogniser class of a model type: ours, then those of plug-ins, then the generic one.

    Raises:
        UnsupportedModelError: It is no speech recogniser that transformers knows.
    """
    known: list[str] = []
    for _, cls in registry.classes("recognizers"):
        if model_type in cls.model_types:
            return cls
        known += cls.model_types
    generic: Any = registry.resolve("recognizers", "generic")[0]
    if generic.fits(model_type):
        return generic
    raise UnsupportedModelError(
        f"a Transcriber runs speech recognisers with an encoder and a decoder, and this is a "
        f"{model_type} model; expected one of {', '.join(sorted(known))} or another of "
        "transformers' AutoModelForSpeechSeq2Seq, or register a recogniser under the entry-point "
        "group mmdecode.recognizers"
    )


def changes_audio(guide: Any) -> bool:
    """Whether a guide reads a window whose waveform was changed."""
    return any(spec.transform == "audio" for spec in getattr(guide, "branches", ()))
