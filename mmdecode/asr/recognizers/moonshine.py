"""Recogniser for Moonshine: reads raw samples of any length; has no prompt and no timestamps.

Moonshine's encoder normalises over time, so padding would change the states of a recording. Only
windows of the same length are therefore encoded together. The model was trained on recordings of up
to 30 s, and hallucinates text after the end of the audio. A window is therefore limited to
`TOKENS_PER_S` tokens per second, as in the package of its authors.

Source: Jeffries et al. 2024, arXiv:2410.15608; the limit is that of the authors' package.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mmdecode.asr.decoding.beams import beam_search
from mmdecode.asr.recognizers.generic import GenericRecognizer, read_from

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from mmdecode.asr.decoding.beams import Scored
    from mmdecode.asr.recognizers.contract import Encoded

TOKENS_PER_S = 6.5
"""Most tokens per second of audio; written from memory of the authors' package, not verified."""


class MoonshineRecognizer(GenericRecognizer):
    """Recogniser of a ``MoonshineForConditionalGeneration`` with its processor."""

    summary = "Moonshine: raw samples, windows cut at pauses"
    source = "Jeffries et al. 2024, arXiv:2410.15608"
    model_types = ("moonshine",)

    def most_tokens(self, seconds: float) -> int:
        """Returns the limit from the window's length and the decoder's number of positions."""
        return max(1, min(math.ceil(seconds * TOKENS_PER_S), super().most_tokens(seconds)))

    def searched(
        self,
        prompt: Tensor,
        encoded: Encoded,
        config: GenerationConfig,
        beams: int,
        keep: int,
        limits: Sequence[int],
    ) -> list[list[Scored]]:
        """Runs transformers' beam search on the encoder states of all windows, masked."""
        config = self._of_checkpoint(config, 0.0)
        inputs = read_from(encoded)
        return beam_search(self._for_search, prompt, inputs, [], config, beams, keep, limits)

    @cached_property
    def _for_search(self) -> Any:
        """The model with the same weights; on CPU without the padding of heads.

        The padding is for kernels of GPUs. Transformers copies all encoder keys and values for it
        at each step, which takes half of the time of a beam search on CPU.
        """
        return without_padding(self.model) if self.model.device.type == "cpu" else self.model


def without_padding(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that shares its weights, and pads no heads."""
    own: Any = copy.copy(module)
    own._modules = {name: part and without_padding(part) for name, part in module._modules.items()}
    if hasattr(own, "head_dim_padding"):
        own.head_dim_padding = 0
    return own
