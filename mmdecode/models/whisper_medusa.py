"""Loads the target model of checkpoints in the layout of aiola-lab/whisper-medusa.

A checkpoint of kind *block* contains an unchanged Whisper. In a checkpoint of kind *linear* head 0
replaces the base output: the target distribution is computed by Whisper with head 0 before the
output matrix. Either target is loaded here as a ``WhisperForConditionalGeneration`` that
``generate`` and every decoder can use; the other heads are a drafter, see `mmdecode.draft.medusa`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from mmdecode.checkpoints import local_path
from mmdecode.errors import InputError
from mmdecode.weights import read_weights

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import WhisperForConditionalGeneration

_ROOT = "whisper_model."


class HeadedProjection(nn.Module):
    """Output layer with head 0: its residual blocks, then the shared output matrix."""

    def __init__(self, blocks: nn.ModuleList, projection: nn.Module) -> None:
        super().__init__()
        self.blocks, self.projection = blocks, projection

    @property
    def weight(self) -> Tensor:
        """Returns the output matrix, which is tied to the embedding."""
        return self.projection.weight  # type: ignore[return-value]

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes logits of final hidden states, ``(..., H)`` to ``(..., V)``."""
        for block in self.blocks:
            hidden = hidden + nn.functional.silu(block(hidden))
        return self.projection(hidden)


def load_target(name: str | Path) -> WhisperForConditionalGeneration:
    """Loads the target of a Whisper-Medusa checkpoint, in float32 and evaluation mode.

    Raises:
        InputError: The checkpoint has another layout.
    """
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    path = local_path(name)
    config, weights = read_weights(path)
    inner = {k.removeprefix(_ROOT): v for k, v in weights.items() if k.startswith(_ROOT)}
    if not inner:
        raise InputError(
            f"{name} is no Whisper-Medusa checkpoint: no key starts with {_ROOT!r}; load a plain "
            "Whisper with WhisperForConditionalGeneration.from_pretrained"
        )
    known = WhisperConfig().to_dict()
    model = WhisperForConditionalGeneration(
        WhisperConfig(**{k: v for k, v in config.items() if k in known})
    )
    missing, unexpected = model.load_state_dict(inner, strict=False)
    if unexpected or set(missing) - {"proj_out.weight"}:
        raise InputError(f"{name}: missing keys {missing}, unexpected keys {unexpected}")
    model.tie_weights()
    if config.get("medusa_heads_type") == "base_head":
        blocks = nn.ModuleList()
        while f"medusa_heads.0.{len(blocks)}.linear.weight" in weights:
            key = f"medusa_heads.0.{len(blocks)}.linear"
            block = nn.Linear(model.config.d_model, model.config.d_model)
            block.load_state_dict({p: weights[f"{key}.{p}"] for p in ("weight", "bias")})
            blocks.append(block)
        model.proj_out = HeadedProjection(blocks, model.proj_out)
    model.generation_config = GenerationConfig.from_pretrained(path)
    return model.float().eval()
