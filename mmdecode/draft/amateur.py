"""The model itself drafts from less input: without the image, or from the end of the prompt alone.

The amateur branch of contrastive decoding also drafts, as in speculative contrastive decoding. This
is exact with respect to the guided distribution, because the rule tests drafts by that distribution
alone. A pass of the amateur costs as much as a pass of the model, less the attention to the missing
input, so it pays where drafts are cheap to score and the image is most of the prompt.

Source: Yuan et al. 2024, arXiv:2311.08981 (which lets the amateur share the contrast's scores; here
it keeps a cache of its own, one token short).
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
        length: Tokens per round; 0 is neutral.
        transform: Change to the inputs of the drafting branch, see
            `mmdecode.adapters.vision.transforms`; ``None``: no change.
        prompt: Prompt of the branch, as in `mmdecode.engine.adapter.BranchSpec`.
        transform_options: Arguments of the transform.

    Raises:
        IncompatibleError: When decoding begins, of a model that has no such transform.
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
        """Builds it from a string; ``prompt=last_token`` is for models without images."""
        return cls(length, transform) if prompt is None else cls(length, None, prompt)  # type: ignore[arg-type]

    def begin(self, call: Call, prefill: BranchOutput) -> AssistantSession:
        """Reads the branch's prompt."""
        branch = ModelRunner(call.plan.adapter, [self.spec])
        branch.prefill(call, {})
        return AssistantSession(call, branch, warp_alone(call), self.length)
