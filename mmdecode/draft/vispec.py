"""ViSpec: EAGLE's layer over summaries of images, with a global image vector after them.

The model is in `mmdecode.models.vispec`, how a tree is grown in `mmdecode.draft.features`. Adjacent
images are separated by the sizes that the adapter reports.

Source: Kang et al. 2025, arXiv:2509.15235.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from mmdecode.draft.features import FeatureDraft
from mmdecode.models.feature_drafter import FeatureDrafter
from mmdecode.models.vispec import ViSpecModel


class ViSpec(FeatureDraft):
    """Drafts with a ViSpec model; see `FeatureDraft` for the options."""

    summary = "a layer like EAGLE's that reads a few learned summaries of each image"
    source = "ViSpec, Kang et al. 2025"
    modules: ClassVar[Mapping[str, type[FeatureDrafter]]] = {ViSpecModel.kind: ViSpecModel}
