"""Recogniser for Whisper: reads log-mel windows of one length; has prompts and timestamp tokens.

Decoder prompts and logits processors are in `whisper_prompts`, log-mel features in
`whisper_features`. Decoding follows transformers' ``generation_whisper.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.asr.alignment.cross_attention import Timer
from mmdecode.asr.decoding.beams import beam_search
from mmdecode.asr.decoding.segmentation import split_segments, unfinished
from mmdecode.asr.recognizers.base import Recognizer
from mmdecode.asr.recognizers.contract import Capabilities, Encoded, Span, Split
from mmdecode.asr.recognizers.generic import MaskedStates, raw_inputs
from mmdecode.asr.recognizers.whisper_features import Mel, Speech
from mmdecode.asr.recognizers.whisper_prompts import Prompts, processors
from mmdecode.checkpoints import code_trusted, local_path
from mmdecode.errors import OptionError, UnsupportedModelError
from mmdecode.models.whisper_medusa import load_target

if TYPE_CHECKING:
    from mmdecode.asr.audio.reading import Source
    from mmdecode.asr.audio.recording import Recording
    from mmdecode.asr.decoding.beams import Scored
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.decoder import Decoder


ENDING_S = 0.5
"""Seconds before the end of the audio from which a timestamp counts as the end of the text."""


class WhisperRecognizer(Recognizer):
    """Recogniser of a ``WhisperForConditionalGeneration`` with its ``WhisperProcessor``.

    Attributes:
        prompts: Prompt tokens of every window.
        mel: Transform from samples to log-mel features.

    Raises:
        UnsupportedModelError: The processor belongs to another model.
        OptionError: The model does not support the language or task, or prompt and hotwords are too
            long.
    """

    summary = "Whisper and its distillations: prompts, timestamps, languages, word times"
    source = "Radford et al. 2023"
    model_types = ("whisper",)
    capabilities = Capabilities(
        timestamps=True,
        languages=True,
        prompts=True,
        silence=True,
        word_times=True,
        fixed_windows=True,
        audio_transforms=True,
    )

    def __init__(self, model: Any, processor: Any, options: TranscribeOptions) -> None:
        self.prompts = Prompts.of(model.generation_config, options, processor.tokenizer)
        super().__init__(model, processor, options)
        self.language = None  # that of the configuration is only a default
        self.encoder = model.get_encoder()
        self.stride = self.encoder.conv1.stride[0] * self.encoder.conv2.stride[0]
        extractor = processor.feature_extractor
        self.mel = Mel(extractor, self.stride * model.config.max_source_positions)
        if len(self.mel.filters) != model.config.num_mel_bins:
            raise UnsupportedModelError(
                f"the feature extractor makes {len(self.mel.filters)} mel bands, but the model "
                f"reads {model.config.num_mel_bins}; load the processor that belongs to the model"
            )
        self.window_s = self.mel.window_frames * self.frame_s
        self.refuse(options)  # now with the window of this model
        self.eos_token_ids, self.pad = frozenset((self.prompts.eos,)), self.prompts.pad
        self.max_context = model.config.max_target_positions // 2 - 1
        given = len(self.prompts.hotwords) + len(self.prompts.prompt)
        if given > self.max_context:
            raise OptionError(
                f"prompt and hotwords have {given} tokens; expected at most {self.max_context} "
                "together: shorten them"
            )

    @classmethod
    def load(cls, path: str, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        """Loads model and processor; of a Whisper-Medusa checkpoint, the target model."""
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        trust = code_trusted()
        if "WhisperMedusaModel" in (config.architectures or ()):
            # heads, block and target in one checkpoint; the target may come with its own head 0
            model = load_target(path).to(dtype)
            own = list(Path(path).glob("*processor_config.json"))
            folder = path if own else local_path(config.whisper_model_name)
            return model, WhisperProcessor.from_pretrained(folder, trust_remote_code=trust)
        processor = WhisperProcessor.from_pretrained(path, trust_remote_code=trust)
        model = WhisperForConditionalGeneration.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust
        )
        return model, processor

    # ---- windows

    @property
    def frame_s(self) -> float:
        """Seconds per feature frame."""
        return self.mel.hop / self.mel.rate

    @property
    def stamp_s(self) -> float:
        """Seconds per timestamp step, which equals one encoder state."""
        return self.stride * self.mel.hop / self.mel.rate

    @property
    def kept_s(self) -> float:
        """Length of a window in seconds, which a stream buffers."""
        return self.window_s

    @property
    def window_frames(self) -> int:
        """Number of frames of every window."""
        return self.mel.window_frames

    def steps(self, count: int) -> int:
        """Returns the number of whole timestamp steps in ``count`` frames."""
        return int(count * self.frame_s / self.stamp_s)

    def open(self, source: Source) -> Recording:
        """Opens a recording, and reads it once for its length, hash and loudest value."""
        return Speech(source, self.mel, self.options.padding)

    def span(self, recording: Any, seek: int, seams: Sequence[float]) -> Span:
        """Returns a full window, whose tokens determine the start of the next window.

        Where a CTC head cut the recording (``vad="ctc"``), no window crosses the cut, and what a
        window left of the padding before it is skipped.
        """
        count = min(recording.frames - seek, self.window_frames)
        if not self._is_cut:
            return Span(count, None)
        ahead = (round(at / self.frame_s) - seek for at in seams)
        count = min([count, *(frames for frames in ahead if frames > 0)])
        return Span(count, seek + count if self._is_padding(count) else None)

    @property
    def _is_cut(self) -> bool:
        return self.options.vad_by_head and self.options.mode == "sequential"

    def _is_padding(self, count: int) -> bool:
        return count * self.frame_s <= self.options.voice_activity.pad_s

    def is_silent(self, recording: Any, seek: int, count: int) -> bool:
        """Whether a window is the padding before a cut, which has no speech."""
        return self._is_cut and self._is_padding(count)

    def read(self, recording: Any, seek: int, count: int) -> Any:
        """Returns the log-mel features of a window, ``(mels, window_frames)``."""
        return recording.window(seek, count)

    def features(self, waves: Sequence[Any]) -> Any:
        """Returns the processor's log-mel features, ``(B, mels, window_frames)``."""
        extractor = self.processor.feature_extractor
        return extractor(list(waves), sampling_rate=self.rate, return_tensors="pt").input_features

    def samples(self, recording: Any, seek: int, count: int) -> Any:
        """Returns the samples of a window, without padding."""
        return recording.window_samples(seek, count)

    def waveform(self, recording: Any, seek: int, count: int) -> Any:
        """Returns the window's waveform, a `WindowWaveform`."""
        return recording.window_waveform(seek, count)

    def encode(self, windows: Sequence[Any], seconds: Sequence[float]) -> Encoded:
        """Encodes windows, which all have the same length."""
        features = torch.stack(list(windows))
        features = features.to(self.model.device, self.encoder.conv1.weight.dtype)
        return Encoded(features, seconds, self.encoder(features).last_hidden_state)

    # ---- languages

    def language_of(self, source: Source) -> int | None:
        """Returns the language token of a recording, from the recording or the options."""
        return self.prompts.language_of(source)

    def code_of(self, token: int | None) -> str | None:
        """Returns the code of a language token."""
        return self.prompts.code_of(token)

    @property
    def detects(self) -> bool:
        """Whether the model has several languages and the options name none."""
        return bool(self.prompts.languages)

    def detected(self, encoded: Encoded) -> list[int]:
        """Returns the most probable language token of each row."""
        device = self.model.device
        start = torch.full((len(encoded.seconds), 1), self.prompts.start, device=device)
        logits = self.logits(start, encoded)[:, -1]
        choices = torch.tensor(self.prompts.languages, device=device)
        return choices[logits[:, choices].argmax(1)].tolist()

    # ---- prompts, tokens and lengths

    @property
    def initial_context(self) -> list[int]:
        """The prompt of the options, or nothing if every window's prompt contains it anyway."""
        everywhere = self.options.prompt_condition_type == "all-segments"
        return [] if everywhere else list(self.prompts.prompt)

    def prompt(self, language: int | None, context: Sequence[int]) -> list[int]:
        """Returns hotwords, prompt and previous text, then the tokens that start a transcript."""
        head = list(self.prompts.hotwords)
        if self.options.prompt_condition_type == "all-segments":
            head += self.prompts.prompt
        before = head + list(context[max(0, len(context) + len(head) - self.max_context) :])
        initial = self.prompts.initial(language)
        return [int(self.prompts.previous or 0), *before, *initial] if before else initial

    def is_text(self, token: int) -> bool:
        """Whether an id is below the first timestamp token."""
        return token < self.prompts.timestamp_begin

    def joined(self, parts: Sequence[Sequence[int]]) -> str:
        """Decodes the tokens of all segments as one sequence, since windows continue each other."""
        return self.text([token for tokens in parts for token in tokens])

    def split(self, tokens: list[int], whole: int, sequential: bool) -> Split:
        """Splits tokens into segments, wherever two timestamp tokens follow each other."""
        begin = self.prompts.timestamp_begin
        if not self.options.timestamps:
            return Split([(0, whole, tokens)])
        segments, forward = split_segments(tokens, begin, whole)
        rest = unfinished(tokens, segments) if forward is not None else []
        if rest and not sequential:
            segments[-1][2].pop()  # the timestamp that opens the rest
            segments.append((rest[0] - begin, whole, rest))
        moved = [max(begin, t - (forward or 0)) if t >= begin else t for t in rest]
        return Split(segments, forward, moved)

    def most_tokens(self, seconds: float) -> int:
        """Returns the number of the decoder's positions."""
        return int(self.model.config.max_target_positions)

    def generation(self, width: int, most: int) -> GenerationConfig:
        """Returns settings with the limit of transformers' long form, which counts the prompt."""
        limit = self.model.config.max_target_positions
        if self.options.max_new_tokens is not None:
            limit = min(width + self.options.max_new_tokens, limit)
        elif self.config.max_new_tokens is not None:
            limit = min(width + self.config.max_new_tokens, limit)
        elif self.config.max_length is not None:
            limit = min(width + self.config.max_length, limit)
        return GenerationConfig(
            max_length=limit,
            eos_token_id=self.config.eos_token_id,
            pad_token_id=self.pad,
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
        """Decodes windows with Whisper's logits processors."""
        raw = raw_inputs(encoded, sources)
        if isinstance(encoded.inputs, Tensor):
            raw["input_features"] = encoded.inputs
        if encoded.waveforms:
            raw["audio"] = encoded.waveforms
        return decoder(
            self.model,
            prompt,
            logits_processor=processors(self.config, prompt.shape[1], self.options, temperature),
            stopping_criteria=StoppingCriteriaList(),
            generation_config=config,
            encoder_outputs=MaskedStates(
                last_hidden_state=encoded.states, attention_mask=encoded.mask
            ),
            mm_inputs=raw,
            mm_request=names,
        )

    def searched(
        self,
        prompt: Tensor,
        encoded: Encoded,
        config: GenerationConfig,
        beams: int,
        keep: int,
        limits: Sequence[int],
    ) -> list[list[Scored]]:
        """Runs transformers' beam search, with Whisper's and the checkpoint's processors."""
        states = _states(encoded)
        rules = self.rules(prompt.shape[1])
        # generate adds the others itself, from the checkpoint's settings
        times = [rule for rule in rules if isinstance(rule, WhisperTimeStampLogitsProcessor)]
        inputs = {
            "encoder_outputs": BaseModelOutput(last_hidden_state=states),
            "attention_mask": torch.ones_like(states[:, :, 0], dtype=torch.long),
        }
        return beam_search(self.model, prompt, inputs, times, config, beams, keep, limits)

    def no_speech(self, prompt: Tensor, encoded: Encoded) -> list[float | None]:
        """Returns the probability of the no-speech token right after the start token."""
        language = self.prompts.language
        if language is None and self.prompts.languages:
            language = self.prompts.languages[0]  # any: only the number of tokens matters
        at = prompt.shape[1] - len(self.prompts.initial(language))
        logits = self.logits(prompt[:, : at + 1], encoded)[:, -1]
        return logits.float().softmax(-1)[:, self.prompts.no_speech].tolist()

    def logits(self, ids: Tensor, encoded: Encoded) -> Tensor:
        """Returns the logits after each token, before Whisper's logits processors."""
        read = BaseModelOutput(last_hidden_state=_states(encoded))
        return self.model(encoder_outputs=read, decoder_input_ids=ids, use_cache=False).logits

    def ends(self, seconds: float) -> list[int]:
        """Returns the end token, and the timestamps from `ENDING_S` before the end of the audio."""
        first = max(0, math.ceil(round((seconds - ENDING_S) / self.stamp_s, 6)))
        stamps = range(first, self.model.config.max_source_positions + 1)
        return [self.prompts.eos, *(self.prompts.timestamp_begin + stamp for stamp in stamps)]

    # ---- words

    def rules(self, width: int) -> LogitsProcessorList:
        """Returns Whisper's logits processors and those of the checkpoint's settings."""
        return processors(self.config, width, self.options, 0.0)

    @property
    def word_method(self) -> str | bool:
        """How words are timed, see `Timer`."""
        return self.options.word_timestamps

    def timer(self) -> Timer | None:
        """Returns the timer of `mmdecode.asr.alignment.cross_attention`, if words are timed."""
        if not self.options.word_timestamps:
            return None
        return Timer(
            self.model,
            self.tokenizer,
            self.word_method,
            stamps=self.prompts.timestamp_begin,
            frame_s=self.stamp_s,
            rate=self.mel.rate,
        )


def _states(encoded: Encoded) -> Tensor:
    assert encoded.states is not None, "Whisper's windows are encoded before they are decoded"
    return encoded.states
