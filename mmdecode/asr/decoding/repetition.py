"""Repetition loops: a model that repeats the same words until its window is full.

A window ends in a loop if its text ends in at least `ROUNDS` rounds of the same tokens, the last
one possibly incomplete, of `TOKENS` tokens or more together; timestamps are ignored. So three words
four times are a loop, and a single word twelve times; repetitions in natural speech are shorter.
Whisper's compression ratio threshold finds most loops and makes the window be decoded again; this
detects those that remain.
"""

from __future__ import annotations

from collections.abc import Sequence

ROUNDS, TOKENS = 4, 12


def first_round_end(tokens: Sequence[object]) -> int | None:
    """Index after the first round of the loop at the end; ``None``: there is no loop.

    Args:
        tokens: Text tokens, without timestamps; or words.
    """
    for period in range(1, len(tokens) // ROUNDS + 1):
        begin = len(tokens) - period
        while begin > 0 and tokens[begin - 1] == tokens[begin - 1 + period]:
            begin -= 1
        length = len(tokens) - begin
        if length >= max(ROUNDS * period, TOKENS):
            return begin + period
    return None
