"""T5: no position embeddings, but a relative bias per head, computed from cache slots.

transformers computes distances as if the block began at slot 0. The bias that it will add is known,
so the mask carries the difference to the bias of the true distances, head by head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmdecode.adapters.seq2seq.base import EncoderDecoderAdapter, SourcePast
from mmdecode.engine.adapter import Mask, Prompt
from mmdecode.engine.masks import distances
from mmdecode.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class T5Adapter(EncoderDecoderAdapter):
    """T5, Flan-T5 and mT5, whose layers share the first layer's bias.

    Raises:
        UnsupportedModelError: A shared copy leaves that layer out.
    """

    summary = "T5, Flan-T5 and mT5"
    source = "Raffel et al. 2020"
    model_types: tuple[str, ...] = ("t5", "mt5")

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, model.config.num_decoder_layers)
        config = model.config
        self._scale = config.d_model**-0.5 if self.scales(config) else 1.0
        self._attention = [block.layer[0].SelfAttention for block in self._decoder.block]
        if not self._attention[0].has_relative_attention_bias:
            raise UnsupportedModelError(
                f"a {type(model).__name__} without its first layer, which holds the bias of all; "
                "keep layer 0"
            )
        self._farthest = config.relative_attention_max_distance  # distances beyond share its bias
        self._by_distance: dict[nn.Module, Tensor] = {}  # (heads, farthest + 1)

    @staticmethod
    def scales(config: Any) -> bool:
        """Whether states are scaled before the output matrix; never in mT5."""
        return getattr(config, "scale_decoder_outputs", False)

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States of the prompt, a chain from its first slot, padding included."""
        order = torch.arange(prompt.ids.shape[1], device=prompt.ids.device)
        return self._run(prompt.ids, mask, order.expand_as(prompt.ids), past)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States after the decoder's final norm."""
        return self._run(tokens, mask, positions - positions[:, :1], past)

    def _run(self, tokens: Tensor, mask: Mask, depths: Tensor, past: SourcePast) -> Tensor:
        assert isinstance(mask, Tensor), "one layer type, one mask"
        distance = self._distance(mask, depths, past)
        mask = mask + self._correction(self._attention[0], distance)
        return super().forward(tokens, mask, depths, past)

    def _distance(self, mask: Tensor, depths: Tensor, past: SourcePast) -> Tensor:
        """Distance of each token to each slot, at most the farthest, ``(R, Q, K)``.

        Args:
            mask: ``(R, 1, Q, K)``.
            depths: Distance of each token from the block's first, ``(R, Q)``.
            past: Cache that knows in which slot the block begins.
        """
        begin = past.cache.start + past.cache.rows.offset
        relative = torch.arange(mask.shape[-1], device=mask.device) - begin[:, None]  # (R, K)
        return distances(relative, depths).clamp(0, self._farthest)

    def _correction(self, attention: nn.Module, distance: Tensor) -> Tensor:
        """Bias of the true distances minus the one that will be added, ``(R, heads, Q, K)``."""
        bias: Any = attention.compute_bias
        if attention not in self._by_distance:
            reach = self._farthest + 1
            table = bias(reach, reach, device=distance.device)[0, :, -1].flip(-1)
            self._by_distance[attention] = table
        right = self._by_distance[attention][:, distance].transpose(0, 1)
        return right - bias(*distance.shape[1:], device=distance.device)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the output matrix, after the scale that tied embeddings need."""
        return self._head(hidden if self._scale == 1.0 else hidden * self._scale)

    def layers(self) -> Sequence[torch.nn.Module]:
        """The decoder's layers."""
        return self._decoder.block


class UMT5Adapter(T5Adapter):
    """umT5, in which every layer has its own bias, and so its own mask."""

    summary = "umT5, with a bias of distances in every layer"
    source = "Chung et al. 2023"
    model_types = ("umt5",)

    @staticmethod
    def scales(config: Any) -> bool:
        """Whether states are scaled before the output matrix: with tied embeddings."""
        return config.tie_word_embeddings

    def _run(self, tokens: Tensor, mask: Mask, depths: Tensor, past: SourcePast) -> Tensor:
        assert isinstance(mask, Tensor), "one layer type, one mask"
        distance = self._distance(mask, depths, past)

        def correct(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            right = kwargs["attention_mask"] + self._correction(attention, distance)
            return args, {**kwargs, "attention_mask": right}

        hooks = [a.register_forward_pre_hook(correct, with_kwargs=True) for a in self._attention]
        try:
            return EncoderDecoderAdapter.forward(self, tokens, mask, depths, past)
        finally:
            for hook in hooks:
                hook.remove()
