"""Splits a window's tokens into segments at timestamps, and cuts repetition loops."""

from __future__ import annotations

from collections.abc import Callable

from mmdecode.asr.decoding.repetition import first_round_end

TokenSegment = tuple[int, int, list[int]]
"""Start and end of a segment, in timestamp steps from the window's start, and its tokens."""


def split_segments(
    tokens: list[int], begin: int, whole: int
) -> tuple[list[TokenSegment], int | None]:
    """Splits a window's tokens into segments, wherever two timestamp tokens follow each other.

    Args:
        tokens: Generated ids, without the end token.
        begin: Id of the first timestamp token.
        whole: Length of the window, in timestamp steps.

    Returns:
        The segments, and the start of the next window in timestamp steps from the start of this
        window; ``None``: the next window starts at the end of this one.
    """
    stamped = [token >= begin for token in tokens]
    boundaries = [i + 1 for i in range(len(tokens) - 1) if stamped[i] and stamped[i + 1]]
    if not boundaries:
        times = [token - begin for token in tokens if token >= begin]
        return [(0, times[-1] if times and times[-1] else whole, tokens)], None
    closed = stamped[-2:] == [False, True]  # a single timestamp: no speech after it
    if closed:
        boundaries.append(len(tokens))
    else:
        boundaries[-1] += 1  # the last segment shows both timestamps
    segments, last = [], 0
    for number, cut in enumerate(boundaries):
        part = tokens[last:cut]
        ends = -2 if number == len(boundaries) - 1 and not closed else -1
        segments.append((part[0] - begin, part[ends] - begin, part))
        last = cut
    return segments, None if closed else tokens[last - 2] - begin


def unfinished(tokens: list[int], segments: list[TokenSegment]) -> list[int]:
    """Returns the tokens of the unfinished segment at a window's end, with its start timestamp.

    Args:
        tokens: Tokens of the window.
        segments: Complete segments of the window; the last one also ends with that timestamp.
    """
    rest = tokens[sum(len(part) for _, _, part in segments) - 1 :]
    return rest if len(rest) > 1 else []


def without_repetition(
    segments: list[TokenSegment], is_text: Callable[[int], bool]
) -> list[TokenSegment]:
    """Removes all repetitions of a loop at the window's end but the first.

    The predicted timestamps of the remaining segments are kept.

    Args:
        segments: Segments of a window that ends in a repetition loop.
        is_text: Function that tells whether a token id is text rather than a timestamp.
    """
    left = first_round_end([t for _, _, tokens in segments for t in tokens if is_text(t)])
    if left is None:  # part of it was in a tail that the next window decodes
        return segments
    kept: list[TokenSegment] = []
    for first, last, tokens in segments:
        if not left:
            break
        first_round = []
        for token in tokens:
            spoken = is_text(token)
            if left or not spoken:
                first_round.append(token)
                left -= spoken
        kept.append((first, last, first_round))
    return kept
