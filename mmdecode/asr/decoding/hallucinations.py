"""Segments that a model made up in silence: found by their words, and skipped.

A segment is doubtful where its words are unlikely, or too short or too long to have been said. A
doubtful segment between silences, or next to other doubtful ones, is dropped with all that follows
in its window, and the next window begins there, so that what follows is heard with less silence
before it. A window whose first words are doubtful and come after a silence is decoded again from
where they begin. Windows without a doubtful segment are never changed.

Source: ``hallucination_silence_threshold`` of openai/whisper (``transcribe.py``), with its
constants. One part of it is left out: there, windows without any doubt also end where the last word
did, or lose a tail shorter than the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mmdecode.asr.alignment.words import is_marks
from mmdecode.asr.results import Word

WORDS = 8
"""Words of a segment that are looked at."""
UNLIKELY = 0.15
SHORTEST_S, LONGEST_S = 0.133, 2.0
EDGE_S = 2.0
"""Nearer to an end of the window, a segment has silence on that side."""
FORWARD_S = 1.0
"""A window that is cut off is at least so long."""


@dataclass(frozen=True)
class Place:
    """Where a window stands; seconds of what the model hears.

    Attributes:
        start: Its beginning.
        end: Its end; of a last window, where it would end.
        heard_end: End of what was heard in it.
        recording_end: End of the recording.
        said: End of the last word before it.
    """

    start: float
    end: float
    heard_end: float
    recording_end: float
    said: float


@dataclass(frozen=True)
class Verdict:
    """Decision about a window.

    Attributes:
        keep: Segments that stay.
        next_start: Where the next window begins; infinite: there is none.
    """

    keep: int
    next_start: float


def is_doubtful(words: Sequence[Word]) -> bool:
    """Whether words sound made up: 3 points, or about one for each.

    A word has one point where its probability is below 0.15, 15 for each second that it is shorter
    than 0.133 s, and one for each that it is longer than 2 s.
    """
    looked_at = [word for word in words if not is_marks(word.text)][:WORDS]
    points = 0.0
    for word in looked_at:
        length = word.end_s - word.start_s
        points += word.confidence < UNLIKELY
        points += 15 * max(SHORTEST_S - length, 0) + max(length - LONGEST_S, 0)
    return bool(words) and (points >= 3 or points + 0.01 >= len(looked_at))


def judge(segments: Sequence[Sequence[Word]], place: Place, threshold_s: float) -> Verdict | None:
    """Decides what stays of a window.

    Args:
        segments: Words of each segment.
        place: Position of the window.
        threshold_s: Longer pauses are silence.

    Returns:
        ``None``: all of it stays, and the next window begins where it would.
    """
    spoken = [(number, words) for number, words in enumerate(segments) if words]
    doubts = [is_doubtful(words) for _, words in spoken]
    if not any(doubts):
        return None
    first = spoken[0][1][0].start_s
    if doubts[0] and first - place.start > threshold_s:
        return Verdict(0, first)
    said = place.said
    for at, (number, words) in enumerate(spoken):
        start, end = words[0].start_s, words[-1].end_s
        last = at + 1 == len(spoken)
        following = place.heard_end if last else spoken[at + 1][1][0].start_s
        before = start - said > threshold_s or start < threshold_s or start - place.start < EDGE_S
        behind = (
            following - end > threshold_s
            or (not last and doubts[at + 1])
            or place.end - end < EDGE_S
        )
        if doubts[at] and before and behind:
            if place.recording_end - end < threshold_s:
                return Verdict(number, math.inf)
            return Verdict(number, max(place.start + FORWARD_S, start))
        said = end
    return None
