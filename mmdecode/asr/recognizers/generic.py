"""Recogniser for any speech-to-text encoder-decoder of transformers.

A recording that fits into one window is decoded as by plain ``generate``. A longer recording is
cut where voice activity detection (``vad``) cut out silence; else at the longest pause in the
second half of a window; else where the window is full. In the last case windows overlap by
`OVERLAP_S`, and their texts are merged (`mmdecode.asr.decoding.chunks`). Only windows of the same
length are encoded together, so that no padding is encoded; the encoder states are padded instead.

Drafts and guides work for models that the engine has an adapter for. Other models are decoded by
plain ``generate``, and a draft or guide is an error.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, ModelOutput

from mmdecode import registry
from mmdecode.asr.audio.recording import Recording
from mmdecode.asr.decoding.beams import beam_search
from mmdecode.asr.recognizers.base import Recognizer
from mmdecode.asr.recognizers.contract import Encoded, Span
from mmdecode.asr.recognizers.pauses import pause_in
from mmdecode.checkpoints import code_trusted
from mmdecode.engine.encoding import alike, encode_unpadded, stacked
from mmdecode.engine.growing_source import SOURCES
from mmdecode.errors import InputError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from mmdecode.asr.audio.reading import Source
    from mmdecode.asr.decoding.beams import Scored
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.decoder import Decoder

SHORTEST_S = 0.1
"""Length in seconds below which a window is padded with silence."""
FAINTEST = 2.0**-14
"""Amplitude (two steps of 16-bit audio) up to which a window counts as silent. Silent windows are
not decoded, since models hallucinate on them."""
LEAST_S = 0.5
"""Least length of the rest of a recording after a cut, in seconds; at most a quarter window."""
OVERLAP_S = 3.0
"""Overlap of windows in seconds if no pause was found; at most a third of a window."""


class GenericRecognizer(Recognizer):
    """Recogniser of a model of ``AutoModelForSpeechSeq2Seq``, with windows cut at pauses."""

    summary = "other encoder-decoders of AutoModelForSpeechSeq2Seq: windows cut at pauses"

    def __init__(self, model: Any, processor: Any, options: TranscribeOptions) -> None:
        super().__init__(model, processor, options)
        try:
            registry.adapter_class(model.config.model_type)
        except UnsupportedModelError:
            self.capabilities = replace(self.capabilities, drafts=False)

    @staticmethod
    def fits(model_type: str) -> bool:
        """Whether a model type belongs to transformers' ``AutoModelForSpeechSeq2Seq``."""
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES as KNOWN,
        )

        return model_type in KNOWN

    @classmethod
    def load(cls, path: str, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        """Loads model and processor by transformers' Auto classes.

        Raises:
            InputError: There is no processor, or it lacks a tokenizer or feature extractor.
        """
        from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor

        trust = code_trusted()
        try:
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust)
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            raise InputError(
                f"{path}: its processor cannot be loaded ({' '.join(str(error).split())[:200]}); "
                "expected a tokenizer and a feature extractor next to the weights: copy "
                "tokenizer.json, tokenizer_config.json and preprocessor_config.json of the "
                "checkpoint it was trained from"
            ) from error
        for part in ("tokenizer", "feature_extractor"):
            if getattr(processor, part, None) is None:
                raise InputError(
                    f"{path} has no {part.replace('_', ' ')}, only a {type(processor).__name__}; "
                    "copy the files of the checkpoint it was trained from"
                )
        model = AutoModelForSpeechSeq2Seq.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust
        )
        return model, processor

    # ---- windows

    def open(self, source: Source) -> Recording:
        """Opens a recording, and reads it once for its length and hash."""
        return Recording(source, self.rate)

    def span(self, recording: Recording, seek: int, seams: Sequence[float]) -> Span:
        """Returns the rest of the recording if it fits, or a window cut as the module says."""
        left, whole = recording.frames - seek, self.window_frames
        if left <= whole:
            return Span(left, recording.frames)
        earliest = whole // 2
        latest = min(whole, left - min(round(LEAST_S * self.rate), whole // 4))
        meeting = [round(at * self.rate) - seek for at in seams]
        cut = max((at for at in meeting if earliest <= at <= latest), default=None)
        if cut is None:
            cut = pause_in(recording.waveform(seek, seek + latest), self.rate, earliest)
        if cut is not None:
            return Span(cut, seek + cut)
        overlap = min(round(OVERLAP_S * self.rate), whole // 3)
        return Span(whole, seek + whole - overlap, joined=True)

    def is_silent(self, recording: Recording, seek: int, count: int) -> bool:
        """Whether nothing in the window is louder than `FAINTEST`."""
        return bool((np.abs(recording.waveform(seek, seek + count)) <= FAINTEST).all())

    def read(self, recording: Recording, seek: int, count: int) -> Mapping[str, Tensor]:
        """Returns the processor's output for the samples of a window."""
        [found] = self.features([recording.waveform(seek, seek + count)])
        return found

    def features(self, waves: Sequence[Any]) -> Sequence[Mapping[str, Tensor]]:
        """Returns the encoder inputs of each waveform by itself, tensors with a batch of 1."""
        shortest = round(SHORTEST_S * self.rate)
        found = []
        for wave in waves:
            padded = np.pad(wave, (0, max(0, shortest - len(wave))))
            with np.errstate(divide="ignore", invalid="ignore"):
                given = self.processor.feature_extractor(
                    padded, sampling_rate=self.rate, return_tensors="pt"
                )
            found.append({name: self._placed(value) for name, value in given.items()})
        return found

    def _placed(self, value: Tensor) -> Tensor:
        """Moves a tensor to the model's device; NaN, from normalising silence, becomes 0."""
        if not value.is_floating_point():
            return value.to(self.model.device)
        return value.nan_to_num(0.0, 0.0, 0.0).to(self.model.device, self.model.dtype)

    def encode(self, windows: Sequence[Any], seconds: Sequence[float]) -> Encoded:
        """Encodes windows of the same length together; does nothing for models without adapter."""
        if not self.capabilities.drafts:
            return Encoded(windows, seconds)
        return Encoded(windows, seconds, *encode_unpadded(self.model.get_encoder(), windows))

    # ---- lengths

    def most_tokens(self, seconds: float) -> int:
        """Returns the checkpoint's limit, else the number of the decoder's positions."""
        if self.config.max_new_tokens is not None:
            return int(self.config.max_new_tokens)
        positions = (
            getattr(self.model.config, name, None)
            for name in ("max_target_positions", "max_position_embeddings")
        )
        limits = [self.config.max_length, *positions]
        return max(1, min((int(one) for one in limits if one), default=448) - 1)

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
        """Decodes windows with the logits processors of the checkpoint's generation settings."""
        config = self._of_checkpoint(config, temperature)
        if encoded.states is None:
            return self._plain(decoder, prompt, encoded, config, names)
        return GenerationMixin.generate(
            self.model,
            decoder_input_ids=prompt,
            **read_from(encoded),
            generation_config=config,
            custom_generate=decoder,
            mm_inputs=raw_inputs(encoded, sources),
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
        """Runs transformers' beam search, on windows of the same length at a time."""
        config = self._of_checkpoint(config, 0.0)
        found: dict[int, list[Scored]] = {}
        for rows in alike(encoded.inputs):
            inputs = stacked([encoded.inputs[row] for row in rows])
            own = [limits[row] for row in rows]
            ranked = beam_search(self.model, prompt[rows], inputs, [], config, beams, keep, own)
            found |= dict(zip(rows, ranked, strict=True))
        return [found[row] for row in range(len(prompt))]

    def logits(self, ids: Tensor, encoded: Encoded) -> Tensor:
        """Returns the logits after each token; windows without states are encoded, one by one."""
        given: dict[str, Any] = {"use_cache": False}
        if encoded.states is not None:
            return self.model(**read_from(encoded), decoder_input_ids=ids, **given).logits
        rows = zip(encoded.inputs, ids.split(1), strict=True)
        return torch.cat(
            [self.model(**inputs, decoder_input_ids=row, **given).logits for inputs, row in rows]
        )

    def _of_checkpoint(self, given: GenerationConfig, temperature: float) -> GenerationConfig:
        """Merges settings of checkpoint and call, without transformers' default top-k of 50."""
        config = copy.deepcopy(self.config)
        config.update(**given.to_diff_dict() | {"max_new_tokens": None})
        config.update(
            do_sample=given.do_sample,
            num_beams=1,
            output_scores=given.output_scores,
            return_dict_in_generate=given.return_dict_in_generate,
        )
        if temperature > 0:
            config.update(temperature=temperature, top_k=self.config.top_k or 0)
        return config

    def _plain(
        self,
        decoder: Decoder,
        prompt: Tensor,
        encoded: Encoded,
        config: GenerationConfig,
        names: list[str],
    ) -> Any:
        """Decodes each window alone by plain ``generate``, with a separate seed."""
        sequences, scores = [], []
        device = self.model.device
        devices = [device] if device.type == "cuda" else []
        for row, name in enumerate(names):
            seed = int.from_bytes(hashlib.blake2b(f"{decoder.seed}/{name}".encode()).digest()[:8])
            with torch.random.fork_rng(devices, enabled=bool(config.do_sample)):
                if config.do_sample:
                    torch.manual_seed(seed)
                output = GenerationMixin.generate(
                    self.model,
                    decoder_input_ids=prompt[row : row + 1],
                    generation_config=config,
                    **encoded.inputs[row],
                )
            if config.return_dict_in_generate:
                scores.append(torch.cat(output.scores))
                output = output.sequences
            sequences.append(output[0])
        ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=self.pad)
        if not config.return_dict_in_generate:
            return ids
        padded = torch.nn.utils.rnn.pad_sequence(scores)  # (L, B, V)
        return ModelOutput(sequences=ids, scores=tuple(padded))


def raw_inputs(encoded: Encoded, sources: list[list[int]]) -> dict[str, Any]:
    """Returns the inputs that drafters and adapters read besides ids, by name.

    Args:
        encoded: Encoded windows.
        sources: Token ids that a drafter may copy from, per row.
    """
    found: dict[str, Any] = {"source_ids": sources}
    if encoded.sources:
        found[SOURCES] = encoded.sources
    return found


@dataclass
class MaskedStates(BaseModelOutput):
    """Encoder output with a mask, true for states that are not padding."""

    attention_mask: Tensor | None = None


def read_from(encoded: Encoded) -> dict[str, Any]:
    """Returns the inputs of ``generate`` for encoder states and their mask."""
    assert encoded.states is not None, "the windows are encoded"
    mask = encoded.mask
    states = MaskedStates(last_hidden_state=encoded.states, attention_mask=mask)
    if mask is None:  # given too, or generate warns of padding where pad and end are one id
        mask = torch.ones(encoded.states.shape[:2], device=encoded.states.device)
    return {"attention_mask": mask.long(), "encoder_outputs": states}
