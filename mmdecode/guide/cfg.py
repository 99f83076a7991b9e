"""Classifier-free guidance for text: contrast with the model without its prompt.

``log p_u + s (log p_c - log p_u)``, on log-softmax scores as transformers does it, because
processors such as the repetition penalty tell the two spaces apart. Unlike the processor of
transformers it keeps no state, so it is right under drafting: every node is scored in both branches
with its own prefix.

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
        scale: s above; With 1 the guide has no effect.
        negative_ids: Prompt of the unconditional branch, ``(1 or B, P')``; ``None``: the last token
            of the prompt alone.
        negative_mask: True where it is not padding.
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
