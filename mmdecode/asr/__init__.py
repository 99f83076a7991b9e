"""Speech: audio files in, transcripts out.

START HERE: `Transcriber`; the window loop after it is `mmdecode.asr.decoding.long_form`. `Stream`
hears a recording that is still going on.
"""

from mmdecode.asr.correction.corrector import Correction, Corrector
from mmdecode.asr.correction.guard import EditGuard
from mmdecode.asr.options import FALLBACK, TranscribeOptions
from mmdecode.asr.results import Failure, Hypothesis, Segment, Transcript
from mmdecode.asr.streaming import Stream, Update
from mmdecode.asr.transcriber import Transcriber

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
