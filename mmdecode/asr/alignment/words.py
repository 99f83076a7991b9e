"""Words with times and confidences, from timed tokens.

Text is split into words as in openai/whisper: a word begins at a space, punctuation belongs to the
word next to it, and in languages without spaces every character is a word. The confidence of a word
is the mean probability of its tokens, punctuation included, as in openai/whisper and
faster-whisper. The probabilities are the model's at temperature 1, after Whisper's logits
processors and without a guide.
"""

from __future__ import annotations

import codecs
import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from mmdecode.asr.results import Word

SPACELESS = frozenset(("zh", "ja", "th", "lo", "my", "yue"))
"""Codes of languages that are written without spaces between words."""
SPACES = ("\u0120", "\u2581")
"""Characters that stand for a space in vocabularies: in byte-level BPE, and in SentencePiece."""
_OPENING = frozenset("\"'¿¡")  # next to brackets, opening quotes and dashes
_SPOKEN = frozenset("%&@#§")  # spoken, although Unicode has them as punctuation
_SHORTEST_S = 0.02


class Token(int):
    """A token id with its time and probability.

    It behaves as an ``int``, so that segments are cut, joined and compared like plain ids.

    Attributes:
        start_s, end_s: Start and end, in seconds of the audio that the model is given.
        probability: Probability at temperature 1, after the window's logits processors.
        evidence: Evidence that the token will not change when more audio is heard, see
            `mmdecode.asr.alignment.evidence`; ``None``: not asked for.
    """

    start_s: float
    end_s: float
    probability: float
    evidence: float | None = None

    @classmethod
    def of(cls, value: int, start_s: float, end_s: float, probability: float) -> Token:
        """Makes a token with its time and probability."""
        token = cls(value)
        token.start_s, token.end_s, token.probability = start_s, end_s, probability
        return token

    @classmethod
    def weighed(cls, value: int, evidence: float) -> Token:
        """Returns a token id, or a token with its time, with evidence for it."""
        token = value if isinstance(value, Token) else cls(value)
        token.evidence = evidence
        return token


@cache
def _bytes_by_character() -> dict[str, int]:
    return {character: byte for byte, character in bytes_to_unicode().items()}


def split_units(tokens: Sequence[int], tokenizer: Any) -> list[tuple[str, int]]:
    """Groups byte-level tokens into the smallest units that decode to whole characters.

    Args:
        tokens: Text tokens, without special tokens.
        tokenizer: A byte-level BPE tokenizer.

    Returns:
        Text and number of tokens of each unit. The concatenated texts are the decoded tokens, with
        ``\ufffd`` for invalid bytes.
    """
    known = _bytes_by_character()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    units: list[tuple[str, int]] = []
    text, count = "", 0
    names = tokenizer.convert_ids_to_tokens([int(token) for token in tokens])
    for number, name in enumerate(names, 1):
        # names of added tokens are plain text
        data = b"".join(bytes((known[c],)) if c in known else c.encode() for c in name)
        text += decoder.decode(data, final=number == len(names))
        count += 1
        if not decoder.getstate()[0]:
            units.append((text, count))
            text, count = "", 0
    return units


def split_words(
    tokens: Sequence[int], tokenizer: Any, language: str | None = None
) -> list[tuple[str, int]]:
    """Splits text tokens into words.

    Args:
        tokens: Text tokens, without special tokens.
        tokenizer: A byte-level BPE tokenizer.
        language: Code of their language; ``None``: one with spaces between words.

    Returns:
        Text and number of tokens of each word. The concatenated texts are the text of the tokens.
        Punctuation is a word of its own only if there is no other word.
    """
    words: list[tuple[str, int]] = []
    held, held_count = "", 0  # punctuation after a space, until the next unit decides its word
    for text, count in split_units(tokens, tokenizer):
        apart = text[0].isspace() or language in SPACELESS
        if is_marks(text):
            if words and text[0].isspace() and not opens(held):
                _extend(words, held, held_count)
                held, held_count = "", 0
            if held or not words or (apart and (language not in SPACELESS or opens(text))):
                held, held_count = held + text, held_count + count
            else:
                _extend(words, text, count)
            continue
        if words and held and not opens(held):
            _extend(words, held, held_count)
            held, held_count = "", 0
        if words and not held and not apart:
            _extend(words, text, count)
        else:
            words.append((held + text, held_count + count))
        held, held_count = "", 0
    if held and words:
        _extend(words, held, held_count)
    elif held:
        words.append((held, held_count))
    return words


