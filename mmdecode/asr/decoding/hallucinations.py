"""Segments hallucinated in silence: detected by probabilities and lengths of words, and skipped.

A segment is anomalous where its words are unlikely, or too short or too long for speech. An
anomalous segment between silences, or next to other anomalous ones, is dropped with all that
follows in its window, and the next window begins at its start, so that there is less silence before
what follows. A window whose first segment is anomalous and comes after a silence is decoded again
from the start of its first word. Windows without an anomalous segment are never changed.

Source: ``hallucination_silence_threshold`` of openai/whisper (``transcribe.py``), with its
constants. One part of it is left out: there, windows without an anomalous segment also end at their
last word, or lose a tail shorter than the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mmdecode.asr.alignment.words import is_marks
from mmdecode.asr.results import Word

WORDS = 8
"""Number of first words of a segment that are scored."""
UNLIKELY = 0.15
SHORTEST_S, LONGEST_S = 0.133, 2.0
EDGE_S = 2.0
"""A segment nearer to an edge of the window than this counts as next to silence, in seconds."""
FORWARD_S = 1.0
"""Least length of a window that is cut off, in seconds."""


@dataclass(frozen=True)
class WindowTimes:
    """Where a window lies in the recording, in seconds of the audio that the model is given.

    Attributes:
        start: Start of the window.
        end: End of a window of full length.
        audio_end: End of the audio in it, before ``end`` where a last window is padded.
        recording_end: End of the recording.
        previous_end: End of the last word of the windows before it.
    """

    start: float
    end: float
    audio_end: float
    recording_end: float
    previous_end: float


@dataclass(frozen=True)
class Verdict:
    """Decision about a window.

    Attributes:
        keep: Segments that stay.
        next_start: Where the next window begins; infinite: there is none.
    """

    keep: int
    next_start: float


def is_anomalous(words: Sequence[Word]) -> bool:
    """Whether the words of a segment are improbable or of improbable length.

    Each of the first `WORDS` words scores one point where its probability is below 0.15, 15 for
    each second that it is shorter than 0.133 s, and one for each second that it is longer than 2 s.
    A segment is anomalous from 3 points on, or from about one per word.
    """
    looked_at = [word for word in words if not is_marks(word.text)][:WORDS]
    points = 0.0
    for word in looked_at:
        length = word.end_s - word.start_s
        points += word.confidence < UNLIKELY
        points += 15 * max(SHORTEST_S - length, 0) + max(length - LONGEST_S, 0)
    return bool(words) and (points >= 3 or points + 0.01 >= len(looked_at))


def judge(
    segments: Sequence[Sequence[Word]], window: WindowTimes, threshold_s: float
) -> Verdict | None:
    """Decides what stays of a window.

    Args:
        segments: Words of each segment.
        window: Where the window lies in the recording.
        threshold_s: Longer pauses are silence, in seconds.

    Returns:
        ``None``: all of it stays, and the next window begins where it would.
    """
    spoken = [(number, words) for number, words in enumerate(segments) if words]
    anomalous = [is_anomalous(words) for _, words in spoken]
    if not any(anomalous):
        return None
    first = spoken[0][1][0].start_s
    if anomalous[0] and first - window.start > threshold_s:
        return Verdict(0, first)
    previous_end = window.previous_end
    for at, (number, words) in enumerate(spoken):
        start, end = words[0].start_s, words[-1].end_s
        last = at + 1 == len(spoken)
        following = window.audio_end if last else spoken[at + 1][1][0].start_s
        before = (
            start - previous_end > threshold_s
            or start < threshold_s
            or start - window.start < EDGE_S
        )
        after = (
            following - end > threshold_s
            or (not last and anomalous[at + 1])
            or window.end - end < EDGE_S
        )
        if anomalous[at] and before and after:
            if window.recording_end - end < threshold_s:
                return Verdict(number, math.inf)
            return Verdict(number, max(window.start + FORWARD_S, start))
        previous_end = end
    return None
