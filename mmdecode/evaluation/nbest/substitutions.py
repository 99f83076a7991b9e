"""A table of spellings: what a recogniser writes and what the references of its domain have there.

The simplest thing that learns from corrected transcripts, and what a corrector has to beat: much of
what correction gains on a set is the convention of its references ("one" for "1", "u s air" for "us
air"), which needs no language model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.evaluation.nbest.n_best import Aligner, reference_of
from mmdecode.evaluation.speech.wer import align

Words = tuple[str, ...]
LONGEST = 4  # words that are replaced at once
MINIMUMS = (1, 2, 3, 5, 10, 20)
FOLDS = 5


@dataclass(frozen=True)
class Rule:
    """One replacement.

    Attributes:
        heard: Words of the recogniser.
        said: What stands for them; may be empty.
        gain: Errors that it removed, less those that it made, when it was learned.
        seen: Times that the references had it so.
    """

    heard: Words
    said: Words
    gain: int
    seen: int


@dataclass(frozen=True)
class Substitutions:
    """Replaces words, from left to right, the longest match first; each word once.

    Attributes:
        rules: At most one for the same words.
    """

    rules: Sequence[Rule] = ()
    _said: Mapping[Words, Words] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_said", {rule.heard: rule.said for rule in self.rules})

    def __call__(self, text: str) -> str:
        """The text with its replacements, words apart by one space."""
        return " ".join(_replaced(text.split(), self._said))

    def at_least(self, minimum: int) -> Substitutions:
        """The rules that were seen so often and gained as much."""
        return Substitutions([r for r in self.rules if min(r.gain, r.seen) >= minimum])


def fitted(lists: Sequence[NBestList], aligner: Aligner) -> tuple[Substitutions, int | None]:
    """Learns a table, and how sure a rule must be, from the same lists.

    What a rule must gain at least, of `MINIMUMS`, is chosen by cross-validation: the value with the
    fewest errors where a table is learned from four fifths of the lists and applied to the rest.

    Args:
        lists: With references.
        aligner: What counts as an error.

    Returns:
        The table, and the minimum; ``None``: no table has fewer errors than the first hypotheses,
        and it is empty.
    """
    saved = dict.fromkeys(MINIMUMS, 0)
    for fold in range(FOLDS):
        table = learned([one for n, one in enumerate(lists) if n % FOLDS != fold], aligner)
        for minimum in MINIMUMS:
            smaller = table.at_least(minimum)
            for one in lists[fold::FOLDS]:
                said = reference_of(one)
                after = aligner.errors(said, smaller(one.best))
                saved[minimum] += aligner.errors(said, one.best) - after
    most = max(saved.values())
    if most <= 0:
        return Substitutions(), None
    minimum = max(value for value in MINIMUMS if saved[value] == most)
    return learned(lists, aligner).at_least(minimum), minimum


def learned(
    lists: Sequence[NBestList], aligner: Aligner, minimum: int = MINIMUMS[0]
) -> Substitutions:
    """All rules that remove at least ``minimum`` errors from the first hypotheses, net.

    Candidates are what stands for what in the alignments, alone and with a word of context on
    either side. They are taken in, the most frequent and the shortest first, where they are right
    more often than not and, next to the rules before them, remove enough errors.

    Args:
        lists: With references.
        aligner: What counts as an error.
        minimum: Errors to remove, and times that a candidate must be seen.
    """
    pairs = [(reference_of(one), one.best) for one in lists]
    candidates: Counter[tuple[Words, Words]] = Counter()
    places: defaultdict[Words, list[int]] = defaultdict(list)
    for number, (said, heard) in enumerate(pairs):
        candidates.update(_candidates(said, heard))
        words = heard.split()
        for length in range(1, LONGEST + 1):
            for start in range(len(words) - length + 1):
                places[tuple(words[start : start + length])].append(number)
    rules: dict[Words, Rule] = {}
    table: dict[Words, Words] = {}
    errors = [aligner.errors(said, heard) for said, heard in pairs]
    ordered = sorted(candidates.items(), key=lambda one: (-one[1], len(one[0][0]), one[0]))
    for (old, new), seen in ordered:
        if seen < minimum or old in table or 2 * seen <= len(places[old]):
            continue
        wider = table | {old: new}
        after = {}
        for number in set(places[old]):
            said, heard = pairs[number]
            after[number] = aligner.errors(said, " ".join(_replaced(heard.split(), wider)))
        gain = sum(errors[number] - count for number, count in after.items())
        if gain >= minimum:
            table = wider
            rules[old] = Rule(old, new, gain, seen)
            for number, count in after.items():
                errors[number] = count
    return Substitutions(list(rules.values()))


def _candidates(said: str, heard: str) -> Iterator[tuple[Words, Words]]:
    """What stands for what in one pair of texts, each once."""
    steps = align(said, heard, "none", "plain")
    wrong = [step.kind != "equal" for step in steps]
    found = set()
    start = 0
    while start < len(steps):
        if not wrong[start]:
            start += 1
            continue
        end = wrong.index(False, start) if False in wrong[start:] else len(steps)
        for first in {start, max(start - 1, 0)}:
            for last in {end, min(end + 1, len(steps))}:
                span = steps[first:last]
                replaced = tuple(step.heard for step in span if step.heard)
                if 0 < len(replaced) <= LONGEST:
                    found.add((replaced, tuple(step.said for step in span if step.said)))
        start = end
    yield from found


def _replaced(words: Sequence[str], said: Mapping[Words, Words]) -> Iterator[str]:
    start = 0
    while start < len(words):
        for length in range(min(LONGEST, len(words) - start), 0, -1):
            found = said.get(tuple(words[start : start + length]))
            if found is not None:
                yield from found
                start += length
                break
        else:
            yield words[start]
            start += 1
