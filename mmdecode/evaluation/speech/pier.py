"""PIER: the error rate of the words that matter, such as those of another language, or names.

``PIER = (S + D + I) / (H + S + D)`` over the reference's points of interest in the alignment that
counts word errors. An insertion belongs to the reference word that follows it, at the end of a
sentence to the last one; in a sentence without a reference word it belongs to the rest. The same
rate is given for the rest; the errors of both add up to those of the word error rate.

Points of interest are spans tagged in the reference, ``das <tag meeting> ist heute``, or all words
of a script, such as the Latin ones of an Arabic sentence. Characters of scripts without spaces are
units of their own in references and hypotheses, unless ``segmented`` is set.

Source: Ugan et al. 2025, PIER; the rules are those of its code, enesyugan/PIER-CodeSwitching-
Evaluation. Three of its choices are not followed: it drops sentences that consist of points of
interest only, or have none; it applies word indices of the raw reference to the normalised one,
which shifts them where the normaliser drops words; and it splits references into characters to find
the points of interest, but not for the alignment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.speech.normalisers import Normaliser, normaliser_of
from mmdecode.evaluation.speech.scripts import script, units
from mmdecode.evaluation.speech.wer import Step, align_units, paired_units
from mmdecode.evaluation.stats.intervals import RESAMPLES, interval, resampled_sums, sums_by

TAGS = "tags"
SCRIPTS = {
    **{name: name.upper() for name in "latin greek cyrillic armenian hebrew arabic".split()},
    **{name: name.upper() for name in "devanagari bengali tamil thai hangul".split()},
    **{name: name.upper() for name in "hiragana katakana ethiopic georgian".split()},
    "han": "CJK",
}
"""Scripts whose words may be the points of interest, by the name that asks for them."""
COLUMNS = ("hits", "substitutions", "deletions", "insertions")
_TAG = re.compile(r"<tag\s+([^<>]*)>")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Counts over the reference words of one kind: points of interest, or the rest.

    Attributes:
        hits, substitutions, deletions: Reference words by outcome.
        insertions: Inserted words that belong to them, see the module.
    """

    hits: int
    substitutions: int
    deletions: int
    insertions: int

    @property
    def words(self) -> int:
        """Reference words."""
        return self.hits + self.substitutions + self.deletions

    @property
    def errors(self) -> int:
        """Substitutions, deletions and insertions."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def value(self) -> float | None:
        """Errors over words, which may be more than 1; ``None``: there is no word."""
        return self.errors / self.words if self.words else None


@dataclass(frozen=True, kw_only=True)
class PIER:
    """One corpus score.

    Attributes:
        interest: The points of interest.
        rest: All other words.
        low, high: 95 % interval of the rate, bootstrap over utterances or groups; ``None``: there
            is no point of interest.
        points: Kind of the points of interest: ``tags``, or the name of a script.
    """

    interest: Part
    rest: Part
    low: float | None
    high: float | None
    points: str

    @property
    def value(self) -> float | None:
        """The point-of-interest error rate."""
        return self.interest.value


def pier(
    references: Sequence[str],
    hypotheses: Sequence[str],
    *,
    points: str = TAGS,
    normaliser: str = "none",
    scorer: str = "plain",
    split_hyphens: bool = False,
    segmented: bool = False,
    groups: Sequence[str] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PIER:
    """Computes the point-of-interest error rate of a corpus.

    Args:
        references: Reference texts.
        hypotheses: Recognised texts, in the same order.
        points: ``tags``, or one of `SCRIPTS`.
        normaliser: Name in `mmdecode.evaluation.speech.normalisers.NORMALISERS`; a tagged word
            stays tagged after normalisation.
        scorer: ``plain`` or ``merge``, see `mmdecode.evaluation.speech.wer`.
        split_hyphens: Whether hyphens separate words.
        segmented: See `mmdecode.evaluation.speech.wer.wer`.
        groups: Speaker or recording of each pair, which the bootstrap then resamples; ``None``: it
            resamples pairs.
        resamples: Bootstrap resamples for the interval.
        seed: Seed of the bootstrap.

    Raises:
        OptionError: The sides differ in length or are empty, or the scorer is ``sclite``.
        UnknownNameError: There are no such points of interest.
        InputError: A tag is not closed.
    """
    if len(references) != len(hypotheses) or not len(references):
        raise OptionError(
            f"{len(references)} references and {len(hypotheses)} hypotheses; expected pairs"
        )
    refuse_points(points, scorer)
    normalise = normaliser_of(normaliser)
    rows = []
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        expected, marked = points_of(reference, points, normalise, split_hyphens, segmented)
        text = normalise(_apart(hypothesis, split_hyphens))
        _, recognised = paired_units("".join(expected), text, segmented)
        rows.append(count_points(align_units(expected, recognised, scorer), marked))
    table = np.array(rows, dtype=np.int64)  # (pairs, 8)
    interest, rest = (
        Part(**{name: int(n) for name, n in zip(COLUMNS, half, strict=True)})
        for half in table.sum(0).reshape(2, 4)
    )
    low = high = None
    if interest.words:
        both = np.stack([table[:, 1:4].sum(1), table[:, :3].sum(1)], 1)
        sums = resampled_sums(sums_by(both, groups), resamples, seed)
        low, high = interval(sums[:, 0] / np.maximum(sums[:, 1], 1))
    return PIER(interest=interest, rest=rest, low=low, high=high, points=points)


def refuse_points(points: str, scorer: str) -> None:
    """Refuses unknown points of interest, and a scorer that does not keep their word indices.

    Raises:
        UnknownNameError: There are no points of interest of that name.
        OptionError: The scorer is ``sclite``, which aligns one of several readings of a reference.
    """
    if points != TAGS and points not in SCRIPTS:
        raise UnknownNameError.of("points of interest", points, (TAGS, *SCRIPTS))
    if scorer == "sclite":
        raise OptionError(
            "points of interest need fixed word positions, and scorer 'sclite' chooses among "
            "readings of a reference; use scorer 'plain' or 'merge'"
        )


def is_tagged(reference: str) -> bool:
    """Whether a reference has tagged spans."""
    return "<tag" in reference


def untagged(reference: str) -> str:
    """The text of a reference without its tags.

    Raises:
        InputError: A tag is not closed.
    """
    return _untagged(reference)[0]


def points_of(
    reference: str,
    points: str,
    normalise: Normaliser,
    split_hyphens: bool = False,
    segmented: bool = False,
) -> tuple[list[str], list[bool]]:
    """Normalised units of a reference, and which of them are points of interest.

    Args:
        reference: Reference text, with its tags.
        points: See `pier`.
        normalise: Normaliser.
        split_hyphens: See `pier`.
        segmented: See `pier`.

    Raises:
        InputError: A tag is not closed.
    """
    text, flags = _untagged(reference)
    text = _apart(text, split_hyphens)
    cut = str.split if segmented else units
    found = cut(normalise(text))
    if points != TAGS:
        return found, [any(script(c) == SCRIPTS[points] for c in unit) for unit in found]
    tagged = iter([flag for character, flag in zip(text, flags, strict=True) if character.strip()])
    single = []  # each unit as it is normalised alone, with its flag
    for unit in cut(text):
        flag = sum(next(tagged) for _ in unit) > 0
        single += [(part, flag) for part in cut(normalise(unit))]
    marked = [False] * len(found)
    matcher = SequenceMatcher(None, [part for part, _ in single], found, autojunk=False)
    for kind, first, last, begin, end in matcher.get_opcodes():
        own = [flag for _, flag in single[first:last]]
        marked[begin:end] = own if kind == "equal" else [any(own)] * (end - begin)
    return found, marked


def count_points(steps: Sequence[Step], marked: Sequence[bool]) -> list[int]:
    """Hits, substitutions, deletions and insertions of points of interest, then of the rest.

    Args:
        steps: The alignment.
        marked: Whether each reference word is a point of interest.
    """
    interest, rest = dict.fromkeys(COLUMNS, 0), dict.fromkeys(COLUMNS, 0)
    names = {"equal": "hits", "substitute": "substitutions", "delete": "deletions"}
    index = 0
    for step in steps:
        if step.kind == "insert":
            owner = bool(marked) and marked[min(index, len(marked) - 1)]
            (interest if owner else rest)["insertions"] += 1
            continue
        for _ in step.reference.split():
            (interest if marked[index] else rest)[names[step.kind]] += 1
            index += 1
    return [*interest.values(), *rest.values()]


def _untagged(reference: str) -> tuple[str, list[bool]]:
    """The text without tags, and whether each of its characters was inside a tag."""
    text, flags, end = "", [], 0
    for found in _TAG.finditer(reference):
        for part, flag in ((reference[end : found.start()], False), (found[1], True)):
            text += part
            flags += [flag] * len(part)
        end = found.end()
    text, flags = text + reference[end:], flags + [False] * (len(reference) - end)
    if is_tagged(text):
        raise InputError(
            f"a tag of a reference is not closed, or holds another: {reference[:80]!r}; expected "
            "<tag word> or <tag several words>"
        )
    return text, flags


def _apart(text: str, split_hyphens: bool) -> str:
    return text.replace("-", " ") if split_hyphens else text
