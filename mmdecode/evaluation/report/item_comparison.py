"""Comparison of two modes on the same questions: differences, intervals and flipped answers.

Differences are second minus first. Where a mode has several seeds, its counts are added up over
them question by question, and images are resampled with all their questions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mmdecode.evaluation.report.layout import number, without_empty
from mmdecode.evaluation.stats.intervals import (
    bootstrap_p,
    bootstrap_sums,
    holm,
    interval,
    mcnemar,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference of one number.

    Attributes:
        value: Second minus first.
        low, high: 95 % interval, by bootstrap over images.
        p: Two-sided p-value from the same bootstrap samples.
    """

    value: float
    low: float
    high: float
    p: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flips:
    """Questions that only one of two modes has right, by the right answer.

    Attributes:
        gained: Only the second has them right.
        lost: Only the first has them right.
        p: P-value of McNemar's exact test, over all of them.
        p_by_target: The same for each right answer alone.
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
    """Two modes on one set.

    Attributes:
        first, second: Their names.
        within: Name of the set.
        differences: Differences by name; the first is the one that is tested.
        flips: ``None``: one of the modes has several seeds, or nothing is right or wrong.
        p_holm: P-value of the flips, else of the first difference, corrected for the comparisons
            made together; ``None``: it was made alone.
    """

    first: str
    second: str
    within: str
    differences: dict[str, Difference]
    flips: Flips | None
    p_holm: float | None = None

    @property
    def p(self) -> float:
        """P-value of the flips, else of the first difference."""
        return self.flips.p if self.flips else next(iter(self.differences.values())).p

    def __str__(self) -> str:
        name, found = next(iter(self.differences.items()))
        corrected = "" if self.p_holm is None else f", {self.p_holm:.4f} by Holm"
        others = [
            f"{other} {100 * one.value:+.2f} [{100 * one.low:+.2f}, {100 * one.high:+.2f}]"
            for other, one in list(self.differences.items())[1:]
        ]
        flips = [str(self.flips)] if self.flips else []
        return "; ".join(
            [
                f"{self.second} against {self.first}, {self.within}: {name} "
                f"{100 * found.value:+.2f} points [{100 * found.low:+.2f}, "
                f"{100 * found.high:+.2f}], p = {self.p:.4f}{corrected}",
                *others,
                *flips,
            ]
        )


def differences(
    first: np.ndarray,
    second: np.ndarray,
    images: Sequence[str],
    rates: Callable[[np.ndarray], Mapping[str, np.ndarray]],
    names: Sequence[str],
    resamples: int,
    seed: int,
) -> dict[str, Difference]:
    """Differences of rates, by a paired bootstrap over images.

    Args:
        first: ``(items, columns)`` counts.
        second: The same of the second.
        images: The image of each item.
        rates: From summed counts to numbers by name.
        names: Names of the numbers to compare.
        resamples: Bootstrap draws.
        seed: Seed of the bootstrap.
    """
    width = first.shape[1]
    table = np.concatenate([first, second], 1)
    resampled = bootstrap_sums(table, images, resamples, seed)
    before, after = rates(resampled[:, :width]), rates(resampled[:, width:])
    was, now = rates(first.sum(0)), rates(second.sum(0))
    return {name: difference(now[name] - was[name], after[name] - before[name]) for name in names}


def difference(value: float | np.ndarray, draws: np.ndarray) -> Difference:
    """A difference and its draws."""
    low, high = interval(draws)
    return Difference(value=float(value), low=low, high=high, p=bootstrap_p(draws))


def flips(first: np.ndarray, second: np.ndarray, targets: Sequence[str]) -> Flips:
    """Counts of flips.

    Args:
        first: ``(items,)``, whether the first mode is right.
        second: The same of the second.
        targets: The right answers.
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
    """Comparisons as rows of text, differences in points; columns without a value are left out."""
    names = list(dict.fromkeys(name for one in found for name in one.differences))
    rows = []
    for one in found:
        changed = ""
        if one.flips:
            changed = f"+{sum(one.flips.gained.values())} -{sum(one.flips.lost.values())}"
        shown = {
            name: f"{100 * known.value:+.2f} [{100 * known.low:+.2f}, {100 * known.high:+.2f}]"
            for name, known in one.differences.items()
        }
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
    """Comparisons made together, with their p-values corrected for their number (Holm)."""
    adjusted = holm([one.p for one in found])
    return [dataclasses.replace(one, p_holm=p) for one, p in zip(found, adjusted, strict=True)]
