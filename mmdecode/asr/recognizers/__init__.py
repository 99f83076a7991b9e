"""Recognisers: what differs between families of speech models, behind one interface.

START HERE: `mmdecode.asr.recognizers.base` has the interface, and `of_type`, which returns the
class for a model type.
"""

from mmdecode.asr.recognizers.base import Recognizer, of_type, recognises, refuse_beyond
from mmdecode.asr.recognizers.contract import Capabilities, Encoded, Span, Split

__all__ = [
    "Capabilities",
    "Encoded",
    "Recognizer",
    "Span",
    "Split",
    "of_type",
    "recognises",
    "refuse_beyond",
]
