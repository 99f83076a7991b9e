"""How a recogniser writes a language model's text: casings, marks and token boundaries."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Literal

import numpy as np

from mmdecode.asr.alignment.words import SPACES

Tokens = tuple[int, ...]
"""Ids of the recogniser."""

Route = Literal["auto", "text", "ids"]


MARKS = ("", ",", ".", "?", "!")
"""Punctuation that may follow a word, next to that of the text itself."""

_TRAILING = ",.?!;:"

_NO_TEXT = "\ufffd"


class Spelling:
    """How a recogniser's tokenizer writes words.

    Args:
        tokenizer: A BPE that marks spaces in its tokens, as Whisper's or Moonshine's; what was
            added to its vocabulary is no text.
        end: Id of the end of a transcript.
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
        # some tokenizers put a space before every text by themselves
        self._before_word = "" if first.startswith(self.space) else " "
        ordered = sorted(zip(names, ids, strict=True))
        self._names = [name for name, _ in ordered]
        self._ordered = np.array([token for _, token in ordered])
        self.name = dict(zip(ids, names, strict=True))

    def ids(self, word: str) -> Tokens:
        """The canonical tokens of a word with a space before it."""
        if word not in self._ids:
            ids = _plain_ids(self._tokenizer, f"{self._before_word}{word}")
            # a word may look like a special token, which is no text
            self._ids[word] = tuple(token for token in ids if token in self.name)
        return self._ids[word]

    def beginning(self, piece: str) -> np.ndarray:
        """Ids of all text tokens whose bytes begin with those of ``piece``, a token's name."""
        first = bisect_left(self._names, piece)
        # names are made of characters that are all below this one
        last = bisect_left(self._names, f"{piece}\U0010ffff")
        return self._ordered[first:last]


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def casings(word: str) -> list[str]:
    """The ways a word may be written in small and capital letters, as it is first."""
    return [*dict.fromkeys([word, word.lower(), word[:1].upper() + word[1:], word.upper()])]


def spellings(word: str) -> list[str]:
    """The casings of a complete word with the marks that may follow it, as it is first."""
    core = word.rstrip(_TRAILING)
    if not core:
        return [word]
    marks = dict.fromkeys([word[len(core) :], *MARKS])
    return [case + mark for mark in marks for case in casings(core)]


def split(text: str) -> tuple[tuple[str, ...], str]:
    """Complete words, and the pending one, empty after white space."""
    words = text.split()
    if not words or text[-1].isspace():
        return tuple(words), ""
    return tuple(words[:-1]), words[-1]
