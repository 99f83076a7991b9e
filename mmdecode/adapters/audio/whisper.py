"""Adapter of Whisper, a speech model whose decoder has learned positions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.models.whisper.modeling_whisper import WhisperDecoderLayer

from mmdecode.adapters.audio import transforms as audio_transforms
from mmdecode.adapters.audio.lean_step import (
    Layer,
    LeanAdapter,
    LeanPast,
    embedded,
    norm,
    product,
    products,
    run_layer,
)
from mmdecode.adapters.audio.whisper_timestamps import NODE_PROCESSORS
from mmdecode.engine.adapter import BranchSpec, Prompt
from mmdecode.engine.call import Call
from mmdecode.engine.processors import NodeProcessors
from mmdecode.engine.request import token_ids
from mmdecode.quantization.modules import Int8Linear

if TYPE_CHECKING:
    from transformers import WhisperConfig, WhisperForConditionalGeneration


class WhisperAdapter(LeanAdapter):
    """Whisper, whose audio windows all have the same length, so no encoder state is padding."""

    summary = "Whisper and its distilled relatives"
    source = "Radford et al. 2023"
    model_types = ("whisper",)
    source_is_padded = False
    inputs = frozenset({"audio"})

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        self.max_positions = model.config.max_target_positions
        super().__init__(model, model.config.decoder_layers)

    @property
    def end(self) -> int:
        """Returns the id of the end token; lower ids are text, higher ids are special tokens."""
        return token_ids(self.model.generation_config.eos_token_id)[0]

    @property
    def no_timestamps(self) -> int:
        """Returns the id of the token that switches timestamps off; higher ids are timestamps."""
        return int(
            getattr(self.model.generation_config, "no_timestamps_token_id", None) or self.end
        )

    @property
    def no_speech(self) -> int:
        """Returns the id of the token that is predicted after `start` if nobody speaks."""
        return self.no_timestamps - 1

    @property
    def start(self) -> int:
        """Returns the id of the token that starts the transcript in every prompt."""
        return int(self.model.generation_config.decoder_start_token_id)

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """Returns the decoder prompt with encoder states, of changed audio if the branch asks."""
        if spec.transform != "audio":
            return super().prompt(call, spec)
        clean = super().prompt(call, replace(spec, transform=None, transform_options={}))
        states = audio_transforms.changed(call, spec, self._encode, clean.inputs["source"])
        return replace(clean, inputs={**clean.inputs, "source": states})

    def _encode(self, features: Tensor) -> Tensor:
        encoder = self.model.get_encoder()
        kind = encoder.conv1.weight
        return encoder(features.to(kind.device, kind.dtype)).last_hidden_state

    @staticmethod
    def describe(layer: Any) -> Layer:
        """Collects the weights of a layer."""
        own, cross = layer.self_attn, layer.encoder_attn
        return Layer(
            cache_index=own.layer_idx,
            heads=own.num_heads,
            self_norm=norm(layer.self_attn_layer_norm),
            qkv=products(own.q_proj, own.k_proj, own.v_proj),
            out=product(own.out_proj),
            cross_norm=norm(layer.encoder_attn_layer_norm),
            cross_q=product(cross.q_proj),
            cross_out=product(cross.out_proj),
            cross_kv=(cross.k_proj, cross.v_proj),
            final_norm=norm(layer.final_layer_norm),
            up=product(layer.fc1),
            activation=layer.activation_fn,
            down=product(layer.fc2),
            by_rows=isinstance(own.q_proj, Int8Linear),
        )

    def embed_at(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, None]:
        """Returns scaled embeddings plus learned positions, and ``None`` as rotation."""
        decoder = self._decoder
        hidden = embedded(decoder.embed_tokens, tokens)
        if decoder.embed_scale != 1.0:
            hidden = hidden * decoder.embed_scale
        return hidden + decoder.embed_positions.weight[positions], None

    def final_norm(self) -> torch.nn.LayerNorm:
        """Returns the norm after the last layer."""
        return self._decoder.layer_norm

    def node_processors(self) -> NodeProcessors:
        """Returns the vectorised processor of timestamps."""
        return NODE_PROCESSORS

    def head(self, hidden: Tensor) -> Tensor:
        """Computes logits; of a Medusa-Linear target with its head 0."""
        return self._head(hidden) if hasattr(self._head, "projection") else self.unembed(hidden)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the output matrix; for a Medusa-Linear target without its head 0."""
        own = getattr(self._head, "projection", None)
        return super().unembed(hidden) if own is None else own(hidden)

    @staticmethod
    def extra_layer(config: WhisperConfig) -> torch.nn.Module:
        """Returns an untrained decoder layer, for a drafter that loads its weights into it."""
        return WhisperDecoderLayer(config, layer_idx=0)

    def run_extra_layer(
        self, layer: torch.nn.Module, hidden: Tensor, mask: Tensor, past: LeanPast
    ) -> Tensor:
        """Runs such a layer on ``hidden (B, Q, H)``; ``past`` comes from `open`."""
        return run_layer(past.read([layer])[0], hidden, mask, past.cache.layers[0])
