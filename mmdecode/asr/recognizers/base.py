"""`Recognizer`: the interface between the transcription loop and a family of speech models.

The loop over the windows of a recording (`mmdecode.asr.decoding.long_form`), temperature fallback,
streams, jobs and evaluation are the same for all families. A recogniser defines the differences:
the sampling rate, the windows of a recording, the encoder input, the decoder prompt, which ids are
text, how many tokens a window may have, and the capabilities of the family, such as timestamps.

To support another family, write a subclass of this class, or of
`mmdecode.asr.recognizers.generic.GenericRecognizer`, and register it under the entry-point group
``mmdecode.recognizers``; `mmdecode.testing.check_recognizer` checks it.
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
from mmdecode.asr.recognizers.contract import Capabilities, Encoded, Span, Split, changes_audio
from mmdecode.draft.none import NoDraft
from mmdecode.engine.request import token_ids
from mmdecode.errors import IncompatibleError, InputError, OptionError, UnsupportedModelError

if TYPE_CHECKING:
    from mmdecode.asr.alignment.cross_attention import Timer
    from mmdecode.asr.audio.reading import Source
    from mmdecode.asr.audio.recording import Recording
    from mmdecode.asr.decoding.beams import Scored
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.asr.recognizers.encoder_cache import EncoderCache
    from mmdecode.decoder import Decoder


KEPT_S = 12.0
"""Most seconds of audio that a stream buffers, for models whose windows are cut at pauses."""


class Recognizer:
    """A speech model with its processor, behind the interface that the transcription loop uses.

    A subclass must define `load`, `open`, `span`, `read`, `features`, `encode`, `most_tokens`,
    `generate` and `searched`; with the capability ``audio_transforms`` also `waveform`, and if it
    `detects` languages also `detected`; for `mmdecode.asr.alignment.evidence` also `logits`. All
    other methods have a default.

    Args:
        model: The model.
        processor: Its processor, with ``tokenizer`` and ``feature_extractor``.
        options: Settings of the transcription.

    Attributes:
        model_types: Values of ``config.model_type`` that the class is for.
        capabilities: Capabilities of the family.
        tokenizer: The processor's tokenizer.
        config: The checkpoint's ``generation_config``.
        rate: Sampling rate of the model's input, in Hz.
        window_s: Longest window that the model takes, in seconds.
        stride: Frames per timestamp step.
        eos_token_ids: Ids that end a transcript.
        pad: Id of the padding token.
        language: Code of the model's only language; ``None``: it has several, or it is not known.

    Raises:
        UnsupportedModelError: The processor or the checkpoint's settings are incomplete.
        OptionError: The family does not support one of the options.
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
                    f"{part.replace('_', ' ')}; expected a processor with tokenizer and feature "
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
        """Class name of the model, for errors."""
        return type(self.model).__name__

    @classmethod
    def load(cls, path: str, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        """Loads the model and the processor of a checkpoint.

        Args:
            path: A folder or a Hub id.
            config: Configuration of the model.
            dtype: Data type of the weights.
        """
        raise NotImplementedError

    def with_options(self, options: TranscribeOptions) -> Recognizer:
        """Returns a recogniser of the same model with other settings."""
        return type(self)(self.model, self.processor, options)

    def refuse(self, options: TranscribeOptions) -> None:
        """Checks that the family supports all options.

        Raises:
            OptionError: An option is not supported.
        """
        refuse_beyond(self.capabilities, options, self.name)
        if not self.capabilities.languages and options.language is not None:
            if self.language is None:
                raise OptionError(
                    f"language={options.language!r} is not supported by {self.name}, whose "
                    f"language is unknown and fixed; leave it out, or {_INSTEAD[False]}"
                )
            try:
                self.language_of_name(options.language)
            except ValueError as error:
                raise OptionError(f"language={options.language!r}: {error}") from error
        if options.window_s is not None and options.window_s > self.window_s:
            raise OptionError(
                f"window_s={options.window_s}; expected at most {self.window_s:g} s, the longest "
                f"window of {self.name}, or leave it out"
            )

    def check(self, decoder: Decoder) -> None:
        """Checks that the model can be decoded with the decoder's draft and guide.

        Raises:
            IncompatibleError: The engine has no adapter for the model, or the guide changes the
                waveform and the family does not support that.
        """
        can, guide = self.capabilities, decoder.guide
        if not can.drafts and (guide is not None or not isinstance(decoder.draft, NoDraft)):
            raise IncompatibleError.between(
                "a draft or a guide",
                self.name,
                "the engine has no adapter for this model, so plain generate decodes it",
                "leave them out, or register an adapter under the entry-point group "
                "mmdecode.adapters",
            )
        if not can.audio_transforms and changes_audio(guide):
            raise IncompatibleError.between(
                f"guide {type(guide).__name__}",
                self.name,
                "the guide changes the waveform, which this model family does not support",
                f"leave the guide out, or {_INSTEAD[False]}",
            )

    # ---- windows

    @property
    def frame_s(self) -> float:
        """Seconds per frame, the unit in which windows are counted."""
        return 1 / self.rate

    @property
    def stamp_s(self) -> float:
        """Seconds per timestamp step."""
        return self.frame_s * self.stride

    @property
    def kept_s(self) -> float:
        """Most seconds of audio that a stream buffers and transcribes again at each step."""
        return min(self.window_s, KEPT_S)

    @property
    def window_frames(self) -> int:
        """Most frames of a window, from ``options.window_s`` or else the model."""
        return round((self.options.window_s or self.window_s) / self.frame_s)

    def steps(self, count: int) -> int:
        """Returns the number of whole timestamp steps in ``count`` frames."""
        return count // self.stride

    def open(self, source: Source) -> Recording:
        """Opens a recording, and reads it once for its length and hash.

        Raises:
            InputError: The recording cannot be read.
        """
        raise NotImplementedError

    def span(self, recording: Recording, seek: int, seams: Sequence[float]) -> Span:
        """Returns the length of the window that begins at a frame, and the start of the next one.

        Args:
            recording: The recording.
            seek: First frame of the window; does not decrease from call to call.
            seams: Times, in seconds, at which voice activity detection cut out silence.
        """
        raise NotImplementedError

    def read(self, recording: Recording, seek: int, count: int) -> Any:
        """Returns the encoder input of a window; ``seek`` does not decrease from call to call."""
        raise NotImplementedError

    def is_silent(self, recording: Recording, seek: int, count: int) -> bool:
        """Whether a window is silent and is not decoded; called before `read`."""
        return False

    def features(self, waves: Sequence[Any]) -> Sequence[Any]:
        """Returns the encoder inputs of waveforms ``(T,)``, each processed by itself."""
        raise NotImplementedError

    def samples(self, recording: Recording, seek: int, count: int) -> Any:
        """Returns the samples ``(T,)`` of a window, for word times; called right after `read`."""
        return None

    def waveform(self, recording: Recording, seek: int, count: int) -> Any:
        """Returns a window's waveform for guides (`mmdecode.adapters.audio.transforms`)."""
        raise NotImplementedError

    def encode(self, windows: Sequence[Any], seconds: Sequence[float]) -> Encoded:
        """Encodes windows.

        Args:
            windows: Encoder inputs, as `read` returned them.
            seconds: Length of each window, in seconds.
        """
        raise NotImplementedError

    def encoder_cache(self) -> EncoderCache | None:
        """Returns a new cache of encoder states, so that a stream encodes only new samples.

        `read` finds it at the recording. No text depends on it. ``None``: the family has none.
        """
        return None

    # ---- languages

    def language_of_name(self, name: str) -> int | None:
        """Returns the token of a language by name; ``None``: the family has no such tokens.

        Raises:
            ValueError: The model does not support the language; the message names those it does.
        """
        if self.language is not None and language_code(name) != self.language:
            raise ValueError(
                f"{self.name} transcribes only {self.language!r}; leave the language out, or name "
                "a model for that language, with --model or model_id"
            )
        return None

    def language_of(self, source: Source) -> int | None:
        """Returns the language token of a recording, from the recording or the options.

        Raises:
            InputError: The model does not support the language.
        """
        if source.language is None:
            return None
        try:
            return self.language_of_name(source.language)
        except ValueError as error:
            raise InputError(f"{source.name}: language {source.language!r}: {error}") from error

    def code_of(self, token: int | None) -> str | None:
        """Returns the code of a language token; ``None``: there is no token, or it is unknown."""
        return None

    @property
    def detects(self) -> bool:
        """Whether the model detects the language if none is given."""
        return False

    def detected(self, encoded: Encoded) -> list[int]:
        """Returns the detected language token of each row."""
        raise NotImplementedError

    # ---- prompts, tokens and lengths

    max_context: int = 0
    """Most tokens of previous text in a window's prompt."""

    @property
    def initial_context(self) -> list[int]:
        """Tokens that take the place of the previous text in the first window."""
        return []

    def prompt(self, language: int | None, context: Sequence[int]) -> list[int]:
        """Returns the decoder prompt of a window.

        Args:
            language: Token of the language; ``None``: the family has no language tokens.
            context: Last tokens of the previous text, at most `max_context`.
        """
        start = token_ids(self.config.decoder_start_token_id) or token_ids(self.config.bos_token_id)
        if not start:
            raise UnsupportedModelError(
                f"{self.name} has no decoder_start_token_id in generation_config.json; copy the "
                "file of the checkpoint it was trained from"
            )
        return start[:1]

    def is_text(self, token: int) -> bool:
        """Whether an id is a text token, not a timestamp, language, end or other special token."""
        return token not in self._special and token not in self.eos_token_ids and token != self.pad

    def text_tokens(self, tokens: Sequence[int]) -> list[Any]:
        """Returns the text tokens among ``tokens``; `Token` objects keep their times."""
        return [t for t in tokens if self.is_text(t) and t not in self._special]

    def text(self, tokens: Sequence[int]) -> str:
        """Decodes tokens to text, without special tokens."""
        decode = self.tokenizer.decode
        return decode(self.text_tokens(tokens), clean_up_tokenization_spaces=False).strip()

    def joined(self, parts: Sequence[Sequence[int]]) -> str:
        """Joins the texts of segments, with spaces between them if the language writes spaces.

        Args:
            parts: Tokens of segments, in order.
        """
        spaced = any(
            self.starts_word(token) for tokens in parts for token in self.text_tokens(tokens)
        )
        texts = (self.text(tokens) for tokens in parts)
        return (" " if spaced else "").join(text for text in texts if text)

    def starts_word(self, token: int) -> bool:
        """Whether a token begins a word, that is, begins with the vocabulary's mark for a space."""
        name = self.tokenizer.convert_ids_to_tokens(int(token))
        return str(name).startswith((*SPACES, " "))

    def split(self, tokens: list[int], whole: int, sequential: bool) -> Split:
        """Splits the tokens of a window into segments; by default all form one segment.

        Args:
            tokens: Tokens of the window, without the end token.
            whole: Length of the window, in timestamp steps.
            sequential: Whether the tokens of this window determine the start of the next one.
        """
        return Split([(0, whole, tokens)] if self.text(tokens) else [])

    def most_tokens(self, seconds: float) -> int:
        """Returns the largest number of tokens for a window of ``seconds``."""
        raise NotImplementedError

    def generation(self, width: int, most: int) -> GenerationConfig:
        """Returns generation settings for prompts of ``width`` and at most ``most`` new tokens."""
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
        """Decodes windows; returns the same as transformers' ``generate``.

        Args:
            decoder: Decoder of the windows.
            prompt: Prompts of one length, ``(B, P)``.
            encoded: The encoded windows.
            config: Settings that `generation` returned, with sampling and scores set.
            temperature: Sampling temperature; 0 is greedy.
            names: One string per row; sampling noise is derived from it and the seed.
            sources: Token ids that a drafter may copy from, per row.
        """
        raise NotImplementedError

    def searched(
        self,
        prompt: Tensor,
        encoded: Encoded,
        config: GenerationConfig,
        beams: int,
        keep: int,
        limits: Sequence[int],
    ) -> list[list[Scored]]:
        """Returns the ``keep`` best sequences per window, see `mmdecode.asr.decoding.beams`."""
        raise NotImplementedError

    def no_speech(self, prompt: Tensor, encoded: Encoded) -> list[float | None]:
        """Returns the no-speech probability of each row; ``None``: the model predicts none."""
        return [None] * len(encoded.seconds)

    def logits(self, ids: Tensor, encoded: Encoded) -> Tensor:
        """Returns the logits ``(B, L, V)`` after each token of right-padded ``ids (B, L)``."""
        raise NotImplementedError

    def ends(self, seconds: float) -> list[int]:
        """Returns the ids that can end the text of a window of ``seconds``."""
        return sorted(self.eos_token_ids)

    # ---- words

    def rules(self, width: int) -> LogitsProcessorList:
        """Returns the logits processors for prompts of ``width`` tokens, without temperature."""
        return LogitsProcessorList()

    def timer(self) -> Timer | None:
        """Returns the object that times words; ``None``: word timestamps are off."""
        return None


_ANOTHER = "name a model that can, with --model or model_id:"
_INSTEAD = {
    True: f"{_ANOTHER} a Moonshine, as moonshine:tiny-en",
    False: f"{_ANOTHER} a Whisper, as openai/whisper-small",
}
"""Hints of errors, by whether all windows of the refused model have the same length."""


def refuse_beyond(can: Capabilities, options: TranscribeOptions, name: str) -> None:
    """Checks that a family has the capabilities that the options need.

    Args:
        can: Capabilities of the family.
        options: Requested options.
        name: Name of the model, for the error.

    Raises:
        OptionError: An option needs a capability that the family lacks.
    """
    usual = type(options)()
    needs = {
        "word_timestamps": (can.word_times, "it cannot time words"),
        "hallucination_silence_threshold": (can.word_times, "it cannot time words"),
        "task": (can.languages or options.task == "transcribe", "it cannot translate"),
        "prompt": (can.prompts, "its decoder prompt cannot contain text"),
        "hotwords": (can.prompts, "its decoder prompt cannot contain text"),
        "condition_on_prev_tokens": (can.prompts, "its decoder prompt cannot contain text"),
        "no_speech_threshold": (can.silence, "it predicts no no-speech probability"),
        "padding": (can.fixed_windows, "its windows are not padded"),
        "window_s": (not can.fixed_windows, "the length of its windows is fixed"),
    }
    for option, (able, why) in needs.items():
        given = getattr(options, option)
        if not able and given not in (getattr(usual, option), "auto"):
            raise OptionError(
                f"{option}={given!r} does not work with {name}: {why}; leave it out, or "
                f"{_INSTEAD[can.fixed_windows]}"
            )


def of_type(model_type: str) -> type[Recognizer]:
    """Returns the recogniser class for a model type.

    Classes of this package come first, then those of plug-ins, then the generic class.

    Raises:
        UnsupportedModelError: The type is no speech recogniser of transformers or of a plug-in.
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
        f"a Transcriber needs a speech recogniser with an encoder and a decoder, but this is a "
        f"{model_type} model; expected one of {', '.join(sorted(known))} or another model of "
        "transformers' AutoModelForSpeechSeq2Seq, or register a recogniser under the entry-point "
        "group mmdecode.recognizers"
    )


def recognises(model_type: str) -> bool:
    """Whether there is a recogniser class for a model type."""
    try:
        of_type(model_type)
    except UnsupportedModelError:
        return False
    return True
