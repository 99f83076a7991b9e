"""A table of replacement rules, learned from recognised words and the words of the references.

It is the simplest method that learns from corrected transcripts, and the baseline that a corrector
has to beat. Much of the improvement by correction comes from spelling words as the references do
("one" for "1", "u s air" for "us air"), which needs no language model.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.evaluation.nbest.n_best import Aligner, reference_of
from mmdecode.evaluation.speech.wer import align

Words = tuple[str, ...]
LONGEST = 4  # largest number of words that one rule replaces
MINIMUMS = (1, 2, 3, 5, 10, 20)
FOLDS = 5


@dataclass(frozen=True)
class Rule:
    """One replacement rule.

    Attributes:
        hypothesis: Words of the recogniser that are replaced.
        reference: Words that replace them; may be empty.
        errors_saved: Errors removed minus errors added, on the lists the rule was learned from.
        seen: Number of alignments in which the replacement occurred.
    """

    hypothesis: Words
    reference: Words
    errors_saved: int
    seen: int


@dataclass(frozen=True)
class Substitutions:
    """Replaces words by rules, from left to right; if several rules match, the longest is used.

    Replaced words are not replaced again.

    Attributes:
        rules: Rules with different ``hypothesis``.
    """

    rules: Sequence[Rule] = ()

    @cached_property
    def _replacements(self) -> Mapping[Words, Words]:
        return {rule.hypothesis: rule.reference for rule in self.rules}

    def __call__(self, text: str) -> str:
        """Returns the text after replacement, with words separated by one space."""
        return " ".join(_replaced(text.split(), self._replacements))

    def at_least(self, minimum: int) -> Substitutions:
        """Keeps the rules that were seen, and saved errors, at least ``minimum`` times."""
        return Substitutions([r for r in self.rules if min(r.errors_saved, r.seen) >= minimum])


def fitted(lists: Sequence[NBestList], aligner: Aligner) -> tuple[Substitutions, int | None]:
    """Learns a table from lists, with a cross-validated minimum of errors that each rule must save.

    Tables are learned from four of five folds and applied to the fifth; the minimum is the value of
    `MINIMUMS` with the fewest errors there.

    Args:
        lists: Lists with references.
        aligner: Aligner that counts errors.

    Returns:
        The table and the minimum. If no minimum gives fewer errors than the first hypotheses, the
        table is empty and the minimum ``None``.
    """
    saved = dict.fromkeys(MINIMUMS, 0)
    for fold in range(FOLDS):
        table = learned([one for n, one in enumerate(lists) if n % FOLDS != fold], aligner)
        for minimum in MINIMUMS:
            smaller = table.at_least(minimum)
            for one in lists[fold::FOLDS]:
                reference = reference_of(one)
                after = aligner.errors(reference, smaller(one.best))
                saved[minimum] += aligner.errors(reference, one.best) - after
    most = max(saved.values())
    if most <= 0:
        return Substitutions(), None
    minimum = max(value for value in MINIMUMS if saved[value] == most)
    return learned(lists, aligner).at_least(minimum), minimum


def learned(
    lists: Sequence[NBestList], aligner: Aligner, minimum: int = MINIMUMS[0]
) -> Substitutions:
    """Learns all rules that save at least ``minimum`` errors of the first hypotheses on balance.

    Candidates are the replacements in the alignments, with and without a word of context on each
    side. They are tried in order of frequency, then of length. A candidate becomes a rule if it is
    right in more than half of its occurrences and, after the earlier rules, saves enough errors.

    Args:
        lists: Lists with references.
        aligner: Aligner that counts errors.
        minimum: Number of errors that a rule must save, and of times that it must be seen.
    """
    pairs = [(reference_of(one), one.best) for one in lists]
    candidates: Counter[tuple[Words, Words]] = Counter()
    lists_with: defaultdict[Words, list[int]] = defaultdict(list)
    for number, (reference, hypothesis) in enumerate(pairs):
        candidates.update(_candidates(reference, hypothesis))
        words = hypothesis.split()
        for length in range(1, LONGEST + 1):
            for start in range(len(words) - length + 1):
                lists_with[tuple(words[start : start + length])].append(number)
    rules: list[Rule] = []
    table: dict[Words, Words] = {}
    errors = {number: aligner.errors(*pair) for number, pair in enumerate(pairs)}
    ordered = sorted(candidates.items(), key=lambda one: (-one[1], len(one[0][0]), one[0]))
    for (old, new), seen in ordered:
        if seen < minimum or old in table or 2 * seen <= len(lists_with[old]):
            continue
        wider = table | {old: new}
        after = {}
        for number in set(lists_with[old]):
            reference, hypothesis = pairs[number]
            text = " ".join(_replaced(hypothesis.split(), wider))
            after[number] = aligner.errors(reference, text)
        saved = sum(errors[number] - count for number, count in after.items())
        if saved >= minimum:
            table = wider
            rules.append(Rule(old, new, saved, seen))
            errors |= after
    return Substitutions(rules)


def _candidates(reference: str, hypothesis: str) -> set[tuple[Words, Words]]:
    """The replacements in the alignment of a pair of texts, each once."""
    steps = align(reference, hypothesis, "none", "plain")
    marks = "".join("." if step.kind == "equal" else "x" for step in steps)
    found = set()
    for run in re.finditer("x+", marks):
        for first in {run.start(), max(run.start() - 1, 0)}:
            for last in {run.end(), min(run.end() + 1, len(steps))}:
                span = steps[first:last]
                replaced = tuple(step.hypothesis for step in span if step.hypothesis)
                if 0 < len(replaced) <= LONGEST:
                    found.add((replaced, tuple(step.reference for step in span if step.reference)))
    return found


def _replaced(words: Sequence[str], replacements: Mapping[Words, Words]) -> Iterator[str]:
    start = 0
    while start < len(words):
        for length in range(min(LONGEST, len(words) - start), 0, -1):
            found = replacements.get(tuple(words[start : start + length]))
            if found is not None:
                yield from found
                start += length
                break
        else:
            yield words[start]
            start += 1
