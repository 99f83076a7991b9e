"""Adapters of T5, mT5 and umT5, whose attention has a relative position bias per head.

In transformers the bias is computed as if the tokens of a pass started at cache slot 0. This bias
is known in advance, so the attention mask, separate for each head, contains the bias of the true
distances minus that bias. One token that attends to all slots needs no mask: its slot is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmdecode._compat import attention_implementation
from mmdecode.adapters.seq2seq.base import EncoderDecoderAdapter, SourcePast
from mmdecode.engine.adapter import Mask, Prompt
from mmdecode.engine.masks import distances
from mmdecode.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class T5Adapter(EncoderDecoderAdapter):
    """T5, Flan-T5 and mT5, whose layers share the position bias of the first layer.

    Raises:
        UnsupportedModelError: The model is a copy with some layers, without the first one.
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
                f"a {type(model).__name__} without its first layer, which has the bias of all "
                "layers; keep layer 0"
            )
        self._farthest = config.relative_attention_max_distance  # distances beyond share its bias
        self._by_distance: dict[nn.Module, Tensor] = {}  # (heads, farthest + 1)

    @staticmethod
    def scales(config: Any) -> bool:
        """Whether hidden states are scaled before the output matrix; never in mT5."""
        return getattr(config, "scale_decoder_outputs", False)

    def prefill(self, prompt: Prompt, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the decoder's states of the prompt; padding takes up positions."""
        order = torch.arange(prompt.ids.shape[1], device=prompt.ids.device)
        return self._run(prompt.ids, mask, order.expand_as(prompt.ids), past)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the states after the decoder's final norm."""
        return self._run(tokens, mask, positions - positions[:, :1], past)

    def steps_unmasked(self, visible: int) -> bool:
        """Whether attention is sdpa; transformers' bias is that of the cache's length then."""
        return attention_implementation(self.model.config) == "sdpa"

    def _run(self, tokens: Tensor, mask: Mask, depths: Tensor, past: SourcePast) -> Tensor:
        if mask is None:
            return super().forward(tokens, mask, depths, past)
        assert isinstance(mask, Tensor), "one layer type, one mask"
        distance = self._distance(mask, depths, past)
        mask = mask + self._correction(self._attention[0], distance)
        return super().forward(tokens, mask, depths, past)

    def _distance(self, mask: Tensor, depths: Tensor, past: SourcePast) -> Tensor:
        """Returns the distance of each token to each cache slot, ``(R, Q, K)``, clipped.

        Args:
            mask: Attention mask, ``(R, 1, Q, K)``.
            depths: Distance of each token of the pass from the first one, ``(R, Q)``.
            past: The caches, which know the slot of the first token.
        """
        begin = past.cache.start + past.cache.rows.offset
        relative = torch.arange(mask.shape[-1], device=mask.device) - begin[:, None]  # (R, K)
        return distances(relative, depths).clamp(0, self._farthest)

    def _correction(self, attention: nn.Module, distance: Tensor) -> Tensor:
        """Returns the bias of true distances minus transformers' bias, ``(R, heads, Q, K)``."""
        bias: Any = attention.compute_bias
        if attention not in self._by_distance:
            reach = self._farthest + 1
            table = bias(reach, reach, device=distance.device)[0, :, -1].flip(-1)
            self._by_distance[attention] = table
        right = self._by_distance[attention][:, distance].transpose(0, 1)
        return right - bias(*distance.shape[1:], device=distance.device)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Applies the output matrix, after scaling the states if embeddings are tied."""
        return self._head(hidden if self._scale == 1.0 else hidden * self._scale)

    def layers(self) -> Sequence[torch.nn.Module]:
        """Returns the decoder's layers."""
        return self._decoder.block


class UMT5Adapter(T5Adapter):
    """umT5, in which every layer has its own position bias, and so needs its own mask."""

    summary = "umT5, with a bias of distances in every layer"
    source = "Chung et al. 2023"
    model_types = ("umt5",)

    @staticmethod
    def scales(config: Any) -> bool:
        """Whether states are scaled before the output matrix: if embeddings are tied."""
        return config.tie_word_embeddings

    def _run(self, tokens: Tensor, mask: Mask, depths: Tensor, past: SourcePast) -> Tensor:
        if mask is None:
            return super()._run(tokens, mask, depths, past)
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
