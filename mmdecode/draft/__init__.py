"""Drafters, one a file: who proposes the tokens. A drafter changes speed, never the law."""

from mmdecode.draft.assistant import Assistant
from mmdecode.draft.lookup import PromptLookup
from mmdecode.draft.medusa import Medusa, MedusaHeads

__all__ = ["Assistant", "Medusa", "MedusaHeads", "PromptLookup"]
