"""`Hypothesis`: the words that a stream finds in its buffered audio, with evidence for each."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmdecode.asr.alignment.words import SPACELESS, Token
from mmdecode.asr.results import Segment, Word


@dataclass(frozen=True)
class Hypothesis:
    """Transcript of the buffered audio at one step.

    Attributes:
        words: Words, each with the space before it.
        timed: The same words with their times in the stream; ``None``: word timestamps are off.
        start_s: Start of the first segment, in seconds from the start of the buffer; 0 if there is
            no segment.
        ends: For each segment its end in seconds from the start of the buffer, and the number of
            words up to that end.
        evidence: Evidence for each word, of the kind that the policy needs; ``None``: it needs
            none.
        tokens: Tokens of each segment.
    """

    words: list[str]
    timed: list[Word] | None
    start_s: float
    ends: list[tuple[float, int]]
    evidence: list[float] | None
    tokens: list[list[int]]


def words_of(segment: Segment, language: str | None) -> list[str]:
    """Returns the words of a segment, each with the space before it."""
    if segment.words is not None:
        return [word.text for word in segment.words]
    if language in SPACELESS:
        return [c for c in segment.text if not c.isspace()]
    return [f" {word}" for word in segment.text.split()]


def evidence_of(
    tokens: Sequence[Any], words: Sequence[str], text: Callable[[Sequence[int]], str]
) -> list[float]:
    """Returns the evidence for each word of a segment: the smallest number of its tokens.

    Args:
        tokens: Tokens of the segment, each with the number ``evidence``, see
            `mmdecode.asr.alignment.words.Token`.
        words: The words of the segment.
        text: Function that decodes tokens, see `Recognizer.text`.
    """
    smallest = [math.inf] * len(words)
    edges = list(itertools.accumulate(len(_written(word)) for word in words))
    begin, held = 0, math.inf  # of tokens that are parts of a character
    for count, token in enumerate(tokens, 1):
        held = min(held, token.evidence)
        text_so_far = text(tokens[:count])
        if text_so_far.endswith("\ufffd") and count < len(tokens):
            continue
        end = len(_written(text_so_far))
        if end > begin:  # else a timestamp, say
            first, last = bisect.bisect_right(edges, begin), bisect.bisect_left(edges, end)
            for word in range(first, min(last + 1, len(words))):
                smallest[word] = min(smallest[word], held)
        begin, held = end, math.inf
    return [-math.inf if number == math.inf else number for number in smallest]


def following(
    segments: Sequence[Sequence[int]], is_text: Callable[[int], bool]
) -> list[list[Token]]:
    """Returns the tokens of segments with the number of text tokens after each as evidence.

    Args:
        segments: Tokens of each segment, in order.
        is_text: Whether a token is text, see `Recognizer.is_text`.
    """
    left = sum(is_text(token) for tokens in segments for token in tokens)
    return [
        [Token.weighed(int(token), left := left - is_text(token)) for token in tokens]
        for tokens in segments
    ]


def _written(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())
