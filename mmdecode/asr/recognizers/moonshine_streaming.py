"""Recogniser for MoonshineStreaming, whose encoder looks only some frames ahead.

The model reads raw samples in frames of 5 ms. In transformers 5.23 its encoder applies the sliding
windows of its layers only if it is given an attention mask; without one every state depends on the
whole recording. The encoder's inputs therefore always have a mask. A window is padded with zeros to
whole frames, which the mask does not hide, so that the end of the last word is not cut off.

A stream encodes only new samples, see `MoonshineStreamingRecognizer.encoder_cache`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.asr.recognizers.contract import Encoded
from mmdecode.asr.recognizers.encoder_cache import (
    EncoderCache,
    StreamInputs,
    cache_for,
    encode_cached,
)
from mmdecode.asr.recognizers.generic import SHORTEST_S
from mmdecode.asr.recognizers.moonshine import MoonshineRecognizer
from mmdecode.models.moonshine_streaming_encoder import IncrementalEncoder

if TYPE_CHECKING:
    from mmdecode.asr.audio.recording import Recording
    from mmdecode.asr.options import TranscribeOptions


class MoonshineStreamingRecognizer(MoonshineRecognizer):
    """Recogniser of a ``MoonshineStreamingForConditionalGeneration`` with its processor."""

    summary = "MoonshineStreaming: raw samples, windows cut at pauses"
    source = "transformers.models.moonshine_streaming (modeling_moonshine_streaming.py)"
    model_types = ("moonshine_streaming",)

    def __init__(self, model: Any, processor: Any, options: TranscribeOptions) -> None:
        embedder = model.get_encoder().embedder
        self.frame_len = int(embedder.frame_len)
        per_state = self.frame_len * embedder.conv1.stride[0] * embedder.conv2.stride[0]
        positions = model.get_decoder().pos_emb.num_embeddings
        rate = model.config.encoder_config.sample_rate
        self.window_s = min(type(self).window_s, positions * per_state / rate)
        super().__init__(model, processor, options)

    def features(self, waves: Sequence[Any]) -> Sequence[Mapping[str, Tensor]]:
        """Returns the encoder inputs of each waveform by itself, with a mask of all samples."""
        found = []
        for one in super().features(waves):
            samples = one["input_values"]
            samples = pad(samples, (0, -samples.shape[1] % self.frame_len))
            mask = torch.ones_like(samples, dtype=torch.long)
            found.append({"input_values": samples, "attention_mask": mask})
        return found

    def read(self, recording: Recording, seek: int, count: int) -> Mapping[str, Tensor]:
        """Returns the encoder inputs of a window; those of a stream with the stream's cache."""
        inputs = super().read(recording, seek, count)
        cache = recording.encoder_cache
        length = max(count, round(SHORTEST_S * self.rate))
        if cache is None:
            return inputs
        return StreamInputs(inputs, cache, inputs["input_values"][0, :length])

    def encoder_cache(self) -> EncoderCache:
        """Returns a cache for the windows of one stream, which encodes only new samples."""
        encoder = self.model.get_encoder()
        return cache_for(self, lambda: IncrementalEncoder(encoder))

    def encode(self, windows: Sequence[Any], seconds: Sequence[float]) -> Encoded:
        """Encodes windows, those of streams by their caches; states always have a mask."""
        found = encode_cached(self.model.get_encoder(), windows, seconds)
        if found.mask is None and found.states is not None:
            mask = found.states.new_ones(found.states.shape[:2], dtype=torch.bool)
            found = replace(found, mask=mask)
        return found
