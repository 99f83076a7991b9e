"""Recognisers: what differs between families of speech models, behind one interface.

START HERE: `mmdecode.asr.recognizers.base`, the interface; `of_type` finds the class for a model.
"""

from mmdecode.asr.recognizers.base import Recognizer, of_type, refuse_beyond
from mmdecode.asr.recognizers.contract import Capabilities, Encoded, Span, Split

__all__ = ["Capabilities", "Encoded", "Recognizer", "Span", "Split", "of_type", "refuse_beyond"]
