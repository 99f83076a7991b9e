"""Merges the texts of overlapping windows that begin at fixed times (``chunked`` mode).

In the overlap the two texts are searched for the longest run of equal tokens at about the same
time. They are joined in the middle of that run, since a window is least reliable at its edges. If
no run of two tokens is common, segments of the later window that lie in the overlap are dropped,
since that window may begin in the middle of a sentence. A sentence longer than the overlap may be
complete in neither window. For models without timestamps both texts are instead cut at the word
about in the middle of the overlap.

Cost in word error rate, with the shipped model `zoo:whisper-synth`, whose windows have 8 s: on a
recording of three minutes 17.7 % in chunked mode and 14.0 % in sequential mode; on the test clips,
joined by sevens, 17.5 % and 16.4 %. These are for the default overlap of 4 s. With 2 s chunked mode
has 29.6 % and 30.8 %; with 6 s it has 5.4 % and 7.4 %, and decodes three times as many windows as
sequential mode. On one CPU core, with batches of eight windows and without a draft, the recording
took 2.8 s of processor time in chunked mode, 5.0 s in sequential mode, and 5.3 s in chunked mode
with 6 s of overlap.

Source: the chunked mode of transformers' speech pipeline. Differs from it: the pipeline aligns the
two texts at the offset where most of their tokens agree, and keeps both texts where few do; the
longest common run also works if one of the texts has an additional word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mmdecode.asr.results import Piece

APART = 0.25
"""Largest difference in time of two equal tokens that match, as a share of the overlap. Times of
tokens are approximate: they are interpolated within their segment."""
APART_WINDOWS = 1.0
"""Value of `APART` for models whose segments are whole windows, where pauses shift words by
seconds. Measured on the shipped recordings of people with 2.5 s of silence between them, by
`moonshine:tiny-en` in windows of 10 s that overlap by 3 s: word error rate 16.8 % at 0.25, 7.5 % at
0.5, 4.6 % at 1 and 8.7 % at 1.5."""


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
    """Merges the segments of two overlapping windows; the two segments at the join become one.

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
    """Merges overlapping windows of models without timestamps; each window stays one segment.

    The texts are cut at the word nearest to the middle of their longest common run of tokens, or,
    without a common run, at the word nearest to the middle of the overlap.

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
    """Returns the end of the earlier text in seconds, and each window's tokens in the overlap."""
    end = max((piece.end for piece in left if piece.tokens), default=begin)
    before = _timed_tokens(left, [piece.end > begin for piece in left], is_text)
    after = _timed_tokens(right, [piece.start < end for piece in right], is_text)
    return end, before, after


def _timed_tokens(
    pieces: Sequence[Piece], wanted: Sequence[bool], is_text: Callable[[int], bool]
) -> list[TimedToken]:
    """Returns the text tokens of the segments whose ``wanted`` is true, with approximate times."""
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
    """Returns the segments cut before the word at about ``at`` seconds."""
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
    """Returns the segments from the word at about ``at`` seconds on."""
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
    """Returns the position, in a segment's tokens, of the first word at or after a time."""
    timed = _timed_tokens(pieces, [number == index for number in range(len(pieces))], is_text)
    tokens = pieces[index].tokens
    position = next((one.position for one in timed if one.seconds >= at), len(tokens))
    return _next_word(tokens, position, starts_word)


def _next_word(tokens: Sequence[int], position: int, starts_word: Callable[[int], bool]) -> int:
    """Returns the position of the next token that begins a word, or the number of tokens.

    If no token of the text begins a word, as in texts without spaces, it is ``position`` itself.
    """
    words = [at for at, token in enumerate(tokens) if starts_word(token)]
    return next((at for at in words if at >= position), len(tokens)) if words else position


def longest_run(
    first: Sequence[TimedToken], second: Sequence[TimedToken], apart_s: float
) -> tuple[int, int, int]:
    """Finds the longest run of tokens that two texts have in common at about the same time.

    Args:
        first: Tokens of one text.
        second: Tokens of the other text.
        apart_s: Largest difference in time of two equal tokens that match, in seconds.

    Returns:
        Start of the run in the first and in the second text, and its length; of equally long runs,
        the first.
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
