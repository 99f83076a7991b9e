"""Windows at fixed places that overlap, joined to one text.

Two windows heard what lies in both. The longest run of tokens that their texts share there is where
they are joined: in the middle of it, since a window knows least about its edges. Without a shared
run of two tokens the times decide: what the later window says of a time for which the earlier one
has a complete segment was heard from the middle of a sentence on, and is dropped. A sentence longer
than the overlap may lie whole in no window; choose the overlap accordingly.

Source: the chunked mode of transformers' speech pipeline, which aligns the two texts at the offset
where most of their tokens agree, and keeps both where few do; the longest run also finds its place
where one of them has a word more.
"""

from __future__ import annotations

from dataclasses import replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmdecode.asr.long_form import Piece

Place = tuple[int, int]
"""A piece, and a token in it."""


def join(left: Sequence[Piece], right: Sequence[Piece], begin: float, stamps: int) -> list[Piece]:
    """One list of pieces from those of two neighbouring windows.

    Args:
        left: Of the earlier window, or of all windows up to it.
        right: Of the later window.
        begin: Where the later window begins, in seconds.
        stamps: The first timestamp's id; a text is what is below it.
    """
    end = max((piece.end for piece in left if piece.tokens), default=begin)
    before = _words(left, [piece.end > begin for piece in left], stamps)
    behind = _words(right, [piece.start < end for piece in right], stamps)
    first, second = (
        [pieces[at].tokens[token] for at, token in places]
        for pieces, places in ((left, before), (right, behind))
    )
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    run = matcher.find_longest_match()
    if run.size < 2:
        return [*left, *(piece for piece in right if piece.start + piece.end > 2 * end)]
    middle = run.size // 2
    piece, token = before[run.a + middle]
    other, from_token = behind[run.b + middle]
    seam = replace(
        left[piece],
        end=max(left[piece].start, right[other].end),
        tokens=left[piece].tokens[:token] + right[other].tokens[from_token:],
    )
    return [*left[:piece], seam, *right[other + 1 :]]


def _words(pieces: Sequence[Piece], wanted: list[bool], stamps: int) -> list[Place]:
    return [
        (index, place)
        for index, piece in enumerate(pieces)
        if wanted[index]
        for place, token in enumerate(piece.tokens)
        if token < stamps
    ]
