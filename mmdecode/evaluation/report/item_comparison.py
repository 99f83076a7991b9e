"""Comparison of two modes on the same questions: differences, intervals and flipped answers.

Differences are second mode minus first mode. If a mode has several seeds, its counts are summed
over the seeds for each question. The bootstrap resamples images with all their questions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mmdecode.evaluation.report.layout import number, without_empty
from mmdecode.evaluation.stats.intervals import (
    Estimate,
    bootstrap_p,
    bootstrap_sums,
    holm,
    interval,
    mcnemar,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference(Estimate):
    """Score of the second mode minus score of the first, with a bootstrap interval over images.

    Attributes:
        p: Two-sided p-value from the same bootstrap samples.
    """

    p: float

    def points(self, form: str = "+.2f", unit: str = "") -> str:
        """The difference with its interval in percentage points, as text."""
        value, low, high = (format(100 * end, form) for end in (self.value, self.low, self.high))
        return f"{value}{unit} [{low}, {high}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flips:
    """Numbers of questions that only one of two modes has right, by the right answer.

    Attributes:
        gained: Questions that only the second mode has right, for each right answer.
        lost: Questions that only the first mode has right, for each right answer.
        p: P-value of McNemar's exact test over all questions.
        p_by_target: P-value of the test over the questions with each right answer.
    """

    gained: dict[str, int]
    lost: dict[str, int]
    p: float
    p_by_target: dict[str, float]

    def __str__(self) -> str:
        parts = [f"{name} +{self.gained[name]} -{self.lost[name]}" for name in self.gained]
        return f"flips {', '.join(parts)}, McNemar p = {self.p:.4f}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ItemComparison:
    """Comparison of two modes on one question set.

    Attributes:
        first, second: Names of the modes.
        within: Name of the question set.
        differences: Differences by name of the score; the first is the main one.
        flips: Questions that only one of the modes has right; ``None``: a mode has several seeds,
            or answers are not right or wrong, as for captions.
        p_holm: ``p``, corrected by Holm for all comparisons of the report; ``None``: not corrected.
    """

    first: str
    second: str
    within: str
    differences: dict[str, Difference]
    flips: Flips | None
    p_holm: float | None = None

    @property
    def main(self) -> tuple[str, Difference]:
        """The main difference, with its name."""
        return next(iter(self.differences.items()))

    @property
    def p(self) -> float:
        """P-value of the flips or, without flips, of the main difference."""
        return self.flips.p if self.flips else self.main[1].p

    @property
    def corrected(self) -> float:
        """``p_holm`` or, if it is not known, ``p``."""
        return self.p if self.p_holm is None else self.p_holm

    def __str__(self) -> str:
        (name, first), *others = self.differences.items()
        corrected = "" if self.p_holm is None else f", {self.p_holm:.4f} by Holm"
        parts = [
            f"{self.second} against {self.first}, {self.within}: {name} "
            f"{first.points(unit=' points')}, p = {self.p:.4f}{corrected}",
            *(f"{other} {one.points()}" for other, one in others),
        ]
        return "; ".join([*parts, str(self.flips)] if self.flips else parts)


def differences(
    first: np.ndarray,
    second: np.ndarray,
    images: Sequence[str],
    rates: Callable[[np.ndarray], Mapping[str, np.ndarray]],
    names: Sequence[str],
    resamples: int,
    seed: int,
) -> dict[str, Difference]:
    """Computes differences of rates between two modes, by a paired bootstrap over images.

    Args:
        first: Counts of the first mode for each item, ``(items, columns)``.
        second: Counts of the second mode, ``(items, columns)``.
        images: Image of each item.
        rates: Function from summed counts to rates by name.
        names: Names of the rates to compare.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.
    """
    width = first.shape[1]
    table = np.concatenate([first, second], 1)
    resampled = bootstrap_sums(table, images, resamples, seed)
    before, after = rates(resampled[:, :width]), rates(resampled[:, width:])
    was, now = rates(first.sum(0)), rates(second.sum(0))
    return {name: difference(now[name] - was[name], after[name] - before[name]) for name in names}


def difference(value: float | np.ndarray, draws: np.ndarray) -> Difference:
    """Makes a `Difference` from a value and its bootstrap draws."""
    low, high = interval(draws)
    return Difference(value=float(value), low=low, high=high, p=bootstrap_p(draws))


def flips(first: np.ndarray, second: np.ndarray, targets: Sequence[str]) -> Flips:
    """Counts questions that only one of two modes has right.

    Args:
        first: Whether the first mode's answer to each question is right, ``(items,)``.
        second: Whether the second mode's answer to each question is right, ``(items,)``.
        targets: Right answer to each question.
    """
    of = np.asarray(targets)
    gained = {name: int((~first & second & (of == name)).sum()) for name in np.unique(of).tolist()}
    lost = {name: int((first & ~second & (of == name)).sum()) for name in gained}
    return Flips(
        gained=gained,
        lost=lost,
        p=mcnemar(sum(gained.values()), sum(lost.values())),
        p_by_target={name: mcnemar(gained[name], lost[name]) for name in gained},
    )


def compared_rows(found: Sequence[ItemComparison]) -> list[dict[str, str]]:
    """Table of comparisons, with differences in percentage points; empty columns are left out."""
    names = list(dict.fromkeys(name for one in found for name in one.differences))
    rows = []
    for one in found:
        changed = ""
        if one.flips:
            changed = f"+{sum(one.flips.gained.values())} -{sum(one.flips.lost.values())}"
        shown = {name: known.points() for name, known in one.differences.items()}
        rows.append(
            {
                "mode": one.second,
                "against": one.first,
                "set": one.within,
                names[0]: shown[names[0]],
                "p": f"{one.p:.4f}",
                "p by Holm": number(one.p_holm, ".4f"),
                "flips": changed,
                **{name: shown.get(name, "") for name in names[1:]},
            }
        )
    return without_empty(rows)


def corrected(found: Sequence[ItemComparison]) -> list[ItemComparison]:
    """Returns the comparisons with ``p_holm``: p-values corrected for multiple tests (Holm)."""
    adjusted = holm([one.p for one in found])
    return [dataclasses.replace(one, p_holm=p) for one, p in zip(found, adjusted, strict=True)]
