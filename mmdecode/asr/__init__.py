"""Speech: audio files in, transcripts out.

START HERE: `Transcriber`; the window loop after it is `mmdecode.asr.decoding.long_form`. `Stream`
hears a recording that is still going on.
"""

from mmdecode.asr.correction.corrector import Correction, Corrector, EditGuard
from mmdecode.asr.decoding.n_best import Hypothesis
from mmdecode.asr.options import FALLBACK, TranscribeOptions
from mmdecode.asr.streaming import Stream, Update
from mmdecode.asr.transcriber import Failure, Segment, Transcriber, Transcript

__all__ = [
    "FALLBACK",
    "Correction",
    "Corrector",
    "EditGuard",
    "Failure",
    "Hypothesis",
    "Segment",
    "Stream",
    "TranscribeOptions",
    "Transcriber",
    "Transcript",
    "Update",
]
