"""EAGLE: a small layer over the target's own states drafts chains or trees.

EAGLE-1 and EAGLE-2 have the same weights and differ in the tree; EAGLE-3 reads three levels of
states and has a head over a part of the vocabulary. How a tree is grown and how the drafter's cache
is kept is in `mmdecode.draft.features`, the models are in `mmdecode.models.eagle`.

Sources: Li et al. 2024, arXiv:2401.15077; 2024, arXiv:2406.16858; 2025, arXiv:2503.01840. The image
of a vision-language model is read as the target's merged embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from mmdecode.draft.features import FeatureDraft
from mmdecode.models.eagle import KINDS
from mmdecode.models.feature_drafter import FeatureDrafter


class Eagle(FeatureDraft):
    """Drafts with an EAGLE-1, EAGLE-2 or EAGLE-3 model; the options are those of `FeatureDraft`."""

    summary = "a small layer over the model's own states drafts a tree"
    source = "EAGLE, Li et al. 2024; EAGLE-3, Li et al. 2025"
    modules: ClassVar[Mapping[str, type[FeatureDrafter]]] = KINDS
