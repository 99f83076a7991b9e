"""Whisper: a decoder with learned positions that reads the audio through cross-attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.models.whisper.modeling_whisper import WhisperDecoderLayer

from mmdecode.adapters import audio_views, whisper_step
from mmdecode.adapters.encoder_decoder import EncoderDecoderAdapter, SourcePast
from mmdecode.engine.contracts import BranchSpec, Context, Mask, Prompt
from mmdecode.engine.setup import token_ids

if TYPE_CHECKING:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    from mmdecode.engine.cache import RaggedCache


class WhisperAdapter(EncoderDecoderAdapter):
    """Audio is never padding: its windows are of one length. Its views: `audio_views`."""

    model_types = ("whisper",)
    source_is_padded = False
    hears_audio = True

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        super().__init__(model, model.config.decoder_layers)
        self.max_positions = model.config.max_target_positions
        self._lean = whisper_step.usable(self._decoder)

    @property
    def end(self) -> int:
        """Ends a text; all ids below it are text, all above it are not."""
        return token_ids(self.model.generation_config.eos_token_id)[0]

    @property
    def no_timestamps(self) -> int:
        """Asks for no times, as the last token of a prompt; timestamps are all ids above it."""
        return int(
            getattr(self.model.generation_config, "no_timestamps_token_id", None) or self.end
        )

    @property
    def no_speech(self) -> int:
        """Is predicted at `start` where nobody speaks."""
        return self.no_timestamps - 1

    @property
    def start(self) -> int:
        """Where a transcript starts, in every prompt."""
        return int(self.model.generation_config.decoder_start_token_id)

    def prompt(self, ctx: Context, spec: BranchSpec) -> Prompt:
        """As of any encoder-decoder; of view ``audio`` with the states of the changed recording."""
        if spec.view != "audio":
            return super().prompt(ctx, spec)
        clean = super().prompt(ctx, replace(spec, view=None, view_options={}))
        states = audio_views.changed(ctx, spec, self._encode, clean.inputs["source"])
        return replace(clean, inputs={**clean.inputs, "source": states})

    def _encode(self, features: Tensor) -> Tensor:
        encoder = self.model.get_encoder()
        kind = encoder.conv1.weight
        return encoder(features.to(kind.device, kind.dtype)).last_hidden_state

    def open(self, cache: RaggedCache, prompt: Prompt) -> Any:
        """As of any encoder-decoder; the lean step's layers are read when they are asked for."""
        return WhisperPast(cache, prompt)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States after the decoder's final norm."""
        if self._lean and not any(layer._forward_pre_hooks for layer in self._decoder.layers):
            assert isinstance(mask, Tensor), "layers of one type"
            layers = past.read(self._decoder.layers)
            return whisper_step.step(
                self._decoder, tokens, mask, positions, layers, past.cache.layers
            )
        return self._decoder(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            encoder_hidden_states=past.source,
            past_key_values=past.caches,
            use_cache=True,
        ).last_hidden_state

    def head(self, hidden: Tensor) -> Tensor:
        """Logits."""
        return self._head(hidden)

    def unembed(self, hidden: Tensor) -> Tensor:
        """By the shared output matrix alone; a Medusa-Linear target has head 0 before it."""
        return getattr(self._head, "projection", self._head)(hidden)

    @staticmethod
    def extra_layer(config: WhisperConfig) -> torch.nn.Module:
        """A decoder layer of the family, untrained, for a drafter that brings its weights."""
        return WhisperDecoderLayer(config, layer_idx=0)

    @staticmethod
    def run_extra_layer(
        layer: torch.nn.Module, hidden: Tensor, mask: Tensor, past: WhisperPast
    ) -> Tensor:
        """``hidden (B, Q, H)`` through such a layer; ``past`` comes from `open`."""
        return whisper_step.run_layer(past.read([layer])[0], hidden, mask, past.cache.layers[0])


class WhisperPast(SourcePast):
    """Beside what the stock modules take, weights, keys and values for the lean step."""

    def __init__(self, cache: RaggedCache, prompt: Prompt) -> None:
        super().__init__(cache, prompt)
        self._layers: list[whisper_step.Layer] = []

    def read(self, layers: Iterable[torch.nn.Module]) -> list[whisper_step.Layer]:
        """Weights, and keys and values of the audio, by layer."""
        if not self._layers:
            self._layers = [whisper_step.Layer.of(layer, self.source) for layer in layers]
        return self._layers

    def reorder_cache(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``, in that order."""
        super().reorder_cache(rows)
        self._layers = [layer.reorder(rows) for layer in self._layers]
