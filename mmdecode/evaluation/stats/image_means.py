"""Means over images: intervals, tests of difference, and tests of equivalence.

Conditions of images are chosen, not sampled, so an interval holds for these conditions only.

Source: Welch 1947; Schuirmann 1987 for two one-sided tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmdecode.errors import MissingExtraError, OptionError, ShapeError
from mmdecode.evaluation.stats.intervals import LEVEL

MARGIN = 0.01
"""Equivalence margin: relative difference of likelihoods."""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean over images whose conditions were chosen, not sampled.

    Attributes:
        value, low, high: The mean and its 95 % interval.
        error: Standard error, from the spread within conditions.
        freedom: Its degrees of freedom.
        count: Images.
    """

    value: float
    low: float
    high: float
    error: float
    freedom: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Welch:
    """Welch's test of two means.

    Attributes:
        difference: Second minus first.
        low, high: 95 % interval.
        t, freedom, p: The statistic, its degrees of freedom and two-sided p-value.
    """

    difference: float
    low: float
    high: float
    t: float
    freedom: float
    p: float


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Two one-sided tests at 5 %: is a ratio of means within the margin?

    Attributes:
        ratio: Second over first.
        low, high: 90 % interval.
        margin: Largest distance from 1 that counts as equivalent.
        shown: Whether the whole interval lies within it.
    """

    ratio: float
    low: float
    high: float
    margin: float
    shown: bool


def mean_of(values: np.ndarray, strata: Sequence[Any] | None = None) -> Mean:
    """The mean of one value per image, with its interval.

    Args:
        values: ``(n,)``.
        strata: Condition of each image, where conditions were chosen beforehand: differences
            between conditions then do not count as uncertainty. Ignored where conditions hardly
            repeat.

    Raises:
        OptionError: There are fewer than two images.
    """
    values = np.asarray(values, dtype=np.float64)
    if len(values) < 2:
        raise OptionError(f"{len(values)} images; an interval needs two")
    stratum_of = strata_of(len(values), strata)
    sizes = np.bincount(stratum_of)
    if 2 * len(sizes) > len(values):
        stratum_of, sizes = np.zeros_like(stratum_of), np.array([len(values)])
    centres = np.bincount(stratum_of, values) / sizes
    freedom = len(values) - len(sizes)
    spread = float(((values - centres[stratum_of]) ** 2).sum() / freedom)
    error, value = math.sqrt(spread / len(values)), float(values.mean())
    half = _quantile(LEVEL, freedom) * error
    return Mean(
        value=value,
        low=value - half,
        high=value + half,
        error=error,
        freedom=freedom,
        count=len(values),
    )


def welch(first: Mean, second: Mean) -> Welch:
    """Welch's test of whether two means differ."""
    errors = first.error**2, second.error**2
    error, difference = math.sqrt(sum(errors)), second.value - first.value
    if not error:
        p = float(difference == 0)
        return Welch(difference=difference, low=difference, high=difference, t=0, freedom=1, p=p)
    freedom = _shared_freedom(first, second, errors)
    t, half = difference / error, _quantile(LEVEL, freedom) * error
    return Welch(
        difference=difference,
        low=difference - half,
        high=difference + half,
        t=t,
        freedom=freedom,
        p=float(2 * scipy_parts().special.stdtr(freedom, -abs(t))),
    )


def equivalence(first: Mean, second: Mean, margin: float = MARGIN) -> Equivalence:
    """Whether two means of one sign are as good as the same.

    The interval is that of the logarithm of their ratio, by the delta method.

    Args:
        first: The baseline.
        second: The other mode.
        margin: See `Equivalence`.

    Raises:
        OptionError: A mean is 0, or they have different signs.
    """
    if not first.value * second.value > 0:
        raise OptionError(f"no ratio of {first.value} and {second.value} is of use")
    ratio = second.value / first.value
    errors = (first.error / first.value) ** 2, (second.error / second.value) ** 2
    if not sum(errors):
        return Equivalence(
            ratio=ratio, low=ratio, high=ratio, margin=margin, shown=abs(ratio - 1) <= margin
        )
    half = _quantile(0.9, _shared_freedom(first, second, errors)) * math.sqrt(sum(errors))
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    shown = 1 - margin <= low and high <= 1 + margin
    return Equivalence(ratio=ratio, low=low, high=high, margin=margin, shown=shown)


def _shared_freedom(first: Mean, second: Mean, errors: tuple[float, float]) -> float:
    """Degrees of freedom of a sum of two variances (Welch and Satterthwaite)."""
    return sum(errors) ** 2 / (errors[0] ** 2 / first.freedom + errors[1] ** 2 / second.freedom)


def _quantile(level: float, freedom: float) -> float:
    """P-value of Student's t, two-sided."""
    return float(scipy_parts().special.stdtrit(freedom, (1 + level) / 2))


def strata_of(count: int, strata: Sequence[Any] | None) -> np.ndarray:
    """Number of each image's stratum, ``(count,)``; one for all without strata.

    Raises:
        ShapeError: There are not as many conditions as images.
    """
    if strata is None:
        return np.zeros(count, dtype=np.int64)
    if len(strata) != count:
        raise ShapeError(f"{len(strata)} conditions for {count} images; give one for each")
    return np.unique(np.asarray(strata, dtype=str), return_inverse=True)[1]


def scipy_parts() -> Any:
    """The library, with the parts that are used here.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import scipy.cluster.vq
        import scipy.sparse
        import scipy.special
        import scipy.stats
    except ImportError as error:
        raise MissingExtraError("tests of samples need scipy", extra="eval") from error
    return scipy
