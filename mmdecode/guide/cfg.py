"""Classifier-free guidance for text: contrasts the model with itself without the prompt.

The guided logits are ``log p_u + s (log p_c - log p_u)``, with p_c given the prompt and p_u without
it. They are computed from log-probabilities, as in transformers, and not from raw logits, because
logits processors such as the repetition penalty have different effects on the two. Unlike the
processor of transformers, this guide keeps no state, so it is correct with drafts: both branches
score every drafted token after the same tokens.

Source: Sanchez et al. 2023, arXiv:2306.17806, equation 7; Ho and Salimans 2022, arXiv:2207.12598.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide
from mmdecode.engine.proposal import Proposal

_BRANCH = "unconditional"


class CFG(Guide):
    """Classifier-free guidance of scale ``scale``, on log-probabilities.

    Args:
        scale: Guidance scale s. With 1 the guide has no effect.
        negative_ids: Prompt of the unconditional branch, ``(1 or B, P')``; ``None``: only the last
            token of the prompt.
        negative_mask: Mask of ``negative_ids``, True where they are not padding.
    """

    summary = "classifier-free guidance: away from the unconditional branch"
    source = "Ho and Salimans 2022; for text, Sanchez et al. 2023"

    def __init__(
        self,
        scale: float = 1.5,
        negative_ids: Tensor | None = None,
        negative_mask: Tensor | None = None,
    ) -> None:
        self.scale = float(scale)
        self.neutral = self.scale == 1.0
        branch = BranchSpec(name=_BRANCH, prompt="last_token")
        if negative_ids is not None:
            branch = BranchSpec(name=_BRANCH, prompt=negative_ids, prompt_mask=negative_mask)
        self.branches = (branch,)

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Returns ``None``: this guide computes nothing in advance."""

    def apply(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the guided logits; see `mmdecode.engine.contracts.Guide.apply`."""
        conditional = outputs["main"].logits.log_softmax(-1)
        unconditional = outputs[_BRANCH].logits.log_softmax(-1)
        return self.scale * (conditional - unconditional) + unconditional
