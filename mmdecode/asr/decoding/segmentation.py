"""Cuts of a window: its segments, what is left after the last one, and what a loop leaves."""

from __future__ import annotations

from collections.abc import Callable

from mmdecode.asr.decoding.repetition import first_round_end

Cut = tuple[int, int, list[int]]
"""Start, end and tokens of a segment; in timestamp steps from the start of the window."""


def split_segments(tokens: list[int], begin: int, whole: int) -> tuple[list[Cut], int | None]:
    """Cuts a window's tokens where two timestamps meet.

    Args:
        tokens: Without the end token.
        begin: The first timestamp's id.
        whole: The window's length, in timestamp steps.

    Returns:
        The segments, and where the next window starts, in timestamp steps; ``None`` where it starts
        after this one.
    """
    stamped = [token >= begin for token in tokens]
    cuts = [i + 1 for i in range(len(tokens) - 1) if stamped[i] and stamped[i + 1]]
    if not cuts:
        times = [token - begin for token in tokens if token >= begin]
        return [(0, times[-1] if times and times[-1] else whole, tokens)], None
    closed = stamped[-2:] == [False, True]  # nothing is said after a single timestamp
    if closed:
        cuts.append(len(tokens))
    else:
        cuts[-1] += 1  # the last segment shows both timestamps
    segments, last = [], 0
    for number, cut in enumerate(cuts):
        part = tokens[last:cut]
        ends = -2 if number == len(cuts) - 1 and not closed else -1
        segments.append((part[0] - begin, part[ends] - begin, part))
        last = cut
    return segments, None if closed else tokens[last - 2] - begin


def unfinished(tokens: list[int], cuts: list[Cut]) -> list[int]:
    """Tokens of a window after its last complete segment, from the opening timestamp on.

    Args:
        tokens: Tokens of the window.
        cuts: Its segments, the last one with both timestamps.
    """
    rest = tokens[sum(len(part) for _, _, part in cuts) - 1 :]
    return rest if len(rest) > 1 else []


def without_loop(cuts: list[Cut], is_text: Callable[[int], bool]) -> list[Cut]:
    """Segments with the first round of the loop at their end, and none of the others.

    Times are kept: what the model said of them while it looped is all that is known.

    Args:
        cuts: Segments of a window that looped.
        is_text: Whether an id stands for text.
    """
    left = first_round_end([t for _, _, tokens in cuts for t in tokens if is_text(t)])
    if left is None:  # part of it was in a tail that the next window decodes
        return cuts
    kept: list[Cut] = []
    for first, last, tokens in cuts:
        if not left:
            break
        said = []
        for token in tokens:
            spoken = is_text(token)
            if left or not spoken:
                said.append(token)
                left -= spoken
        kept.append((first, last, said))
    return kept
