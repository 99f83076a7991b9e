"""Drafting by the target model itself from less input, for example without the image.

The amateur, the same model with reduced input, is the negative branch of contrastive decoding; in
speculative contrastive decoding it drafts too. With an exact acceptance rule the output follows the
guided distribution, whatever is drafted. A pass of the amateur costs as much as a pass of the
model, except for the attention to the missing input, so this drafter only pays if the image is most
of the prompt.

Source: Yuan et al. 2024, arXiv:2311.08981. Differs from the paper, where drafting and contrast
share the amateur's scores: here the drafter runs the amateur with a cache of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from mmdecode.draft.assistant import Assistant, AssistantSession
from mmdecode.draft.target import warp_alone
from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.branches import ModelRunner
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput


class Amateur(Assistant):
    """Drafts ``length`` tokens with the target model itself.

    Args:
        length: Number of tokens drafted per round; 0 drafts nothing.
        transform: Name of the change to the model's inputs for drafting, see
            `mmdecode.adapters.vision.transforms`; ``None``: no change.
        prompt: Prompt for drafting: ``"same"`` as the target's, its ``"last_token"``, or ids; see
            `mmdecode.engine.adapter.BranchSpec`.
        transform_options: Arguments of the transform.

    Raises:
        IncompatibleError: When decoding begins, if the model has no such transform.
    """

    summary = "the model itself drafts, without the image"
    source = "speculative contrastive decoding, Yuan et al. 2024"

    def __init__(
        self,
        length: int = 3,
        transform: str | None = "no_image",
        prompt: Literal["same", "last_token"] | Tensor = "same",
        transform_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(None, length)
        self.spec = BranchSpec(
            name="amateur",
            transform=transform,
            prompt=prompt,
            transform_options=transform_options or {},
        )

    @classmethod
    def from_options(  # type: ignore[override]
        cls, length: int = 3, transform: str = "no_image", prompt: str | None = None
    ) -> Amateur:
        """Builds the drafter from options; ``prompt=last_token`` is for models without images."""
        return cls(length, transform) if prompt is None else cls(length, None, prompt)  # type: ignore[arg-type]

    def begin(self, call: Call, prefill: BranchOutput) -> AssistantSession:
        """Opens a session, in which the model reads the reduced prompt."""
        branch = ModelRunner(call.plan.adapter, [self.spec])
        branch.prefill(call, {})
        return AssistantSession(call, branch, warp_alone(call), self.length)
