"""Adapter of BART and its relatives, whose decoder counts positions by itself.

In transformers the decoder takes positions from the length of the cache, which is the same for all
rows. Here a hook on the table of position embeddings, installed for one pass, replaces them by the
position of every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mmdecode.adapters.seq2seq.base import EncoderDecoderAdapter
from mmdecode.engine.adapter import Mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BartAdapter(EncoderDecoderAdapter):
    """BART-like models: learned or sinusoidal positions, and a bias after the output matrix."""

    summary = "BART, mBART, Pegasus, Marian, Blenderbot and PLBart"
    source = "Lewis et al. 2020"
    model_types = (
        "bart",
        "mbart",
        "pegasus",
        "marian",
        "blenderbot",
        "blenderbot-small",
        "plbart",
    )

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, model.config.decoder_layers)
        self._positions = self.max_positions = int(model.config.max_position_embeddings)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """Computes the last layer's states; padding takes up positions, as in transformers."""
        table: nn.Module = self._decoder.embed_positions
        padded = (positions + past.pads[:, None]).clamp_max(self._positions - 1)

        def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "position_ids": padded.reshape(-1)}

        def answer(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return output.reshape(*padded.shape, -1)

        hooks = [
            table.register_forward_pre_hook(ask, with_kwargs=True),
            table.register_forward_hook(answer),
        ]
        try:
            return super().forward(tokens, mask, positions, past)
        finally:
            for hook in hooks:
                hook.remove()

    def head(self, hidden: Tensor) -> Tensor:
        """Computes logits, including the checkpoint's untrained logits bias."""
        return self.unembed(hidden) + self.model.final_logits_bias
