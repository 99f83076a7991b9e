"""Punctuation and casing of a transcript whose words are aligned to those of the reference.

Words are aligned by minimal edit distance, without marks and case. Marks are compared after each
pair of aligned words, equal or substituted: each of `MARKS` there is right, missed or false. Marks
after deleted or inserted words have no counterpart; they are counted separately. Case is compared
where reference and hypothesis have the same word. Full-width, ideographic, Arabic and Devanagari
marks count as their counterparts in `MARKS`. No normaliser is applied.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mmdecode.errors import OptionError
from mmdecode.evaluation.speech.scripts import units
from mmdecode.evaluation.speech.wer import align_units

MARKS = ",.?!"
_PLAIN = str.maketrans("\uff0c\u3001\u060c\u3002\uff0e\u0964\uff1f\u061f\uff01", ",,,...??!")
_WORD = re.compile(r"\w+(?:(?:['\u2019\-](?=\w)|(?<=\d)[.,](?=\d))\w+)*")


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Counts of one punctuation mark, or of capitals.

    Attributes:
        right: Occurrences in both texts.
        missed: Occurrences in the reference only.
        false: Occurrences in the hypothesis only.
    """

    right: int
    missed: int
    false: int

    @property
    def precision(self) -> float | None:
        """Share of the hypothesis's occurrences that are right; ``None``: it has none."""
        given = self.right + self.false
        return self.right / given if given else None

    @property
    def recall(self) -> float | None:
        """Share of the reference's occurrences that are right; ``None``: it has none."""
        wanted = self.right + self.missed
        return self.right / wanted if wanted else None

    @property
    def f1(self) -> float | None:
        """Harmonic mean of precision and recall; ``None``: neither text has any."""
        total = 2 * self.right + self.missed + self.false
        return 2 * self.right / total if total else None


@dataclass(frozen=True, kw_only=True)
class Punctuation:
    """Scores of punctuation and case over a corpus.

    Attributes:
        marks: Counts of each mark of `MARKS`.
        capitals: Counts of words with a capital letter, among the aligned pairs of equal words;
            right if both words of the pair have the same case.
        same_words: Number of aligned pairs of words that are equal when case is ignored.
        same_case: Number of these pairs with the same case.
        positions: Number of aligned pairs of words, after which marks are compared.
        unplaced: Number of marks of the reference after deleted words.
        unplaced_hypothesis: Number of marks of the hypothesis after inserted words.
    """

    marks: dict[str, Agreement]
    capitals: Agreement
    same_words: int
    same_case: int
    positions: int
    unplaced: int
    unplaced_hypothesis: int

    @property
    def overall(self) -> Agreement:
        """All marks together."""
        return Agreement(
            right=sum(one.right for one in self.marks.values()),
            missed=sum(one.missed for one in self.marks.values()),
            false=sum(one.false for one in self.marks.values()),
        )

    @property
    def case(self) -> float | None:
        """Share of aligned pairs of equal words that agree in case; ``None``: there is no pair."""
        return self.same_case / self.same_words if self.same_words else None


def punctuation(references: Sequence[str], hypotheses: Sequence[str]) -> Punctuation:
    """Scores punctuation and casing of a corpus of texts that are not normalised.

    Args:
        references: Reference texts.
        hypotheses: Recognised texts, in the same order.

    Raises:
        OptionError: References and hypotheses differ in number.
    """
    if len(references) != len(hypotheses):
        raise OptionError(
            f"{len(references)} references and {len(hypotheses)} hypotheses; expected pairs"
        )
    found: list[tuple[str, bool, bool]] = []  # mark, whether reference and hypothesis have it
    cased: list[tuple[str, str]] = []  # a word of both sides, as each writes it
    positions = unplaced = unplaced_hypothesis = 0
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        left, right = list(marked_words(reference)), list(marked_words(hypothesis))
        steps = align_units([w.casefold() for w, _ in left], [w.casefold() for w, _ in right])
        ours, theirs = iter(left), iter(right)
        for step in steps:
            word, marks = next(ours) if step.reference else ("", "")
            other, other_marks = next(theirs) if step.hypothesis else ("", "")
            if not word or not other:
                unplaced += len(marks)
                unplaced_hypothesis += len(other_marks)
                continue
            positions += 1
            found += [(m, m in marks, m in other_marks) for m in {*marks, *other_marks}]
            if step.kind == "equal":
                cased.append((word, other))
    return Punctuation(
        marks={mark: _agreement(both for one, *both in found if one == mark) for mark in MARKS},
        capitals=_capitals(cased),
        same_words=len(cased),
        same_case=sum(word == other for word, other in cased),
        positions=positions,
        unplaced=unplaced,
        unplaced_hypothesis=unplaced_hypothesis,
    )


def marked_words(text: str) -> Iterable[tuple[str, str]]:
    """Yields each word with the marks after it; marks before the first word are left out."""
    text = text.translate(_PLAIN)
    spans = [*_WORD.finditer(text)]
    ends = [span.start() for span in spans[1:]] + [len(text)]
    for span, end in zip(spans, ends, strict=False):
        marks = "".join(mark for mark in MARKS if mark in text[span.end() : end])
        *first, last = units(span[0])
        yield from ((unit, "") for unit in first)
        yield last, marks


def _agreement(pairs: Iterable[Sequence[bool]]) -> Agreement:
    counts = Counter(map(tuple, pairs))
    return Agreement(
        right=counts[True, True], missed=counts[True, False], false=counts[False, True]
    )


def _capitals(cased: Sequence[tuple[str, str]]) -> Agreement:
    """Counts words with capitals; a pair of words that differ in case is missed, false, or both."""
    return Agreement(
        right=sum(word == other and word != word.lower() for word, other in cased),
        missed=sum(word != other and word != word.lower() for word, other in cased),
        false=sum(word != other and other != other.lower() for word, other in cased),
    )
