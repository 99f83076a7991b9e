"""PIER (point-of-interest error rate): the error rate of chosen words, such as foreign words.

``PIER = (S + D + I) / (H + S + D)`` for S substitutions, D deletions, I insertions and H hits of
the points of interest: reference words that are chosen by tags, ``das <tag meeting> ist heute``, or
by their script, such as Latin words in an Arabic sentence. The alignment is that of the word error
rate. An insertion counts for the reference word after it, or at the end of a sentence for the last
word. The same rate is computed for all other words, the rest; insertions in a sentence with an
empty reference count there. The errors of the points of interest and of the rest add up to the
errors of the word error rate. In scripts without spaces each character counts as a word, unless
``segmented`` is set.

Source: Ugan et al. 2025, PIER, with the rules of its code (enesyugan/PIER-CodeSwitching-Evaluation)
except for three: that code drops sentences that consist of points of interest only, or have none;
it applies word indices of the raw reference to the normalised reference, although the normaliser
may drop words; and it splits references into characters to find the points of interest, but not for
the alignment.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.speech.normalisers import Normaliser, normaliser_of
from mmdecode.evaluation.speech.scripts import script, units
from mmdecode.evaluation.speech.wer import Step, align_units, paired_units
from mmdecode.evaluation.stats.intervals import ratio_interval

TAGS = "tags"
SCRIPTS = {
    **{name: name.upper() for name in "latin greek cyrillic armenian hebrew arabic".split()},
    **{name: name.upper() for name in "devanagari bengali tamil thai hangul".split()},
    **{name: name.upper() for name in "hiragana katakana ethiopic georgian".split()},
    "han": "CJK",
}
"""Scripts that select points of interest: first word of their Unicode names, by option value."""
COLUMNS = ("hits", "substitutions", "deletions", "insertions")
_TAG = re.compile(r"<tag\s+([^<>]*)>")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Counts over the reference words of one kind: points of interest, or the rest.

    Attributes:
        hits, substitutions, deletions: Number of reference words with each outcome.
        insertions: Number of inserted words that count for these words, see the module.
    """

    hits: int
    substitutions: int
    deletions: int
    insertions: int

    @property
    def words(self) -> int:
        """Number of reference words."""
        return self.hits + self.substitutions + self.deletions

    @property
    def errors(self) -> int:
        """Number of substitutions, deletions and insertions."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def value(self) -> float | None:
        """Errors over words, which may be more than 1; ``None``: there is no word."""
        return self.errors / self.words if self.words else None


@dataclass(frozen=True, kw_only=True)
class PIER:
    """Point-of-interest error rate of a corpus, see `pier`.

    Attributes:
        interest: Counts over the points of interest.
        rest: Counts over all other words.
        low, high: 95 % interval of the rate, by bootstrap over utterances or groups; ``None``:
            there is no point of interest.
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
    **resampling: Any,
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
        **resampling: Groups, resamples and seed of the interval, see `ratio_interval`.

    Raises:
        OptionError: References and hypotheses differ in number or are empty, or the scorer is
            ``sclite``.
        UnknownNameError: ``points`` or the normaliser is unknown.
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
        low, high = ratio_interval(both, **resampling)
    return PIER(interest=interest, rest=rest, low=low, high=high, points=points)


def refuse_points(points: str, scorer: str) -> None:
    """Checks the kind of points of interest, and that the scorer can be used with it.

    Raises:
        UnknownNameError: ``points`` is neither ``tags`` nor one of `SCRIPTS`.
        OptionError: The scorer is ``sclite``, which chooses among alternatives of a reference, so
            that word positions are not fixed.
    """
    if points != TAGS and points not in SCRIPTS:
        raise UnknownNameError.of("points of interest", points, (TAGS, *SCRIPTS))
    if scorer == "sclite":
        raise OptionError(
            "points of interest need fixed word positions, and scorer 'sclite' chooses among "
            "alternatives of a reference; use scorer 'plain' or 'merge'"
        )


def is_tagged(reference: str) -> bool:
    """Whether a reference has tagged spans."""
    return "<tag" in reference


def untagged(reference: str) -> str:
    """Returns the text of a reference without its tags.

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
    """Splits a reference into normalised units (words or characters) and marks points of interest.

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
    marked: list[bool] = []
    matcher = SequenceMatcher(None, [part for part, _ in single], found, autojunk=False)
    for kind, first, last, begin, end in matcher.get_opcodes():
        own = [flag for _, flag in single[first:last]]
        marked += own if kind == "equal" else [any(own)] * (end - begin)
    return found, marked


def count_points(steps: Sequence[Step], marked: Sequence[bool]) -> list[int]:
    """Counts hits, substitutions, deletions and insertions of points of interest, then of the rest.

    Args:
        steps: Alignment of a reference and a hypothesis.
        marked: Whether each reference word is a point of interest.
    """
    counts: Counter[tuple[bool, str]] = Counter()
    names = {"equal": "hits", "substitute": "substitutions", "delete": "deletions"}
    index = 0
    for step in steps:
        if step.kind == "insert":
            owner = bool(marked) and marked[min(index, len(marked) - 1)]
            counts[owner, "insertions"] += 1
            continue
        for _ in step.reference.split():
            counts[marked[index], names[step.kind]] += 1
            index += 1
    return [counts[owner, name] for owner in (True, False) for name in COLUMNS]


def _untagged(reference: str) -> tuple[str, list[bool]]:
    """The text without tags, and whether each of its characters was inside a tag."""
    parts = _TAG.split(reference)  # those at odd positions are inside a tag
    text = "".join(parts)
    if is_tagged(text):
        raise InputError(
            f"a tag in a reference is not closed, or contains another tag: {reference[:80]!r}; "
            "expected <tag word> or <tag several words>"
        )
    return text, [bool(number % 2) for number, part in enumerate(parts) for _ in part]


def _apart(text: str, split_hyphens: bool) -> str:
    return text.replace("-", " ") if split_hyphens else text
