"""T5: no positions, but a bias for each head and distance, which the forward pass takes from slots.

transformers counts distances as if the block began at slot 0. What it will add is known, so the
mask carries the difference to the bias of the true distances, head by head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmdecode.adapters.encoder_decoder import EncoderDecoderAdapter, SourcePast
from mmdecode.engine.branch import distances
from mmdecode.engine.contracts import Mask, Prompt
from mmdecode.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class T5Adapter(EncoderDecoderAdapter):
    """T5 and Flan-T5; the first layer's bias is shared by all.

    Raises:
        UnsupportedModelError: A view leaves that layer out.
    """

    model_types = ("t5",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, model.config.num_decoder_layers)
        config = model.config
        scaled = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
        self._scale = config.d_model**-0.5 if scaled else 1.0
        self._attention = self._decoder.block[0].layer[0].SelfAttention
        if not self._attention.has_relative_attention_bias:
            raise UnsupportedModelError(
                f"a {type(model).__name__} without its first layer, which holds the bias of all; "
                "keep layer 0"
            )
        self._farthest = config.relative_attention_max_distance  # distances beyond share its bias
        self._by_distance: Tensor | None = None  # (heads, farthest + 1)

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """The prompt as a chain from its first slot, padding included."""
        order = torch.arange(prompt.ids.shape[1], device=prompt.ids.device)
        return self._run(prompt.ids, mask, order.expand_as(prompt.ids), past)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States after the decoder's final norm."""
        return self._run(tokens, mask, positions - positions[:, :1], past)

    def _run(self, tokens: Tensor, mask: Mask, depths: Tensor, past: SourcePast) -> Tensor:
        assert isinstance(mask, Tensor), "one layer type, one mask"
        return super().forward(tokens, mask + self._correction(mask, depths, past), depths, past)

    def _correction(self, mask: Tensor, depths: Tensor, past: SourcePast) -> Tensor:
        """Bias of the true distances less the one that will be added, ``(R, heads, Q, K)``.

        Args:
            mask: ``(R, 1, Q, K)``.
            depths: Distance of each token from the block's first, ``(R, Q)``.
            past: Says in which slot the block begins.
        """
        width, visible = mask.shape[-2:]
        bias, device = self._attention.compute_bias, mask.device
        if self._by_distance is None:
            reach = self._farthest + 1
            self._by_distance = bias(reach, reach, device=device)[0, :, -1].flip(-1)
        begin = past.cache.start + past.cache.rows.offset
        relative = torch.arange(visible, device=device) - begin[:, None]  # (R, K)
        distance = distances(relative, depths).clamp(0, self._farthest)
        return self._by_distance[:, distance].transpose(0, 1) - bias(width, visible, device=device)

    def unembed(self, hidden: Tensor) -> Tensor:
        """The output matrix, behind the scale that comes with tied embeddings."""
        return self._head(hidden if self._scale == 1.0 else hidden * self._scale)

    def layers(self) -> Sequence[torch.nn.Module]:
        """The decoder's layers."""
        return self._decoder.block
