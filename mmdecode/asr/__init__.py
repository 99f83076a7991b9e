"""Speech: audio files in, transcripts out.

START HERE: `Transcriber`; the window loop behind it is `mmdecode.asr.long_form`.
"""

from mmdecode.asr.n_best import Hypothesis
from mmdecode.asr.options import FALLBACK, TranscribeOptions
from mmdecode.asr.transcriber import Failure, Segment, Transcriber, Transcript

__all__ = [
    "FALLBACK",
    "Failure",
    "Hypothesis",
    "Segment",
    "TranscribeOptions",
    "Transcriber",
    "Transcript",
]
