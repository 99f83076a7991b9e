"""Merges the texts of overlapping windows that begin at fixed times (``chunked`` mode).

The texts are joined at the longest run of tokens that both have in the overlap at about the same
time: in the middle of the run, since a window is least reliable at its edges. Without a common run
of two tokens the times decide: text of the later window at a time for which the earlier window has
a complete segment is dropped, since it began in the middle of a sentence. A sentence longer than
the overlap may lie whole in no window. With a model without timestamps both texts are cut at the
word that is about in the middle of the overlap.

Cost: `zoo:whisper-synth`, whose windows are of 8 s, reads the zoo's recording of three
minutes with a word error rate of 17.7 % in chunks and of 14.0 % in sequence, its clips joined by
sevens with 17.5 % and 16.4 %. Less overlap costs more: 2 s instead of 4 have 29.6 % and 30.8 %; 6
have 5.4 % and 7.4 %, and decode three times as many windows as the sequence. On one CPU core, eight
windows at once and without a draft, the recording took 2.8 s of processor time in chunks, 5.0 s in
sequence, and 5.3 s in chunks with 6 s of overlap.

Source: the chunked mode of transformers' speech pipeline, which aligns the two texts at the offset
where most of their tokens agree, and keeps both where few do; the longest common run also works
where one of the texts has an additional word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mmdecode.asr.results import Piece

APART = 0.25
"""Equal tokens match if their times differ by at most this share of the overlap; times of tokens
are approximate, interpolated within their segment."""
APART_WINDOWS = 1.0
"""The same where segments are whole windows, in which pauses shift words by seconds. The real clips
of the zoo by `moonshine:tiny-en`, with silence of 2.5 s between them and in windows of 10 s that
overlap by 3 s: word errors of 16.8 % at 0.25, 7.5 at 0.5, 4.6 at 1 and 8.7 at 1.5."""


@dataclass(frozen=True)
class TimedToken:
    """A text token with its approximate time.

    Attributes:
        token: Its id.
        piece: Index of its segment.
        position: Its index in the segment's tokens.
        seconds: Its approximate time in the recording, interpolated within the segment.
    """

    token: int
    piece: int
    position: int
    seconds: float


def join(
    left: Sequence[Piece],
    right: Sequence[Piece],
    begin: float,
    is_text: Callable[[int], bool],
) -> list[Piece]:
    """Merges the segments of two overlapping windows; the two at the seam become one.

    Args:
        left: Segments of the earlier window, or of all windows up to it.
        right: Segments of the later window.
        begin: Start of the later window, in seconds.
        is_text: Whether an id is a text token.
    """
    end, before, after = _overlap(left, right, begin, is_text)
    first, second, size = longest_run(before, after, APART * (end - begin))
    if size < 2:
        new = [piece for piece in right if piece.start + piece.end > 2 * end]
        return [*left, *(replace(piece, start=max(piece.start, end)) for piece in new)]
    here, there = before[first + size // 2], after[second + size // 2]
    from_left, from_right = left[here.piece], right[there.piece]
    seam = replace(
        from_left,
        end=max(from_left.start, from_right.end),
        tokens=from_left.tokens[: here.position] + from_right.tokens[there.position :],
    )
    return [*left[: here.piece], seam, *right[there.piece + 1 :]]


def join_windows(
    left: Sequence[Piece],
    right: Sequence[Piece],
    begin: float,
    is_text: Callable[[int], bool],
    starts_word: Callable[[int], bool],
) -> list[Piece]:
    """Merges windows of models without timestamps: each stays a segment, and they meet at a word.

    They meet at the word nearest to the middle of the common run, else of the overlap.

    Args:
        left: Segments of the earlier window, or of all windows up to it.
        right: Segments of the later window.
        begin: Start of the later window, in seconds.
        is_text: Whether an id is a text token.
        starts_word: Whether an id begins a word.
    """
    end, before, after = _overlap(left, right, begin, is_text)
    if not (before and after):
        return [*left, *right]
    first, second, size = longest_run(before, after, APART_WINDOWS * (end - begin))
    if size < 2:
        at = (begin + end) / 2
        return [*_until(left, at, is_text, starts_word), *_from(right, at, is_text, starts_word)]
    words = [at for at in range(size) if starts_word(before[first + at].token)]
    middle = min(words, key=lambda at: abs(at - size // 2), default=size // 2)
    here, there = before[first + middle], after[second + middle]
    from_left, from_right = left[here.piece], right[there.piece]
    met_s = min(max(here.seconds, begin), end)
    word = _next_word(from_right.tokens, there.position, starts_word)
    rest = from_right.tokens[there.position : word]
    earlier = replace(from_left, end=met_s, tokens=from_left.tokens[: here.position] + rest)
    later = replace(from_right, start=met_s, tokens=from_right.tokens[word:])
    met = [piece for piece in (earlier, later) if any(map(is_text, piece.tokens))]
    return [*left[: here.piece], *met, *right[there.piece + 1 :]]


def _overlap(
    left: Sequence[Piece], right: Sequence[Piece], begin: float, is_text: Callable[[int], bool]
) -> tuple[float, list[TimedToken], list[TimedToken]]:
    """End of the earlier text in seconds, and the tokens of each window in the overlap."""
    end = max((piece.end for piece in left if piece.tokens), default=begin)
    before = _timed_tokens(left, [piece.end > begin for piece in left], is_text)
    after = _timed_tokens(right, [piece.start < end for piece in right], is_text)
    return end, before, after


def _timed_tokens(
    pieces: Sequence[Piece], wanted: Sequence[bool], is_text: Callable[[int], bool]
) -> list[TimedToken]:
    """Text tokens of the segments whose ``wanted`` is true, with approximate times."""
    found = []
    for index, piece in enumerate(pieces):
        positions = [position for position, token in enumerate(piece.tokens) if is_text(token)]
        if wanted[index] and positions:
            step = (piece.end - piece.start) / len(positions)
            found += [
                TimedToken(
                    piece.tokens[position], index, position, piece.start + (rank + 0.5) * step
                )
                for rank, position in enumerate(positions)
            ]
    return found


def _until(
    pieces: Sequence[Piece],
    at: float,
    is_text: Callable[[int], bool],
    starts_word: Callable[[int], bool],
) -> list[Piece]:
    """Segments up to the word at about ``at`` seconds."""
    found = []
    for index, piece in enumerate(pieces):
        if piece.end > at:
            word = _word_at(pieces, index, at, is_text, starts_word)
            piece = replace(piece, end=at, tokens=piece.tokens[:word])
        if piece.start < at and any(map(is_text, piece.tokens)):
            found.append(piece)
    return found


def _from(
    pieces: Sequence[Piece],
    at: float,
    is_text: Callable[[int], bool],
    starts_word: Callable[[int], bool],
) -> list[Piece]:
    """Segments from the word at about ``at`` seconds on."""
    found = []
    for index, piece in enumerate(pieces):
        if piece.start < at:
            word = _word_at(pieces, index, at, is_text, starts_word)
            piece = replace(piece, start=at, tokens=piece.tokens[word:])
        if piece.start < piece.end and any(map(is_text, piece.tokens)):
            found.append(piece)
    return found


def _word_at(
    pieces: Sequence[Piece],
    index: int,
    at: float,
    is_text: Callable[[int], bool],
    starts_word: Callable[[int], bool],
) -> int:
    """Position, in a segment's tokens, of the first word that begins at or after a time."""
    timed = _timed_tokens(pieces, [number == index for number in range(len(pieces))], is_text)
    tokens = pieces[index].tokens
    position = next((one.position for one in timed if one.seconds >= at), len(tokens))
    return _next_word(tokens, position, starts_word)


def _next_word(tokens: Sequence[int], position: int, starts_word: Callable[[int], bool]) -> int:
    """Position of the next token that begins a word, or the end.

    Where no token begins a word, as in texts without spaces, it is ``position`` itself.
    """
    words = [at for at, token in enumerate(tokens) if starts_word(token)]
    return next((at for at in words if at >= position), len(tokens)) if words else position


def longest_run(
    first: Sequence[TimedToken], second: Sequence[TimedToken], apart_s: float
) -> tuple[int, int, int]:
    """Longest common run of tokens: its start in each text, and its length; the first of equals.

    Args:
        first: Tokens of a text.
        second: Tokens of another text.
        apart_s: Most seconds between the times of equal tokens that match.
    """
    best = (0, 0, 0)
    above = [0] * (len(second) + 1)  # lengths of the runs that end at the token before
    for row, one in enumerate(first, 1):
        lengths = [0] * (len(second) + 1)
        for column, other in enumerate(second, 1):
            if one.token == other.token and abs(one.seconds - other.seconds) <= apart_s:
                length = lengths[column] = above[column - 1] + 1
                if length > best[2]:
                    best = (row - length, column - length, length)
        above = lengths
    return best
