"""Adapter of MoonshineStreaming: Moonshine's decoder, which adds positions to the encoder's states.

The encoder has no positions, so the decoder adds learned ones to its states, and projects them to
its own width. In transformers 5.23 the addition changes the caller's tensor: a second pass over the
same states would read states with the positions added twice. This adapter therefore passes a copy
to the modules; the lean step adds and projects once per call, to a new tensor.

The sliding windows of the encoder's layers are applied only if the encoder is given an attention
mask. Plain ``generate`` makes none, so that without ``attention_mask`` the states, and the text,
are others than those the model was trained for. The adapter warns of such states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from warnings import warn

import torch
from torch import Tensor, nn

from mmdecode.adapters.audio.moonshine import MoonshineAdapter
from mmdecode.engine.adapter import BranchSpec, Prompt
from mmdecode.engine.call import Call
from mmdecode.errors import IncompatibleError

if TYPE_CHECKING:
    from transformers import MoonshineStreamingConfig


class MoonshineStreamingAdapter(MoonshineAdapter):
    """MoonshineStreaming, whose encoder may be narrower or wider than its decoder."""

    summary = "MoonshineStreaming, whose decoder adds positions to the encoder's states"
    source = "transformers.models.moonshine_streaming (modeling_moonshine_streaming.py)"
    model_types = ("moonshine_streaming",)
    changes_source: ClassVar = True

    @property
    def source_width(self) -> int:
        """Returns the width of the encoder's states."""
        return int(self.model.config.encoder_config.hidden_size)

    def prompt(self, call: Call, spec: BranchSpec) -> Prompt:
        """Returns the decoder's prompt with the encoder's states.

        Raises:
            IncompatibleError: There are more states than positions.

        Warns:
            UserWarning: The states have no mask, so that the encoder applied no sliding windows.
        """
        prompt = super().prompt(call, spec)
        count, most = prompt.inputs["source"].shape[1], self._decoder.pos_emb.num_embeddings
        if count > most:
            raise IncompatibleError(
                f"{count} encoder states; {self.name} has positions for {most}: cut the audio "
                "into shorter parts, or transcribe it with Transcriber, which cuts it at pauses"
            )
        if self.source_mask(call) is None:
            warn(
                f"{self.name}: encoder states without a mask; transformers applies the encoder's "
                "sliding windows only with one: pass attention_mask=torch.ones_like(input_values)",
                stacklevel=2,
            )
        return prompt

    def embed_source(self, source: Tensor) -> Tensor:
        """Returns the encoder's states ``(B, S, H)`` with positions, in the decoder's width."""
        order = torch.arange(source.shape[1], device=source.device)
        projected: Tensor = self._decoder.proj(source + self._decoder.pos_emb(order))
        return projected

    @staticmethod
    def extra_layer(config: MoonshineStreamingConfig) -> nn.Module:
        """Returns an untrained decoder layer, for a drafter that loads its weights into it."""
        from transformers.models.moonshine_streaming import modeling_moonshine_streaming as theirs

        layer: Any = theirs.MoonshineStreamingDecoderLayer(config, layer_idx=0)
        return layer
