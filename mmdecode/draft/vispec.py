"""ViSpec: drafts like EAGLE, but reads a few learned summary vectors instead of each image.

A further vector of the image enters the drafter's input at every later text token. The model is in
`mmdecode.models.vispec`; `mmdecode.draft.features` grows the trees. If images are adjacent in the
prompt, the adapter reports how many tokens each one has.

Source: Kang et al. 2025, arXiv:2509.15235.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from mmdecode.draft.features import FeatureDraft
from mmdecode.models.feature_drafter import FeatureDrafter
from mmdecode.models.vispec import ViSpecModel


class ViSpec(FeatureDraft):
    """Drafts with a ViSpec model; the options are those of `FeatureDraft`."""

    summary = "a layer like EAGLE's that reads a few learned summaries of each image"
    source = "ViSpec, Kang et al. 2025"
    modules: ClassVar[Mapping[str, type[FeatureDrafter]]] = {ViSpecModel.kind: ViSpecModel}
