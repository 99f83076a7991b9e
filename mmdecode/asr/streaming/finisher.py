"""`Finisher`: punctuation, capitals and disfluencies of committed words, with a fixed delay.

The words of a stream are final when they are committed, but some recognisers write no marks, or
write them only when the sentence is over. A finisher reads committed words and returns each of them
once, with a mark and capitals, when ``delay`` further words are there, or at a pause or the end of
the stream, when there is nothing to wait for. The first word of a sentence that is shown has a
capital. It changes nothing of a word but its case and the marks `REPLACED` at its end, and never
what it returned.

After a sentence that ended, earlier words are forgotten, as in the source.

Source: Chen et al. 2020, arXiv:2003.01309 (CT-Transformer).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mmdecode.asr.alignment.words import is_marks
from mmdecode.asr.results import Word
from mmdecode.asr.streaming.stream import Update
from mmdecode.errors import OptionError
from mmdecode.models.punctuation import (
    CASES,
    CONTEXT,
    DISFLUENCIES,
    MARKS,
    SENTENCE_ENDS,
    PunctuationTagger,
)

TAGGER = "zoo:punctuation"
"""Name of the tagger that ships."""
REPLACED = ".,;:?!…"
"""Marks at the end of a word that are replaced by the tagger's."""
ABBREVIATION = re.compile(r"\W*([^\W\d]\.)+[^\W\d]")
"""Words whose last full stop stays before another mark, without it: p.m"""
CLOSING = "\"'”»)]}\u2019"
"""Quotes and brackets that may follow such a mark."""
LONGEST = CONTEXT // 2
"""Most words that wait."""


@dataclass(frozen=True)
class FinishedWord:
    """A word with its mark and case.

    Attributes:
        text: The word with mark and capitals, and with the space before it; of a word that is left
            out, the mark that ends the sentence before it, or nothing.
        word: The word as it was committed; empty: there is only a mark, after all words.
        mark: The mark after it; empty: none.
        disfluency: ``filler``, ``repair`` or empty.
    """

    text: str
    word: str
    mark: str = ""
    disfluency: str = ""


