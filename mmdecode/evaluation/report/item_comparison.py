"""Comparison of modes on the same questions: differences, flipped answers, and the verdict.

Differences are second mode minus first mode. If a mode has several seeds, its counts are summed
over the seeds for each question. The bootstrap resamples images with all their questions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.evaluation.report.layout import number, without_empty
from mmdecode.evaluation.stats.intervals import (
    Estimate,
    bootstrap_p,
    holm,
    interval,
    mcnemar,
)

if TYPE_CHECKING:
    from mmdecode.evaluation.report.item_report import ItemReport

LEVEL = 0.05
"""A difference counts as shown if its corrected p-value is below this level."""
_LISTED = 3  # names of methods in the first sentence of a verdict


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


def verdict_of(report: ItemReport[Any]) -> list[str]:
    """The sentences of `ItemReport.verdict`."""
    baseline = report.modes[0]
    judged = [one for one in report.recorded_modes[1:] if one not in report.controls]
    sets = list(report.sets)
    hardest = min(sets, key=lambda name: report.level(baseline, name))
    where = f" in {hardest}, where it scores lowest" if len(sets) > 1 else ""
    plain = f"{baseline}{where}: {report.summary_line(baseline, hardest)}."
    if not judged:
        return [plain]
    found = {mode: _judged(report, mode, sets, hardest) for mode in judged}
    helping = [mode for mode, (helps, _) in found.items() if helps]
    if helping:
        more = f" and {len(helping) - _LISTED} more" if len(helping) > _LISTED else ""
        names = "; ".join(helping[:_LISTED])
        first = f"{len(helping)} of {len(judged)} methods help: {names}{more}"
    elif len(judged) == 1:
        first = f"{judged[0]} is not shown to help"
    else:
        first = f"None of the {len(judged)} methods is shown to help"
    tests = len(report.comparisons)
    several = "s" * (tests > 1)
    basis = f" (p below {LEVEL} after Holm's correction for {tests} comparison{several})"
    return [f"{first}{basis}.", plain, *(line for _, line in found.values())]


def _judged(
    report: ItemReport[Any], mode: str, sets: Sequence[str], hardest: str
) -> tuple[bool, str]:
    """Decides whether a method helps, and describes its result in a sentence or two."""
    baseline, *controls = report.against(mode)
    rivals = [(control, mode) for control in controls]
    if mode in report.paired:
        rivals.append(report.paired[mode])
    known = {(one.first, one.second, one.within): one for one in report.comparisons}
    signs = {key: _sign(one, report.gain) for key, one in known.items()}
    better = [name for name in sets if signs[baseline, mode, name] > 0]
    worse = [name for name in sets if signs[baseline, mode, name] < 0]
    unbeaten = {name: [pair for pair in rivals if signs[*pair, name] <= 0] for name in sets}
    helps = [name for name in better if not unbeaten[name]]
    if helps:
        others = " and than every control" if rivals else ""
        finding = f"better than {baseline}{others}{_within(helps, sets)}"
    elif better:
        names = "; ".join(sorted({_rival(p, mode) for name in better for p in unbeaten[name]}))
        finding = f"better than {baseline}{_within(better, sets)}, but not than {names}"
    else:
        finding = "" if worse else f"no difference from {baseline} shown"
    if worse:
        finding += f"{', ' * bool(finding)}worse than {baseline}{_within(worse, sets)}"
    where = f"{hardest}: " if len(sets) > 1 else ""
    overall = known[baseline, mode, hardest]
    parts = [
        f"{mode}: {finding}. {where}{report.summary_line(mode, hardest)}",
        f"against {baseline} {overall.main[0]} {_points(overall)}, p = {overall.corrected:.3f}",
    ]
    if rivals:
        held = [f"against {_rival(p, mode)} {_points(known[*p, hardest])}" for p in rivals]
        parts.append(", ".join(held))
    return bool(helps), "; ".join(parts) + "."


def _sign(found: ItemComparison, gain: int) -> int:
    """Returns 1 if a gain is shown, -1 if a loss is shown, and 0 otherwise."""
    value = gain * found.main[1].value
    return 0 if found.corrected >= LEVEL or not value else 1 if value > 0 else -1


def _rival(pair: tuple[str, str], mode: str) -> str:
    """Name of the control in a pair; if not the mode but its copy is compared, both are named."""
    return pair[0] if pair[1] == mode else f"{pair[0]} (as {pair[1]})"


def _within(names: Sequence[str], sets: Sequence[str]) -> str:
    if len(sets) == 1:
        return ""
    return " in all sets" if len(names) == len(sets) else f" in {', '.join(names)}"


def _points(found: ItemComparison) -> str:
    return found.main[1].points("+.1f", " points")
