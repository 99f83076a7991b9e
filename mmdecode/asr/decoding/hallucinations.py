"""Detects and skips segments that are hallucinated in silence, by their words' probabilities.

A segment is anomalous if its words are improbable, or too short or too long for speech. An
anomalous segment after a silence, and before a silence or another anomalous segment, is dropped
together with the rest of its window. The next window begins at the start of the dropped segment, so
that less silence precedes the speech. If the first segment of a window is anomalous and comes after
a silence, the window is decoded again from the start of its first word. Windows without an
anomalous segment are never changed.

Source: ``hallucination_silence_threshold`` of openai/whisper (``transcribe.py``), with its
constants. Differs from it: in openai/whisper, a window without an anomalous segment may also end at
its last word, or lose a last part shorter than the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mmdecode.asr.alignment.words import is_marks
from mmdecode.asr.results import Word

WORDS = 8
"""Number of words, from the start of a segment, that are scored."""
UNLIKELY = 0.15
SHORTEST_S, LONGEST_S = 0.133, 2.0
EDGE_S = 2.0
"""Distance in seconds to an edge of the window below which a segment counts as next to silence."""
FORWARD_S = 1.0
"""Least distance in seconds from the start of a shortened window to the start of the next."""


@dataclass(frozen=True)
class WindowTimes:
    """Position of a window in the recording, in seconds of the audio that the model is given.

    Attributes:
        start: Start of the window.
        end: End of the window with its padding.
        audio_end: End of the window's audio, before ``end`` if the window is padded.
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
    """Decision about a window with a hallucinated segment.

    Attributes:
        keep: Number of segments that are kept, from the start of the window.
        next_start: Start of the next window, in seconds; infinity: the recording ends here.
    """

    keep: int
    next_start: float


def is_anomalous(words: Sequence[Word]) -> bool:
    """Whether the words of a segment are improbable or of improbable length.

    Each of the first `WORDS` words scores one point if its probability is below 0.15, plus 15
    points for each second that it is shorter than 0.133 s, or one point for each second that it is
    longer than 2 s. A segment is anomalous if it has 3 points, or about one point per scored word.
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
    """Decides which segments of a window are kept.

    Args:
        segments: Words of each segment.
        window: Position of the window in the recording.
        threshold_s: Pauses longer than this count as silence, in seconds.

    Returns:
        The decision; ``None``: all segments are kept, and the next window begins as usual.
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
