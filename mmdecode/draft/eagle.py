"""EAGLE: drafts chains or trees with a small layer on the target model's hidden states.

EAGLE-1 and EAGLE-2 have the same weights and differ in the tree. EAGLE-3 reads hidden states of
three layers and predicts a part of the vocabulary. `mmdecode.draft.features` grows the trees and
keeps the drafter's cache; the models are in `mmdecode.models.eagle`. With a vision-language model,
the drafter reads the image as the target's input embeddings at the image tokens.

Sources: Li et al. 2024, arXiv:2401.15077; 2024, arXiv:2406.16858; 2025, arXiv:2503.01840.
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
