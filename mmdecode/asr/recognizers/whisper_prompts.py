"""Makes Whisper's decoder prompts and logits processors from a generation configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from mmdecode.asr.languages import language_code
from mmdecode.engine.request import token_ids
from mmdecode.errors import InputError, OptionError, UnsupportedModelError, did_you_mean

if TYPE_CHECKING:
    from mmdecode.asr.audio.reading import Source
    from mmdecode.asr.options import TranscribeOptions

SHOWN = 20
"""Most languages that an error message lists."""


@dataclass(frozen=True)
class Prompts:
    """Token ids for the decoder prompts of a Whisper model.

    Attributes:
        start: Start-of-transcript token.
        language: Language token; ``None``: the model has no such tokens, or the language is to be
            detected.
        languages: Language tokens to choose from if the language is to be detected, else empty.
        rest: Task token and, without timestamps, the no-timestamps token.
        timestamp_begin: First timestamp token.
        no_speech: No-speech token; its probability after ``start`` is the no-speech probability.
        previous: Start-of-previous token, which precedes previous text; ``None``: the model has no
            such token.
        hotwords: Ids of the hotwords.
        prompt: Ids of ``TranscribeOptions.prompt``.
        known: Language tokens by name, such as ``<|en|>``; empty for models of one language.
        eos: End token.
        pad: Padding token.
    """

    start: int
    language: int | None
    languages: tuple[int, ...]
    rest: tuple[int, ...]
    timestamp_begin: int
    no_speech: int
    previous: int | None
    eos: int
    pad: int
    hotwords: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    known: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Any, options: TranscribeOptions, tokenizer: Any = None) -> Prompts:
        """Makes the prompts from ``model.generation_config``.

        Args:
            config: The generation configuration.
            options: Settings of the transcription.
            tokenizer: The model's tokenizer; needed for a prompt or hotwords.

        Raises:
            OptionError: The model does not support the language or task.
            UnsupportedModelError: The configuration lacks Whisper's entries.
        """
        missing = [
            name
            for name in ("no_timestamps_token_id", "decoder_start_token_id", "eos_token_id")
            if getattr(config, name, None) is None
        ]
        if missing:
            raise UnsupportedModelError(
                f"the checkpoint's generation_config.json has no {', '.join(missing)}; expected "
                "that of a Whisper: copy the file of the checkpoint it was trained from"
            )
        known = getattr(config, "lang_to_id", None) or {}
        if not getattr(config, "is_multilingual", bool(known)):
            known = {}
        language, languages, rest = None, (), []
        if known:
            wanted = options.language or getattr(config, "language", None)
            if wanted is not None:
                language = _language(wanted, known)
            else:
                languages = tuple(known.values())
            task = options.task or getattr(config, "task", None) or "transcribe"
            tasks = getattr(config, "task_to_id", None) or {}
            if task in tasks:
                rest.append(tasks[task])
            elif options.task is not None:
                raise OptionError(f"the model has no task {task!r}; expected {', '.join(tasks)}")
        elif options.language is not None or options.task is not None:
            raise OptionError(
                f"language={options.language!r} and task={options.task!r} do not work with a model "
                "of one language; leave them out"
            )
        no_timestamps = int(config.no_timestamps_token_id)
        if not options.timestamps:
            rest.append(no_timestamps)
        previous = getattr(config, "prev_sot_token_id", None)
        shows = options.condition_on_prev_tokens or options.prompt or options.hotwords
        if previous is None and shows:
            suppressed = config.suppress_tokens or []
            if len(suppressed) < 2:
                raise UnsupportedModelError(
                    "condition_on_prev_tokens, prompt and hotwords need prev_sot_token_id in "
                    "generation_config.json; leave them out, or copy the entry of the checkpoint's "
                    "base model"
                )
            previous = suppressed[-2]  # where older checkpoints keep it
        eos = token_ids(config.eos_token_id)[0]
        prompt = options.prompt or ()
        if prompt and prompt[0] == previous:
            prompt = prompt[1:]
        return cls(
            start=int(config.decoder_start_token_id),
            language=language,
            languages=languages,
            rest=tuple(rest),
            timestamp_begin=no_timestamps + 1,
            no_speech=no_timestamps - 1,
            previous=previous,
            eos=eos,
            pad=(token_ids(config.pad_token_id) or [eos])[0],
            hotwords=_encode("hotwords", options.hotwords or "", tokenizer, eos),
            prompt=_encode("prompt", prompt, tokenizer, eos),
            known=known,
        )

    def language_of(self, source: Source) -> int | None:
        """Returns the language token of a recording, from the recording or the options.

        Raises:
            InputError: The model does not support the language.
        """
        name = source.language
        # Whisper's models of one language are of English
        if name is None or (not self.known and language_code(name) == "en"):
            return self.language
        try:
            return _language(name, self.known)
        except OptionError as error:
            raise InputError(f"{source.name}: {error}") from error

    def code_of(self, token: int | None) -> str | None:
        """Returns the code of a language token; ``None``: it is no language token."""
        return next((n.strip("<|>") for n, value in self.known.items() if value == token), None)

    def initial(self, language: int | None) -> list[int]:
        """Returns the prompt tokens after the previous text, up to the first generated token."""
        return [self.start, *([] if language is None else [language]), *self.rest]


def _encode(name: str, text: str | Sequence[int], tokenizer: Any, end: int) -> tuple[int, ...]:
    """Encodes a text as transformers' ``get_prompt_ids`` does, but without its first token.

    Raises:
        OptionError: The ids include a special token.
    """
    if isinstance(text, str):
        text = text.strip()
        text = tokenizer(f" {text}", add_special_tokens=False).input_ids if text else ()
    special = [token for token in text if token >= end]
    if special:
        raise OptionError(
            f"{name} contains the special token {special[0]}; expected ordinary text only"
        )
    return tuple(text)


def _language(name: str, known: Mapping[str, int]) -> int:
    token = f"<|{language_code(name)}|>"
    if not known:
        raise OptionError(f"language={name!r} does not work with a model of one language")
    if token not in known:
        codes = [key.strip("<|>") for key in known]
        choice = did_you_mean(name, [*codes, *TO_LANGUAGE_CODE])
        shown = ", ".join(sorted(codes)[:SHOWN]) + ", ..." * (len(codes) > SHOWN)
        raise OptionError(
            f"the model does not know the language {name!r}{choice}; expected {shown}"
        )
    return known[token]


def processors(
    config: Any, begin: int, options: TranscribeOptions, temperature: float
) -> LogitsProcessorList:
    """Makes the logits processors, in the order of transformers' Whisper.

    At a temperature above 0 they include the temperature and the checkpoint's own top-k and top-p,
    but not transformers' default top-k of 50.

    Args:
        config: The checkpoint's generation configuration.
        begin: Length of the decoder prompt.
        options: Settings of the transcription.
        temperature: Sampling temperature; 0 is greedy.
    """
    found = LogitsProcessorList()
    if config.repetition_penalty not in (None, 1.0):
        found.append(lp.RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if config.no_repeat_ngram_size:
        found.append(lp.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if config.begin_suppress_tokens:
        found.append(lp.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin))
    if config.suppress_tokens:
        found.append(lp.SuppressTokensLogitsProcessor(config.suppress_tokens))
    if options.timestamps:
        found.append(lp.WhisperTimeStampLogitsProcessor(config, begin_index=begin))
    if temperature > 0:
        if temperature != 1:
            found.append(lp.TemperatureLogitsWarper(temperature))
        if config.top_k:
            found.append(lp.TopKLogitsWarper(config.top_k))
        if config.top_p is not None and config.top_p < 1:
            found.append(lp.TopPLogitsWarper(config.top_p))
    return found
