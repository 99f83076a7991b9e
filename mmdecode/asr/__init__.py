"""Speech: audio files in, transcripts out.

START HERE: `Transcriber`; its loop over windows is `mmdecode.asr.decoding.long_form`. `Stream`
transcribes audio while it arrives, `StreamPool` many streams.

Importing this package imports neither torch nor transformers; its names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmdecode._lazy import lazy

if TYPE_CHECKING:
    from mmdecode.asr.correction.corrector import Correction, Corrector
    from mmdecode.asr.correction.guard import EditGuard
    from mmdecode.asr.options import FALLBACK, TranscribeOptions
    from mmdecode.asr.results import Failure, Hypothesis, Segment, Transcript
    from mmdecode.asr.streaming import Stream, StreamPool, Update
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
    "StreamPool",
    "TranscribeOptions",
    "Transcriber",
    "Transcript",
    "Update",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "correction.corrector": ("Correction", "Corrector"),
        "correction.guard": ("EditGuard",),
        "options": ("FALLBACK", "TranscribeOptions"),
        "results": ("Failure", "Hypothesis", "Segment", "Transcript"),
        "streaming": ("Stream", "StreamPool", "Update"),
        "transcriber": ("Transcriber",),
    },
)
