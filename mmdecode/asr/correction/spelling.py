"""Maps words of a text to a recogniser's tokens, in several casings and with punctuation."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Literal

import numpy as np

from mmdecode.asr.alignment.words import SPACES

Tokens = tuple[int, ...]
"""Token ids of the recogniser."""

Route = Literal["auto", "text", "ids"]


MARKS = ("", ",", ".", "?", "!")
"""Punctuation that may follow a word, whatever punctuation the text itself has."""

_TRAILING = ",.?!;:"


class Spelling:
    """Maps words to tokens of a recogniser's tokenizer.

    Args:
        tokenizer: A BPE tokenizer with a mark for spaces in its tokens, such as Whisper's or
            Moonshine's; tokens added to its vocabulary do not count as text.
        end: Id of the end token.
    """

    def __init__(self, tokenizer: Any, end: int) -> None:
        self.end = end
        self._tokenizer = tokenizer
        self._ids: dict[str, Tokens] = {}
        other = {end, *tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ids = [i for i in range(len(tokenizer)) if i not in other]
        names = tokenizer.convert_ids_to_tokens(ids)
        self.space = max(SPACES, key=lambda mark: sum(name.startswith(mark) for name in names))
        words = (name[1:] for name in names if name.startswith(self.space) and name[1:].isalpha())
        [first, *_] = tokenizer.convert_ids_to_tokens(_plain_ids(tokenizer, next(words, "a")))
        # some tokenizers prepend a space to every text
        self._before_word = "" if first.startswith(self.space) else " "
        ordered = sorted(zip(names, ids, strict=True))
        self._names = [name for name, _ in ordered]
        self._ordered = np.array([token for _, token in ordered])
        self.name = dict(zip(ids, names, strict=True))

    def ids(self, word: str) -> Tokens:
        """Returns the tokens that the tokenizer gives for a word with a space before it."""
        if word not in self._ids:
            ids = _plain_ids(self._tokenizer, f"{self._before_word}{word}")
            # a word may be spelled like a special token, which is not text
            self._ids[word] = tuple(token for token in ids if token in self.name)
        return self._ids[word]

    def beginning(self, piece: str) -> np.ndarray:
        """Returns the ids of all text tokens whose bytes begin with those of a token ``piece``."""
        first = bisect_left(self._names, piece)
        # names are made of characters that are all below this one
        last = bisect_left(self._names, f"{piece}\U0010ffff")
        return self._ordered[first:last]


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def casings(word: str) -> list[str]:
    """Returns the word as it is, in lower case, capitalised and in upper case, each once."""
    return [*dict.fromkeys([word, word.lower(), word[:1].upper() + word[1:], word.upper()])]


def spellings(word: str) -> list[str]:
    """Returns the word as it is, then its casings with each punctuation mark of `MARKS`."""
    core = word.rstrip(_TRAILING)
    if not core:
        return [word]
    marks = dict.fromkeys([word[len(core) :], *MARKS])
    return [case + mark for mark in marks for case in casings(core)]


def split(text: str) -> tuple[tuple[str, ...], str]:
    """Splits a text into complete words and a last incomplete word, empty after white space."""
    words = text.split()
    if not words or text[-1].isspace():
        return tuple(words), ""
    return tuple(words[:-1]), words[-1]
