"""Drafters, one a file: who proposes the tokens. A drafter changes speed, never the law."""

from mmdecode.draft.adaptive import Adaptive
from mmdecode.draft.amateur import Amateur
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.jacobi import Jacobi
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa, MedusaHeads
from mmdecode.draft.recycling import Recycling
from mmdecode.draft.source import Source

__all__ = [
    "Adaptive",
    "Amateur",
    "Assistant",
    "FirstOf",
    "Jacobi",
    "LayerSkip",
    "Medusa",
    "MedusaHeads",
    "PromptLookup",
    "Recycling",
    "Source",
]
