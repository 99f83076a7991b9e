"""Whisper: a decoder with learned positions that reads the audio through cross-attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.models.whisper.modeling_whisper import WhisperDecoderLayer

from mmdecode.adapters import whisper_step
from mmdecode.adapters.attention import refuse_attention
from mmdecode.engine.contracts import BranchSpec, Context, Prompt
from mmdecode.errors import IncompatibleError

if TYPE_CHECKING:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    from mmdecode.engine.cache import RaggedCache


class WhisperAdapter:
    """Runs the decoder alone; the encoder's states arrive with the prompt."""

    model_types = ("whisper",)
    windows: ClassVar = {"full_attention": None}

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        refuse_attention(model)
        config = model.config
        self.model = model
        self.vocab = config.vocab_size
        self.num_layers = config.decoder_layers
        self.max_positions: int | None = config.max_target_positions
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        self._lean = whisper_step.usable(self._decoder)

    def prompt(self, ctx: Context, spec: BranchSpec) -> Prompt:
        """The caller's decoder prompt with the audio it came with."""
        if spec.view is not None or isinstance(spec.prompt, Tensor):
            raise IncompatibleError.between(
                f"branch {spec.name!r}",
                "WhisperAdapter",
                "it offers no views and no foreign prompts yet",
                "use prompt='same' or prompt='last_token'",
            )
        ids, mask = ctx.prompt_ids, ctx.prompt_mask
        if spec.prompt == "last_token":
            ids, mask = ids[:, -1:], mask[:, -1:]
        return self._with_audio(Prompt(ids=ids, mask=mask), ctx)

    def _with_audio(self, prompt: Prompt, ctx: Context) -> Prompt:
        """The prompt beside the encoder's states of the call."""
        audio = ctx.model_inputs["encoder_outputs"][0]
        if len(audio) != len(prompt.ids):
            raise IncompatibleError(
                f"{len(audio)} encoder rows for {len(prompt.ids)} decoder rows; expected one each: "
                "pass features or encoder outputs for every row"
            )
        if audio.shape[-1] != self.model.config.d_model:
            raise IncompatibleError(
                f"encoder states of width {audio.shape[-1]}; {type(self.model).__name__} expects "
                f"{self.model.config.d_model}; an assistant that listens to the target's encoder "
                "must have its width"
            )
        return Prompt(ids=prompt.ids, mask=prompt.mask, inputs={"audio": audio})

    def stack(self, prompts: Sequence[Prompt]) -> Prompt:
        """Rows of all prompts, branch by branch."""
        return Prompt(
            ids=torch.cat([p.ids for p in prompts]),
            mask=torch.cat([p.mask for p in prompts]),
            inputs={"audio": torch.cat([p.inputs["audio"] for p in prompts])},
        )

    def open(self, cache: RaggedCache, prompt: Prompt) -> Any:
        """Ragged self-attention beside a cross-attention cache that is filled once."""
        return WhisperPast(cache, prompt.inputs["audio"])

    def prefill(self, prompt: Prompt, mask: Tensor, positions: Tensor, past: Any) -> Tensor:
        """The prompt like any block: the audio lies in ``past``."""
        return self.forward(prompt.ids, mask, positions, past)

    def forward(self, tokens: Tensor, mask: Tensor, positions: Tensor, past: Any) -> Tensor:
        """States after the decoder's final norm."""
        if self._lean and not any(layer._forward_pre_hooks for layer in self._decoder.layers):
            layers = past.read(self._decoder.layers)
            return whisper_step.step(
                self._decoder, tokens, mask, positions, layers, past.cache.layers
            )
        return self._decoder(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            encoder_hidden_states=past.audio,
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

    def layers(self) -> Sequence[torch.nn.Module]:
        """The decoder's layers."""
        return self._decoder.layers


class WhisperPast:
    """Ragged self-attention, and the audio that every step attends to.

    The stock modules want a cross-attention cache and, although it is cached, the encoder's states;
    the lean step wants keys and values beside the weights. Each is made when it is first asked for.
    """

    def __init__(self, cache: RaggedCache, audio: Tensor) -> None:
        self.cache, self.audio = cache, audio
        self.caches = EncoderDecoderCache(cache, DynamicCache())
        self._layers: list[whisper_step.Layer] = []

    def read(self, layers: Iterable[torch.nn.Module]) -> list[whisper_step.Layer]:
        """Weights, and keys and values of the audio, by layer."""
        if not self._layers:
            self._layers = [whisper_step.Layer.of(layer, self.audio) for layer in layers]
        return self._layers

    def reorder_cache(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``, in that order."""
        self.caches.reorder_cache(rows)
        self.audio = self.audio[rows]
        self._layers = [layer.reorder(rows) for layer in self._layers]
