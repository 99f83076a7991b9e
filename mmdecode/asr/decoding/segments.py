"""`SegmentBuilder`: makes the segments of a recording, window by window."""

from __future__ import annotations

from collections.abc import Sequence

from mmdecode.asr.alignment.words import around_words, in_order, timed_words
from mmdecode.asr.decoding.job import Job
from mmdecode.asr.recognizers.base import Recognizer
from mmdecode.asr.results import Piece, Segment, Word


class SegmentBuilder:
    """Builds the segments of one recording, window by window.

    Returned segments are final. With word timestamps a segment is held back until the next segment
    is known, since the next word's start may shorten the last word.

    Args:
        recognizer: Recogniser of the recording, with the options of its transcription.
        job: The recording.
        keep: Whether the recording keeps what the segments are made of, as a `Transcript` needs it.
    """

    def __init__(self, recognizer: Recognizer, job: Job, keep: bool = True) -> None:
        self._recognizer, self._job, self._keep = recognizer, job, keep
        self._options = recognizer.options
        self._taken = 0  # pieces of the recording, where they are kept
        self._held: list[Piece] = []
        self._last_word_end_s = 0.0  # end of the last word of a returned segment

    def advance(self, last: bool = False) -> list[Segment]:
        """Takes the new windows of the recording, and returns all segments that are now final.

        Args:
            last: Whether the recording has ended.
        """
        job = self._job
        pieces = job.pieces[self._taken :]
        if job.joins and not last:  # the next window overlaps them, and changes what they say
            begin = job.seek * job.frame_s
            pieces = [piece for piece in pieces if piece.end <= begin]
        if self._keep:
            self._taken += len(pieces)
        else:
            del job.pieces[: len(pieces)]
            job.results.clear()
        return self.take(pieces, last)

    def hold(self, pieces: Sequence[Piece]) -> None:
        """Adds segments without returning any."""
        self._held += pieces

    def take(self, pieces: Sequence[Piece], last: bool = False) -> list[Segment]:
        """Adds the segments of a window and returns all segments that are now final.

        Args:
            pieces: Segments of the next window.
            last: Whether this is the last window; then all segments are final.
        """
        self.hold(pieces)
        words = self._words()
        count = len(self._held)
        if self._options.word_timestamps and not last:
            count = max((number for number, own in enumerate(words) if own), default=0)
        spans = self._spans(words)
        found = [
            self._segment(*one)
            for one in zip(self._held[:count], spans[:count], words[:count], strict=True)
        ]
        del self._held[:count]
        self._last_word_end_s = max(
            (s.words[-1].end_s for s in found if s.words), default=self._last_word_end_s
        )
        return found

    def _words(self) -> Sequence[list[Word] | None]:
        """Words of each segment that is held back; ``None``: word timestamps are off."""
        ours, job = self._recognizer, self._job
        if not self._options.word_timestamps:
            return [None] * len(self._held)
        return timed_words(
            [ours.text_tokens(piece.tokens) for piece in self._held],
            ours.tokenizer,
            ours.code_of(job.language),
            job.timeline.span,
            job.timeline.duration_s,
            self._last_word_end_s,
        )

    def _spans(self, words: Sequence[list[Word] | None]) -> list[tuple[float, float]]:
        """Start and end, in seconds, of each segment that is held back."""
        timeline = self._job.timeline
        spans = [timeline.span(piece.start, piece.end) for piece in self._held]
        if self._options.mode != "sequential":
            # of a segment that two windows made neither knows both ends
            spans = in_order(spans, timeline.duration_s)
        return around_words(spans, words, self._last_word_end_s)

    def _segment(self, piece: Piece, span: Sequence[float], words: list[Word] | None) -> Segment:
        return Segment(
            start_s=round(span[0], 6),
            end_s=round(span[1], 6),
            text=self._recognizer.text(piece.tokens),
            tokens=piece.tokens if self._job.evidence else [int(token) for token in piece.tokens],
            temperature=piece.result.temperature,
            avg_logprob=piece.result.avg_logprob,
            no_speech_prob=piece.result.no_speech_prob,
            looped=piece.result.repetitive,
            window_s=round(self._job.timeline.window_at(piece.window), 6),
            words=words,
        )
