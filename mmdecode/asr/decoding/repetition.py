"""Detects repetition loops: a model repeats the same words until its window is full.

A window ends in a loop if the same tokens are repeated at its end at least `ROUNDS` times, and the
repetitions have `TOKENS` tokens or more together. The last repetition may be incomplete, and
timestamps are ignored. So three words that occur four times are a loop, and so is a single word
that occurs twelve times; repetitions in natural speech are shorter. Whisper's compression ratio
threshold finds most loops, and such a window is decoded again; this detects the remaining loops.
"""

from __future__ import annotations

from collections.abc import Sequence

ROUNDS, TOKENS = 4, 12


def first_round_end(tokens: Sequence[object]) -> int | None:
    """Returns the index after the first repetition of a loop at the end; ``None``: no loop.

    Args:
        tokens: Text tokens without timestamps, or words.
    """
    for period in range(1, len(tokens) // ROUNDS + 1):
        begin = len(tokens) - period
        while begin > 0 and tokens[begin - 1] == tokens[begin - 1 + period]:
            begin -= 1
        length = len(tokens) - begin
        if length >= max(ROUNDS * period, TOKENS):
            return begin + period
    return None
