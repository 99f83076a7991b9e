"""Loops: a model that says the same words over and over until its window is full.

A window loops if its text ends in at least `ROUNDS` rounds of the same tokens, the last one cut off
anywhere, `TOKENS` tokens or more together; times are left out of account. Three words said four
times count, and a single word said twelve times; people who repeat themselves say less.
Whisper's compression gate finds most loops and asks for another attempt; this says what to do with
those that are left.
"""

from __future__ import annotations

from collections.abc import Sequence

ROUNDS, TOKENS = 4, 12


def first_round_end(tokens: Sequence[object]) -> int | None:
    """Where the first round of the loop at the end is over; ``None``: nothing loops.

    Args:
        tokens: Tokens of the text, without times; or words.
    """
    for period in range(1, len(tokens) // ROUNDS + 1):
        begin = len(tokens) - period
        while begin > 0 and tokens[begin - 1] == tokens[begin - 1 + period]:
            begin -= 1
        length = len(tokens) - begin
        if length >= max(ROUNDS * period, TOKENS):
            return begin + period
    return None