@dataclass(frozen=True, kw_only=True)
class FinishedUpdate(Update):
    """An update whose committed words are finished.

    The last update may have one entry more in ``committed`` than in ``words`` and ``appeared_s``:
    the full stop after a last word that was returned before.

    Attributes:
        disfluencies: ``filler``, ``repair`` or empty, for each committed word.
    """

    disfluencies: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Returns the update as a JSON object."""
        return super().as_dict() | {"disfluencies": self.disfluencies}


class Finisher:
    """Labels words as they come.

    Args:
        tagger: The tagger, or its name.
        delay: Number of later words that a word waits for; ``None``: it waits for a pause or the
            end.
        fluent: Whether fillers and repairs are left out of `FinishedWord.text`.

    The result depends on the words, and on where pauses were reported, but not on how the words are
    divided into calls.

    Raises:
        OptionError: The delay is negative.
        InputError: The tagger cannot be loaded.
    """

    def __init__(
        self,
        tagger: PunctuationTagger | str | Path = TAGGER,
        delay: int | None = 2,
        fluent: bool = False,
    ) -> None:
        if delay is not None and (not isinstance(delay, int) or not 0 <= delay < LONGEST):
            raise OptionError(
                f"delay={delay!r}; expected 0 to {LONGEST - 1} words, or None to wait for a pause "
                "('sentence' on the command line)"
            )
        if not isinstance(tagger, PunctuationTagger):
            tagger = PunctuationTagger.from_pretrained(tagger)
        self.tagger, self.delay, self.fluent = tagger, delay, fluent
        self._words: list[str] = []  # of the sentence, as they were committed
        self._done = 0  # how many of them were returned
        self._unmarked = False  # whether the last one that was shown has no mark
        self._begins = True  # whether the next one that is shown begins a sentence
        self._timed: list[Word] = []  # of the words of updates that wait
        self._appeared_s: list[float] = []

    @property
    def waiting(self) -> int:
        """Number of words that wait for later ones."""
        return len(self._words) - self._done

    def push(self, words: Sequence[str], pause: bool = False) -> list[FinishedWord]:
        """Adds committed words; returns those that are finished.

        Args:
            words: Words, each with the space before it; their marks and capitals are replaced.
            pause: Whether the speaker paused after them, so that no word waits for later ones.
        """
        found: list[FinishedWord] = []
        for word in words:
            if len(self._words) >= CONTEXT - 1:  # a sentence without end
                drop = min(self._done, LONGEST)
                self._words, self._done = self._words[drop:], self._done - drop
            self._words.append(word)
            late = self.delay is not None and self.waiting > self.delay
            if late or self.waiting >= LONGEST:
                found.append(self._next())
        while pause and self.waiting:
            found.append(self._next())
        return found

    def update(self, update: Update, last: bool = False) -> FinishedUpdate:
        """Returns an update of a stream with finished words; those that wait are provisional.

        An update without any open word is taken for a pause.

        Args:
            update: The update.
            last: Whether it is the last one of its stream.
        """
        self._timed += update.words or ()
        self._appeared_s += update.appeared_s
        pause = not update.committed and not update.provisional
        found = self.push(update.committed, pause)
        if last:
            found += self.finish()
        words = [one for one in found if one.word]
        timed, self._timed = self._timed[: len(words)], self._timed[len(words) :]
        appeared_s = self._appeared_s[: len(words)]
        del self._appeared_s[: len(words)]
        shown = vars(update) | {
            "committed": [one.text for one in found],
            "provisional": [*self._words[self._done :], *update.provisional],
            "appeared_s": appeared_s,
            "disfluencies": [one.disfluency for one in found],
        }
        if update.words is not None:
            pairs = zip(timed, words, strict=True)
            shown["words"] = [replace(word, text=one.text) for word, one in pairs]
        return FinishedUpdate(**shown)

    def rest(self, audio_s: float) -> FinishedUpdate:
        """Returns the words that wait as the last update of a stream that failed.

        Args:
            audio_s: Seconds of audio that the stream transcribed.
        """
        words: list[Word] | None = [] if self._timed else None
        update = Update(audio_s=audio_s, ready_s=audio_s, committed=[], provisional=[], words=words)
        return self.update(update, last=True)

    def finish(self) -> list[FinishedWord]:
        """Returns the words that were waiting; the last one ends a sentence.

        If no word was waiting, and the last one has no mark, the result is a full stop alone.
        """
        found: list[FinishedWord] = []
        while self.waiting:
            found.append(self._next(ends=self.waiting == 1))
        if self._unmarked:  # the last word has been returned already, or marks alone follow it
            found.append(FinishedWord(".", "", "."))
            self._unmarked = False
        return found

    def _next(self, ends: bool = False) -> FinishedWord:
        """Labels the next word, from the words that are there.

        Args:
            ends: Whether it ends a sentence in any case.
        """
        bare = [bare_word(word) for word in self._words]
        logits, index = self.tagger.logits(bare, self.delay), self._done
        marks = logits.marks[index]
        if ends:
            inner = torch.tensor([m not in SENTENCE_ENDS for m in MARKS], device=marks.device)
            marks = marks.masked_fill(inner, -math.inf)
        mark = int(marks.argmax())
        case, disfluency = (
            int(logits.cases[index].argmax()),
            int(logits.disfluencies[index].argmax()),
        )
        self._done += 1
        if self._begins:
            case = max(case, CASES.index("first"))
        found = self._written(index, MARKS[mark], CASES[case], DISFLUENCIES[disfluency])
        if found.text:
            self._unmarked, self._begins = not found.mark, False
        if found.mark in SENTENCE_ENDS:
            self._words, self._done, self._begins = self._words[self._done :], 0, True
        return found

    def _written(self, index: int, mark: str, case: str, disfluency: str) -> FinishedWord:
        word = self._words[index]
        if not word.strip().strip(REPLACED):  # marks alone
            return FinishedWord("", word)
        if self.fluent and disfluency:
            ends = self._unmarked and mark in SENTENCE_ENDS
            return FinishedWord(mark if ends else "", word, mark, disfluency)
        return FinishedWord(written(word, mark, case), word, mark, disfluency)


def written(word: str, mark: str, case: str) -> str:
    """Returns a word in a case, with a mark in place of those at its end.

    Quotes and brackets around it stay, and so does the last full stop of an abbreviation.

    Args:
        word: The word, with the space before it.
        mark: The mark; empty: none.
        case: One of `CASES`.
    """
    inner = word.rstrip(CLOSING)
    text, closing = inner.rstrip(REPLACED), word[len(inner) :]
    if text == inner:  # no mark to replace
        text, closing = word, ""
    elif ABBREVIATION.fullmatch(text) and inner[len(text)] == "." and mark != ".":
        text += "."
    lower = text.lower()
    if case == "first":
        first = next((index for index, c in enumerate(text) if c.isalpha()), 0)
        text = lower[:first] + lower[first : first + 1].upper() + lower[first + 1 :]
    else:
        text = lower if case == "lower" else re.sub(r"(?<=['\u2019])S$", "s", text.upper())
    return f"{text}{mark}{closing}"


def bare_word(word: str) -> str:
    """Returns a word without the marks at its ends and without spaces."""
    word = word.strip()
    while word and is_marks(word[-1]):
        word = word[:-1]
    while word and is_marks(word[0]):
        word = word[1:]
    return word
