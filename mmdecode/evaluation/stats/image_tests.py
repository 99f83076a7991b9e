"""Tests of two samples of images: of their means, of equivalence, and of histograms of codes.

The conditions of images (such as their classes) are fixed by the user, not sampled, so the interval
of a mean holds for these conditions only. A permutation test compares histograms of codes, which
are indices into a codebook on a grid: of the code at each grid position, or of pairs of neighbours
(`neighbours`). A table is one such histogram, and a cell is one entry of it.

Source: Welch 1947; Schuirmann 1987 for two one-sided tests.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdecode.errors import MissingExtraError, OptionError, ShapeError
from mmdecode.evaluation.stats.intervals import LEVEL, Estimate

MARGIN = 0.01
"""Default margin of `equivalence`: largest relative difference of two mean likelihoods."""
LEAST = 5
"""Expected count below which a cell of a table is pooled with others."""
PERMUTATIONS = 999
_TAIL = 20  # permutations beyond the observed value that are enough to count
_AT_ONCE = 1 << 22  # counts held in memory together


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


@dataclass(frozen=True, kw_only=True)
class TwoSample:
    """Result of `two_sample`: whether two samples of images have the same histograms.

    Attributes:
        g: G-statistic, summed over all tables.
        expected: Mean of ``g`` under random assignment of images to the samples.
        p: P-value by permutation of images: twice the smaller (Bonferroni) of the p-values of
            ``g`` and of the largest standardised G of a single table.
        worst: Index of the table with the largest standardised G.
        cells: Number of cells of all tables after pooling.
        pooled: Share of all counts that fell into pooled cells, 0..1.
    """

    g: float
    expected: float
    p: float
    worst: int
    cells: int
    pooled: float


def two_sample(
    first: np.ndarray,
    second: np.ndarray,
    strata: tuple[Sequence[Any], Sequence[Any]] | None = None,
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> TwoSample:
    """Compares histograms by a G-test whose null distribution comes from permuted images.

    Codes of one image are dependent, so a chi-square test would reject too often when the samples
    have the same distribution; permuting whole images is valid. In each table, the cells with an
    expected count below `LEAST` in either sample are pooled into one.

    Args:
        first: Values (small integers) that each image contributes to each histogram,
            ``(n, tables, entries)``: codes ``(n, positions, 1)``, or those of `neighbours`.
        second: The same for the other sample, ``(m, tables, entries)``.
        strata: Condition, such as the class, of each image in ``first`` and in ``second``: images
            are then permuted within a condition only. ``None``: among all images.
        permutations: Number of permutations.
        seed: Seed of the permutations.

    Raises:
        ShapeError: The samples differ in the number of tables or of entries.
        MissingExtraError: scipy is not installed.
    """
    if first.shape[1:] != second.shape[1:]:
        raise ShapeError(
            f"the samples have histograms of shape {first.shape[1:]} and {second.shape[1:]}; "
            "expected the same shape"
        )
    both = np.concatenate([first, second]).astype(np.int64)
    table, starts, pooled = _cells(both, len(first), len(second))
    stratum_of = strata_of(len(both), None if strata is None else [*strata[0], *strata[1]])
    random = np.random.default_rng(seed)
    step = max(1, _AT_ONCE // table.shape[1])
    own = (np.arange(len(both)) < len(first)).astype(np.float32)
    observed = _g(own[None], table, starts)[0]
    counts = [min(step, permutations - start) for start in range(0, permutations, step)]
    null = np.concatenate([_g(_dealt(own, stratum_of, n, random), table, starts) for n in counts])
    centre, spread = null.mean(0), np.maximum(null.std(0), 1e-9)
    heights = (observed - centre) / spread
    g, sums = float(observed.sum()), null.sum(1)
    by_sum = min(_share(g, sums), _gamma_tail(g, sums))
    by_table = _share(float(heights.max()), ((null - centre) / spread).max(1))
    return TwoSample(
        g=g,
        expected=float(sums.mean()),
        p=by_sum if len(observed) == 1 else min(1.0, 2 * min(by_sum, by_table)),
        worst=int(heights.argmax()),
        cells=table.shape[1],
        pooled=pooled,
    )


def neighbours(codes: np.ndarray, groups: np.ndarray, down: int = 0) -> np.ndarray:
    """Input of `two_sample` for histograms of pairs of neighbouring codes.

    Each code is replaced by its group, and each pair of groups has a number.

    Args:
        codes: Codes of each image, ``(n, rows, columns)``.
        groups: Group of each code, ``(V,)``; see `code_groups`.
        down: 0: each code is paired with the code to its right, one histogram per pair of columns;
            1: with the code below it, one histogram per pair of rows.

    Returns:
        Numbers that identify the pairs: ``(n, columns - 1, rows)``, or with ``down``
        ``(n, rows - 1, columns)``.
    """
    kinds = groups[codes]
    if down:
        return kinds[:, :-1] * (groups.max() + 1) + kinds[:, 1:]
    pairs = kinds[:, :, :-1] * (groups.max() + 1) + kinds[:, :, 1:]
    return pairs.transpose(0, 2, 1)


def _cells(both: np.ndarray, first: int, second: int) -> tuple[Any, np.ndarray, float]:
    """Counts by image and cell, index of the first cell of each table, pooled share of counts."""
    count, tables, entries = both.shape
    width = int(both.max()) + 1
    keys = both + width * np.arange(tables)[:, None]
    used, cell = np.unique(keys, return_inverse=True)
    cell = cell.reshape(both.shape)
    totals = np.bincount(cell.ravel())
    rare = totals * min(first, second) / (first + second) < LEAST
    table_of = used // width
    # kept cells stay apart, rare ones become one per table, which comes first in it
    label = np.where(rare, table_of * (width + 1), used + table_of + 1)
    _, merged = np.unique(label, return_inverse=True)
    cell = merged[cell]
    image = np.repeat(np.arange(count), tables * entries)
    shape = (count, int(merged.max()) + 1)
    data = np.ones(cell.size, dtype=np.float32)
    counts = scipy_parts().sparse.csr_matrix((data, (image, cell.ravel())), shape=shape)
    owner = np.zeros(shape[1], dtype=np.int64)
    owner[merged] = table_of
    starts = np.searchsorted(owner, np.arange(tables))
    return counts, starts, float(totals[rare].sum() / totals.sum())


def _dealt(
    labels: np.ndarray, stratum_of: np.ndarray, count: int, random: np.random.Generator
) -> np.ndarray:
    """Random permutations of ``labels`` within strata, ``(count, images)``."""
    order = np.argsort(stratum_of, kind="stable")
    noise = random.random((count, len(labels)), dtype=np.float32)
    # sorting by stratum first and noise second shuffles within strata
    shuffled = np.argsort(stratum_of[None] + noise.astype(np.float64), axis=1, kind="stable")
    dealt = np.empty((count, len(labels)), dtype=np.float32)
    np.put_along_axis(dealt, shuffled, np.broadcast_to(labels[order], dealt.shape), 1)
    return dealt


def _g(labels: np.ndarray, table: Any, starts: np.ndarray) -> np.ndarray:
    """G of each table, ``(draws, tables)``, for images with label 1 against those with label 0."""
    first = np.asarray(labels @ table, dtype=np.float64)
    total = np.asarray(table.sum(0), dtype=np.float64)
    entropy = scipy_parts().special.entr  # -x log x
    cells = entropy(total) - entropy(first) - entropy(total - first)
    sums = np.add.reduceat(np.stack([first, np.broadcast_to(total, first.shape)]), starts, axis=2)
    margins = entropy(sums[1]) - entropy(sums[0]) - entropy(sums[1] - sums[0])
    return 2 * (np.add.reduceat(cells, starts, axis=1) - margins)


def _share(observed: float, null: np.ndarray) -> float:
    """Permutation p-value: share of permutations whose statistic is at least ``observed``."""
    beyond = int((null >= observed - 1e-9 * abs(observed)).sum())
    return (beyond + 1) / (len(null) + 1)


def _gamma_tail(observed: float, null: np.ndarray) -> float:
    """P-value by a gamma distribution that is fitted to the statistics of the permutations.

    A sum of G-statistics is approximately gamma distributed. Unlike counting, the fit can give
    p-values below ``1 / permutations``, which corrections for many comparisons need. It returns 1
    where at least 20 permutations exceed ``observed``, so that `_share` alone decides.
    """
    mean, variance = float(null.mean()), float(null.var())
    if not variance or (null >= observed).sum() >= _TAIL:
        return 1.0
    return float(scipy_parts().special.gammaincc(mean**2 / variance, observed * mean / variance))


def code_groups(codebook: Tensor, count: int = 16) -> Tensor:
    """Clusters codes by their embeddings with k-means, for `neighbours`.

    A histogram of pairs of groups has fewer cells than a histogram of pairs of codes, and therefore
    larger counts per cell.

    Args:
        codebook: Embedding of each code, ``(V, d)``.
        count: Number of groups; with at most that many codes, each code is its own group.

    Returns:
        Group of each code, ``(V,)``, numbered consecutively from 0.
    """
    if len(codebook) <= count:
        return torch.arange(len(codebook))
    points = codebook.detach().cpu().double().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of empty groups
        _, labels = scipy_parts().cluster.vq.kmeans2(points, count, minit="++", seed=0)
    return torch.from_numpy(np.unique(labels, return_inverse=True)[1])
