"""DREAM: three blocks that cross-attend to the model's states draft trees, with part of the image.

The model is in `mmdecode.models.dream`, how a tree is grown in `mmdecode.draft.growing`.

Source: Hu et al. 2025, arXiv:2505.19201, section 3.3 for the image. Differs from the reference,
whose call is commented out: the attention that counts is that of the prompt's words in the last
layer, which the engine computes without the matrix of all tokens, and leaving out a token also
leaves out the state next to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mmdecode.draft.features import FeatureDraft, FeatureSession, shipped
from mmdecode.draft.target import outputs_by_name
from mmdecode.engine.adapter import Adapter
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Requirements
from mmdecode.errors import OptionError
from mmdecode.models.dream import DreamModel, most_received
from mmdecode.models.feature_drafter import FeatureDrafter, Rows


class Dream(FeatureDraft):
    """Drafts with a DREAM model.

    Args:
        drafter: The model.
        share: Share of each prompt's image tokens that the drafter reads: those that the text
            attends to most in the last layer. 1, the neutral setting, reads all; the paper uses
            0.75.
        **options: Options of `FeatureDraft`.

    Raises:
        OptionError: An option is out of range.
    """

    summary = "three blocks that cross-attend to the model's own states draft a tree"
    source = "DREAM, Hu et al. 2025"
    modules: ClassVar[Mapping[str, type[FeatureDrafter]]] = {DreamModel.kind: DreamModel}

    def __init__(self, drafter: FeatureDrafter, *, share: float = 1.0, **options: Any) -> None:
        if not 0 < share <= 1:
            raise OptionError(f"share={share}; expected above 0 and at most 1")
        super().__init__(drafter, **options)
        self.share = share

    @classmethod
    def from_options(
        cls,
        path: str | None = None,
        model_id: str | None = None,
        length: int | None = None,
        depth: int = 5,
        top_k: int = 8,
        nodes: int = 31,
        images: str = "all",
        sampled: bool | None = None,
        min_expected_gain: float | None = None,
        share: float = 1.0,
    ) -> Self:
        """Builds it from a string; see `FeatureDraft.from_options`."""
        path = path or shipped(cls.modules, model_id)
        options = {
            "images": images,
            "sampled": sampled,
            "min_expected_gain": min_expected_gain,
            "share": share,
        }
        return cls.shaped(path, length, depth, top_k, nodes, **options)

    def needs(self, adapter: Adapter) -> Requirements:
        """The same as `FeatureDraft`; with fewer image tokens, the text's attention too."""
        thinned = self.share < 1 and "image" in adapter.inputs
        return super().needs(adapter).union(Requirements(text_attention=thinned))

    def begin(self, call: Call, prefill: BranchOutput) -> DreamSession:
        """Reads the prompt."""
        return DreamSession(self, call, prefill)


class DreamSession(FeatureSession):
    """A session of a `Dream`: image tokens that the text attends to least are left out."""

    draft: Dream

    def visible_rows(self, rows: Rows, prefill: BranchOutput) -> Rows:
        """The prompt's rows, without image tokens that are left out."""
        rows = super().visible_rows(rows, prefill)
        if self.draft.share == 1 or not prefill.text_attention:
            return rows
        assert rows.kept is not None and rows.images is not None
        outputs = outputs_by_name(prefill)
        width = rows.kept.shape[1]
        weights = torch.cat([_last_layer(outputs[spec.name], width) for spec in self.target.specs])
        images = rows.images > 0
        stays = most_received(weights, images & rows.kept, self.draft.share)
        return replace(rows, kept=rows.kept & (stays | ~images))


def _last_layer(output: BranchOutput, width: int) -> Tensor:
    """The text's attention in the last layer, ``(B, width)``; prompts end in the last column."""
    _, weights = max(output.text_attention.items())
    weights = weights.mean(1)[:, -width:]
    return torch.nn.functional.pad(weights, (width - weights.shape[1], 0))
