"""DREAM: drafts trees with three blocks that cross-attend to hidden states of the target model.

The drafter may read only the image tokens that the prompt's text attends to most. The drafter's
model is in `mmdecode.models.dream`; `mmdecode.draft.growing` grows the trees.

Source: Hu et al. 2025, arXiv:2505.19201; section 3.3 selects image tokens. The released code
contains this selection, but its call is commented out. Differs from that code: tokens are
ranked by the attention of the prompt's text tokens in the last layer, which is computed without the
full attention matrix; and a token is left out together with the hidden state that belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mmdecode.draft.features import FeatureDraft, FeatureSession
from mmdecode.draft.shipped import shipped
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
        drafter: The trained DREAM model.
        share: Share of each prompt's image tokens that the drafter reads: the ones that the
            prompt's text attends to most in the last layer. 1 reads all; the paper uses 0.75.
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
        """Builds the drafter from the options of a string; see `FeatureDraft.from_options`."""
        path = path or shipped(cls.modules, model_id)
        options = {
            "images": images,
            "sampled": sampled,
            "min_expected_gain": min_expected_gain,
            "share": share,
        }
        return cls.shaped(path, length, depth, top_k, nodes, **options)

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns the needs of `FeatureDraft`, and the text's attention if ``share`` is below 1."""
        thinned = self.share < 1 and "image" in adapter.inputs
        return super().needs(adapter).union(Requirements(text_attention=thinned))

    def begin(self, call: Call, prefill: BranchOutput) -> DreamSession:
        """Opens a session, in which the drafter reads the prompt."""
        return DreamSession(self, call, prefill)


class DreamSession(FeatureSession):
    """Session of a `Dream` drafter; leaves out image tokens that the text attends to least."""

    draft: Dream

    def visible_rows(self, rows: Rows, prefill: BranchOutput) -> Rows:
        """Returns the drafter's inputs for the prompt, without the image tokens to leave out."""
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
    """Returns the text's mean attention in the last layer, ``(B, width)``, aligned at the right."""
    _, weights = max(output.text_attention.items())
    weights = weights.mean(1)[:, -width:]
    return torch.nn.functional.pad(weights, (width - weights.shape[1], 0))
