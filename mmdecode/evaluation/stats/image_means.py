"""Means over images: intervals, tests of difference, and tests of equivalence.

The conditions of images (such as their classes) are fixed by the user, not sampled, so an interval
holds for these conditions only.

Source: Welch 1947; Schuirmann 1987 for two one-sided tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmdecode.errors import MissingExtraError, OptionError, ShapeError
from mmdecode.evaluation.stats.intervals import LEVEL, Estimate

MARGIN = 0.01
"""Default margin of `equivalence`: largest relative difference of two mean likelihoods."""


@dataclass(frozen=True, kw_only=True)
class Mean(Estimate):
    """A mean over images, for fixed conditions.

    Attributes:
        error: Standard error, from the variance within conditions.
        freedom: Degrees of freedom of the standard error: images minus conditions.
        count: Number of images.
    """

    error: float
    freedom: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Two one-sided tests at 5 % of whether the ratio of two means is near 1.

    Attributes:
        ratio: Second mean over first mean.
        low, high: 90 % interval of the ratio.
        margin: Largest distance of the ratio from 1 that counts as equivalent.
        shown: Whether the whole interval lies within ``margin`` of 1: equivalence is shown.
    """

    ratio: float
    low: float
    high: float
    margin: float
    shown: bool


def mean_of(values: np.ndarray, strata: Sequence[Any] | None = None) -> Mean:
    """Computes the mean of one value per image, with its interval.

    Args:
        values: Value of each image, ``(n,)``.
        strata: Fixed condition of each image; differences between conditions then do not widen the
            interval. Ignored if there are fewer than two images per condition on average.

    Raises:
        OptionError: There are fewer than two images.
    """
    values = np.asarray(values, dtype=np.float64)
    if len(values) < 2:
        raise OptionError(f"the interval of a mean needs two images, and there are {len(values)}")
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


def welch(first: Mean, second: Mean) -> float:
    """Returns the two-sided p-value of Welch's test of whether two means differ."""
    errors = first.error**2, second.error**2
    error, difference = math.sqrt(sum(errors)), second.value - first.value
    if not error:
        return float(difference == 0)
    freedom = _shared_freedom(first, second, errors)
    return float(2 * scipy_parts().special.stdtr(freedom, -abs(difference / error)))


def equivalence(first: Mean, second: Mean, margin: float = MARGIN) -> Equivalence:
    """Tests whether two means of the same sign are equal within a margin.

    The interval of the ratio is computed for its logarithm, by the delta method.

    Args:
        first: Mean of the baseline.
        second: Mean of the mode that is compared with it.
        margin: Largest distance of their ratio from 1 that counts as equivalent.

    Raises:
        OptionError: A mean is 0, or they have different signs.
    """
    if not first.value * second.value > 0:
        raise OptionError(
            f"the ratio of means {first.value} and {second.value} cannot be tested; expected two "
            "means of the same sign, neither 0"
        )
    ratio = second.value / first.value
    errors = (first.error / first.value) ** 2, (second.error / second.value) ** 2
    half = 0.0
    if sum(errors):
        half = _quantile(0.9, _shared_freedom(first, second, errors)) * math.sqrt(sum(errors))
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    shown = 1 - margin <= low and high <= 1 + margin
    return Equivalence(ratio=ratio, low=low, high=high, margin=margin, shown=shown)


def _shared_freedom(first: Mean, second: Mean, errors: tuple[float, float]) -> float:
    """Degrees of freedom of the sum of two squared errors (Welch and Satterthwaite)."""
    return sum(errors) ** 2 / (errors[0] ** 2 / first.freedom + errors[1] ** 2 / second.freedom)


def _quantile(level: float, freedom: float) -> float:
    """Two-sided quantile of Student's t: ``|t|`` is below it with probability ``level``."""
    return float(scipy_parts().special.stdtrit(freedom, (1 + level) / 2))


def strata_of(count: int, strata: Sequence[Any] | None) -> np.ndarray:
    """Returns the index of each image's stratum, ``(count,)``; without strata all are 0.

    Raises:
        ShapeError: There are not as many conditions as images.
    """
    if strata is None:
        return np.zeros(count, dtype=np.int64)
    if len(strata) != count:
        raise ShapeError(f"{len(strata)} conditions for {count} images; expected one per image")
    return np.unique(np.asarray(strata, dtype=str), return_inverse=True)[1]


def scipy_parts() -> Any:
    """Imports scipy, whose submodules are imported when they are used.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    with MissingExtraError.instead("tests of samples need scipy", extra="eval"):
        import scipy
    return scipy
