"""Streaming transcription: words while audio arrives; committed words are never taken back.

`Stream` keeps the last seconds of the audio in a buffer. Every ``step_s`` seconds it transcribes
the buffer again, with an ordinary `Transcriber` (any model, draft, guide or option). The result is
a hypothesis. A commit policy decides which of its first words are stable (`policies`). Stable words
are committed: they are returned once, and do not change any more. The other words are provisional:
they are returned too, and may change with the next step. `StreamPool` runs many streams on one
model, and decodes a step of each of them in one batch.

The audio of a segment is dropped from the buffer once all its words are committed. The buffer
always fits into one window of the model: if nothing is stable when it is full, words are committed
up to the first segment or word boundary that makes room. So neither memory nor the time of a step
grows with the recording, and a pause or noise cannot hold up the text.

Each step drafts from the tokens of the last hypothesis, which repeats most of them: the source text
of `mmdecode.draft.source.Source`, before the transcriber's own drafter. The text does not change.

Models without timestamps decode the buffer in windows that are cut at pauses and are at most half
as long as the buffer. Each window is a segment, and gives the same text at every step.

Differs from Macháček et al. 2023 (arXiv:2307.14743): the end of the committed words in a new
hypothesis is found by aligning the texts, so that word times are not needed; words are compared
without case and punctuation; the text before the buffered audio is not part of the prompt.
"""

from mmdecode.asr.streaming.policies import POLICIES, CommitPolicy, policy_of
from mmdecode.asr.streaming.pool import PooledStream, StreamPool
from mmdecode.asr.streaming.stream import Stream, Update

__all__ = [
    "POLICIES",
    "CommitPolicy",
    "PooledStream",
    "Stream",
    "StreamPool",
    "Update",
    "policy_of",
]
