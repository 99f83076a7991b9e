"""Listed words and the texts of tokens: which tokens continue, complete or leave a word.

For `mmdecode.guide.bias`, which defines the two ways to pay a bonus, ``spread`` and ``end``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from mmdecode.guide.token_texts import BROKEN, token_texts

Pay = Literal["spread", "end"]
State = tuple[int, ...]
"""Nodes of a `Trie` that the end of a text has reached; node 0 where a word may begin."""

BEGIN: State = (0,)
"""State of an empty text."""

_SCRIPTS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # kana
    (0x3400, 0x9FFF),  # Chinese characters
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
_LAST = "\U0010ffff"


def separates(letter: str) -> bool:
    """Whether a word ends before a character and may begin after it.

    So do characters other than letters and digits, and all characters of scripts without spaces.
    """
    code = ord(letter)
    return not letter.isalnum() or any(low <= code <= high for low, high in _SCRIPTS)


class Trie:
    """Listed words as a tree of characters; a node is a beginning of a word, 0 the empty one.

    Args:
        words: Words and phrases.

    Attributes:
        children: Child of each node, by character.
        ends: Whether each node is a whole word.
        part: Largest part of a word that each node completes, 0 to 1.
        longest: Number of characters of the longest word.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.ends, self.part, self.longest = [False], [0.0], 0
        for word in (word.casefold() for word in words):
            node = 0
            for depth, letter in enumerate(word, 1):
                if letter not in self.children[node]:
                    self.children[node][letter] = len(self.ends)
                    self.children.append({})
                    self.ends.append(False)
                    self.part.append(0.0)
                node = self.children[node][letter]
                self.part[node] = max(self.part[node], depth / len(word))
            self.ends[node] = True
            self.longest = max(self.longest, len(word))

    def read(self, state: State, text: str) -> tuple[State, int, int]:
        """Continues a text by another, which is case-folded.

        Returns:
            The state after it; the number of words that a character of it ends; and how many of
            those have a character of it, too.
        """
        ended = own = 0
        for index, letter in enumerate(text):
            apart = separates(letter)
            if apart:
                count = self.complete(state)
                ended, own = ended + count, own + (count if index else 0)
            reached = {self.children[node].get(letter, 0) for node in state} - {0}
            state = (*((0,) if apart else ()), *sorted(reached))
        return state, ended, own

    def complete(self, state: State) -> int:
        """Returns the number of words that end in a state."""
        return sum(self.ends[node] for node in state)

    def matched(self, state: State) -> float:
        """Returns the largest part of a word that a state completes, 0 to 1."""
        return max((self.part[node] for node in state), default=0.0)


class Row(NamedTuple):
    """Bonuses of all tokens in one state, for a bonus of 1.

    Attributes:
        other: Bonus of tokens that are not in ``ids``.
        after_word: Addition to it for those of them that end a word.
        ids: Tokens with a bonus of their own, int64 ``(n,)``.
        values: Their bonus minus the one that they would have if they were not in ``ids``, float32
            ``(n,)``.
    """

    other: float
    after_word: float
    ids: np.ndarray
    values: np.ndarray


class Bonuses:
    """Bonuses of a vocabulary's tokens after any text, for a bonus of 1.

    A text reaches few states; what was computed for one is kept.

    Args:
        trie: The listed words.
        texts: Text of each token, see `mmdecode.guide.token_texts.token_texts`.
        pay: See `mmdecode.guide.bias`.

    Attributes:
        ends_word: Whether each token ends a word, bool ``(V,)``.
    """

    def __init__(self, trie: Trie, texts: Sequence[str | None], pay: Pay) -> None:
        self.trie, self.pay = trie, pay
        self.texts = [None if text is None else text.casefold() for text in texts]
        self.ends_word = np.array(
            [text is None or (text[0] != BROKEN and separates(text[0])) for text in self.texts]
        )
        whole = ((text, i) for i, text in enumerate(self.texts) if text and BROKEN not in text)
        ordered = sorted(whole)
        self._ordered, self._ids = [t for t, _ in ordered], [i for _, i in ordered]
        self._begins = self._that_begin()
        self._steps: dict[tuple[State, int], State] = {}
        self._rows: dict[State, Row] = {}

    def step(self, state: State, token: int) -> State:
        """Returns the state after one more token."""
        key = state, token
        if key not in self._steps:
            text = self.texts[token]
            if text is None:
                self._steps[key] = BEGIN
            else:
                self._steps[key] = () if BROKEN in text else self.trie.read(state, text)[0]
        return self._steps[key]

    def row(self, state: State) -> Row:
        """Returns the bonuses of all tokens in a state."""
        if state not in self._rows:
            self._rows[state] = self._row(state)
        return self._rows[state]

    def _row(self, state: State) -> Row:
        spread = self.pay == "spread"
        other = -self.trie.matched(state) if spread else 0.0
        after_word = float(self.trie.complete(state)) if spread else 0.0
        ids = {*self._begins, *(i for node in state for i in self._from(node))}
        ordered = np.array(sorted(ids), dtype=np.int64)
        values = np.array([self._value(state, int(token)) for token in ordered], dtype=np.float32)
        values -= other + after_word * self.ends_word[ordered]
        return Row(other, after_word, ordered, values.astype(np.float32))

    def _value(self, state: State, token: int) -> float:
        reached, ended, own = self.trie.read(state, self.texts[token] or "")
        if self.pay == "end":
            return own + self.trie.complete(reached)
        return ended + self.trie.matched(reached) - self.trie.matched(state)

    def _that_begin(self) -> list[int]:
        """Returns the tokens that begin a word after another, or have a whole one."""
        found = []
        for text, token in zip(self._ordered, self._ids, strict=True):
            state, ended, _ = self.trie.read((), text)
            if ended or self.trie.matched(state):
                found.append(token)
        return found

    def _from(self, node: int) -> list[int]:
        """Returns the tokens that go on from a node of the trie, and may end the word."""
        found: list[int] = []
        waiting = [(node, "", 0, len(self._ordered))]
        while waiting:
            above, text, low, high = waiting.pop()
            if text:
                last = bisect_left(self._ordered, text + "\0", low, high)
                found += self._ids[low:last]
                if self.trie.ends[above]:
                    found += [
                        self._ids[index]
                        for index in range(last, high)
                        if separates(self._ordered[index][len(text)])
                    ]
            for letter, child in self.trie.children[above].items():
                longer = text + letter
                first = bisect_left(self._ordered, longer, low, high)
                end = bisect_left(self._ordered, longer + _LAST, first, high)
                if first < end:
                    waiting.append((child, longer, first, end))
        return found


@lru_cache(maxsize=8)
def bonuses(tokenizer: Any, vocab: int, words: tuple[str, ...], pay: Pay) -> Bonuses:
    """Returns the bonuses of a tokenizer's tokens; computed once for each list of words."""
    return Bonuses(Trie(words), token_texts(tokenizer, vocab), pay)
