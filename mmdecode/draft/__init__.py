"""Drafters, which propose tokens for the target model to verify; each has a module of its own."""

from mmdecode.draft.adaptive import Adaptive
from mmdecode.draft.amateur import Amateur
from mmdecode.draft.assistant import Assistant
from mmdecode.draft.ctc import CTC
from mmdecode.draft.dream import Dream
from mmdecode.draft.eagle import Eagle
from mmdecode.draft.first_of import FirstOf
from mmdecode.draft.flash import Flash
from mmdecode.draft.hydra import Hydra
from mmdecode.draft.jacobi import Jacobi
from mmdecode.draft.kangaroo import Kangaroo
from mmdecode.draft.layer_search import Clasp, Swift
from mmdecode.draft.layer_skip import LayerSkip
from mmdecode.draft.lookahead import Lookahead
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa
from mmdecode.draft.medusa_heads import MedusaHeads
from mmdecode.draft.quantized import Quantized
from mmdecode.draft.recycling import Recycling
from mmdecode.draft.source import Source
from mmdecode.draft.sparse import Sparse
from mmdecode.draft.vispec import ViSpec

__all__ = [
    "CTC",
    "Adaptive",
    "Amateur",
    "Assistant",
    "Clasp",
    "Dream",
    "Eagle",
    "FirstOf",
    "Flash",
    "Hydra",
    "Jacobi",
    "Kangaroo",
    "LayerSkip",
    "Lookahead",
    "Medusa",
    "MedusaHeads",
    "PromptLookup",
    "Quantized",
    "Recycling",
    "Source",
    "Sparse",
    "Swift",
    "ViSpec",
]
