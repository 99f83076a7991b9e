"""Recognisers: what families of speech models need to know to be transcribed with.

START HERE: `mmdecode.asr.recognizers.base`, the contract; `of_type` finds the class of a model.
"""

from mmdecode.asr.recognizers.base import Recognizer, of_type, refuse_beyond
from mmdecode.asr.recognizers.contract import Capabilities, Encoded, Span, Split

__all__ = ["Capabilities", "Encoded", "Recognizer", "Span", "Split", "of_type", "refuse_beyond"]
