"""BART and its relatives: positions come from a table that the forward pass indexes by itself.

transformers counts a decoder's positions from the cache length, one for all rows. A hook on the
table, there for the length of one pass, gives it the position of every token instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mmdecode.adapters.seq2seq.base import EncoderDecoderAdapter
from mmdecode.engine.adapter import Mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BartAdapter(EncoderDecoderAdapter):
    """Learned or sinusoidal positions; a bias after the output matrix."""

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
        self._places = self.max_positions = int(model.config.max_position_embeddings)

    def forward(self, tokens: Tensor, mask: Mask, positions: Tensor, past: Any) -> Tensor:
        """States of the last layer; padding counts as a position, as in transformers."""
        table: nn.Module = self._decoder.embed_positions
        places = (positions + past.pads[:, None]).clamp_max(self._places - 1)

        def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "position_ids": places.reshape(-1)}

        def answer(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return output.reshape(*places.shape, -1)

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
        """Logits, with the bias that no gradient ever moved but checkpoints may hold."""
        return self.unembed(hidden) + self.model.final_logits_bias