def _extend(words: list[tuple[str, int]], text: str, count: int) -> None:
    words[-1] = (words[-1][0] + text, words[-1][1] + count)


def is_marks(text: str) -> bool:
    """Whether a text is only punctuation and white space, so that nothing of it is spoken."""
    return all(
        c not in _SPOKEN and (c.isspace() or unicodedata.category(c)[0] in "PCZ") for c in text
    )


def opens(marks: str) -> bool:
    """Whether punctuation belongs to the next word, as opening brackets, quotes and dashes do."""
    return all(
        c in _OPENING or unicodedata.category(c) in ("Ps", "Pi", "Pd") for c in marks.strip()
    )


def timed_words(
    segments: Sequence[Sequence[Token]],
    tokenizer: Any,
    language: str | None,
    to_recording: Callable[[float, float], tuple[float, float]],
    duration_s: float,
    begin_s: float = 0.0,
) -> list[list[Word]]:
    """Returns the words of each segment; their times are ordered, disjoint and in the recording.

    Args:
        segments: Text tokens of each segment, without special tokens.
        tokenizer: A byte-level BPE tokenizer.
        language: Code of the language.
        to_recording: Function that maps start and end of a span from seconds of the model's audio,
            in which voice activity detection cut out silence, to seconds of the recording.
        duration_s: Length of the recording, in seconds.
        begin_s: Earliest start: the end of the word before these segments, in seconds.
    """
    found: list[list[Word]] = []
    for tokens in segments:
        found.append([])
        begin = 0
        for text, count in split_words(tokens, tokenizer, language):
            own = tokens[begin : begin + count]
            begin += count
            start_s, end_s = to_recording(own[0].start_s, own[-1].end_s)
            confidence = round(sum(token.probability for token in own) / count, 4)
            found[-1].append(Word(text=text, start_s=start_s, end_s=end_s, confidence=confidence))
    flat = [word for words in found for word in words]
    spans = in_order([(word.start_s, word.end_s) for word in flat], duration_s, begin=begin_s)
    fitted = iter(
        replace(word, start_s=round(start, 6), end_s=round(end, 6))
        for word, (start, end) in zip(flat, spans, strict=True)
    )
    return [[next(fitted) for _ in words] for words in found]


def in_order(
    spans: Sequence[tuple[float, float]],
    limit: float,
    shortest: float = _SHORTEST_S,
    begin: float = 0.0,
) -> list[tuple[float, float]]:
    """Adjusts spans of time as little as possible so that they are ordered and disjoint.

    Args:
        spans: Starts and ends, in seconds.
        limit: Latest end, in seconds.
        shortest: Least length of a span, in seconds; reduced if the spans would not all fit.
        begin: Earliest start, in seconds.
    """
    shortest = min(shortest, (limit - begin) / max(len(spans), 1))
    fitted: list[tuple[float, float]] = []
    free = begin  # end of the span before
    for number, (start, end) in enumerate(spans):
        latest = limit - (len(spans) - 1 - number) * shortest  # room for those after
        start = max(free, min(start, latest - shortest))
        if number + 1 < len(spans):  # the start of the next one is more reliable
            end = min(end, spans[number + 1][0])
        free = min(max(end, start + shortest), latest)
        fitted.append((start, free))
    return fitted


def around_words(
    spans: Sequence[tuple[float, float]],
    words: Sequence[Sequence[Word] | None],
    begin_s: float = 0.0,
) -> list[tuple[float, float]]:
    """Returns start and end of segments, adjusted to the times of their words.

    A segment with words begins with its first word and ends with its last word. A segment without
    words keeps its times, cut where they overlap the words before and after it.

    Args:
        spans: Starts and ends of segments, in seconds.
        words: Words of each segment, in order of time; ``None``: word timestamps are off.
        begin_s: End of the word before these segments, in seconds.
    """
    latest = [math.inf]  # start of the next segment with words, from the last one backwards
    for own in reversed(words):
        latest.append(own[0].start_s if own else latest[-1])
    found: list[tuple[float, float]] = []
    earliest = begin_s
    for (start, end), own, limit in zip(spans, words, latest[-2::-1], strict=True):
        if own:
            earliest = own[-1].end_s
            found.append((own[0].start_s, earliest))
        else:
            start = min(max(start, earliest), limit)
            found.append((start, min(max(start, end), limit)))
    return found
