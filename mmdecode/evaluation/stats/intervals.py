"""Intervals and paired tests of error counts.

The bootstrap resamples the unit that was sampled: utterances, or speakers or recordings where they
are known (Bisani and Ney, 2004). Two systems are compared on the same items: by a bootstrap that
draws the same items for both systems, and by the matched-pairs sentence-segment word error test of
NIST (Gillick and Cox, 1989).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from mmdecode.errors import OptionError

if TYPE_CHECKING:
    from mmdecode.evaluation.speech.wer import Step

LEVEL = 0.95
RESAMPLES = 10_000
_TAIL = 20  # draws beyond zero that are enough to count
AT_ONCE = 1 << 22
"""Largest number of resampled units held in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number that is estimated from a sample.

    Attributes:
        value, low, high: The number and its 95 % interval.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """Test of whether the errors of two systems differ on average; see `paired_test`.

    Attributes:
        count: Number of differences: of segments or utterances.
        mean: Mean difference in errors, first system minus second; positive: the second makes
            fewer errors.
        sd: Standard deviation of the differences.
        z: Mean divided by its standard error; if all differences are equal, the normal quantile of
            ``p``.
        p: Two-sided p-value.
    """

    count: int
    mean: float
    sd: float
    z: float
    p: float


@dataclass(frozen=True, kw_only=True)
class PairedBootstrap:
    """Difference of two error rates on the same items.

    Attributes:
        difference: First rate minus second rate; positive: the second system makes fewer errors.
        low, high: 95 % interval of the difference.
        p_second_better: Share of resamples in which the second system has the lower rate.
    """

    difference: float
    low: float
    high: float
    p_second_better: float


def paired_test(differences: Sequence[int] | np.ndarray) -> PairedTest:
    """Tests whether differences are 0 on average, with sclite's formula.

    If all differences are equal, their variance is 0 and sclite's formula is undefined. A sign test
    replaces it: ``n`` equal signs have the p-value ``2 ** (1 - n)``, and z is the normal quantile
    of that p-value.

    Args:
        differences: Errors of the first system minus errors of the second, item by item.
    """
    values = np.asarray(differences, dtype=float)
    count = len(values)
    mean = float(values.mean()) if count else 0.0
    spread = float(((values - mean) ** 2).sum())
    if spread == 0:
        p = 0.5 ** (count - 1) if mean else 1.0
        z = math.copysign(NormalDist().inv_cdf(1 - p / 2), mean) if 0 < p < 1 else 0.0
        return PairedTest(count=count, mean=mean, sd=0.0, z=z, p=p)
    sd = math.sqrt(spread / (count - 1))
    z = mean / (sd / math.sqrt(count))
    return PairedTest(count=count, mean=mean, sd=sd, z=z, p=math.erfc(abs(z) / math.sqrt(2)))


def segments(
    first: Sequence[Step], second: Sequence[Step], between: int = 2
) -> list[tuple[int, int, int]]:
    """Cuts an utterance into segments with errors, as sclite's ``mtchprs.c`` does.

    A segment ends after ``between`` consecutive reference words that both systems have right,
    without an insertion among them. If the systems were aligned to different alternatives of the
    reference, with different numbers of words, the whole utterance is one segment.

    Args:
        first: Alignment of the first system with the reference.
        second: Alignment of the second system with the same reference.
        between: Number of correct words that separate two segments.

    Returns:
        ``(reference words, errors of the first, errors of the second)`` of each segment; the words
        include up to ``between`` correct words before its first error.
    """
    right_1, inserted_1 = _by_word(first)
    right_2, inserted_2 = _by_word(second)
    if len(right_1) != len(right_2):
        wrong_1, wrong_2 = (sum(s.kind != "equal" for s in steps) for steps in (first, second))
        whole = (len(right_1) + len(right_2)) // 2, wrong_1, wrong_2
        return [whole] if wrong_1 or wrong_2 else []
    found = []
    begin = good = wrong_1 = wrong_2 = 0
    words = zip(right_1, right_2, inserted_1, inserted_2, strict=False)
    for count, (is_right_1, is_right_2, before_1, before_2) in enumerate(words, 1):
        wrong_1 += before_1 + (not is_right_1)
        wrong_2 += before_2 + (not is_right_2)
        if before_1 or before_2:
            good = 0
        good = good + 1 if is_right_1 and is_right_2 else 0
        if good >= between:
            if wrong_1 or wrong_2:
                found.append((count - begin, wrong_1, wrong_2))
                wrong_1 = wrong_2 = 0
            begin = count - between
    wrong_1 += inserted_1[-1]
    wrong_2 += inserted_2[-1]
    if wrong_1 or wrong_2:
        found.append((len(right_1) - begin, wrong_1, wrong_2))
    return found


def _by_word(steps: Sequence[Step]) -> tuple[list[bool], list[int]]:
    """Whether each reference word is right, and the insertions before each word and at the end."""
    right: list[bool] = []
    inserted = [0]
    for step in steps:
        if step.kind == "insert":
            inserted[-1] += 1
            continue
        for _ in step.reference.split():
            right.append(step.kind == "equal")
            inserted.append(0)
    return right, inserted


def mapsswe(
    first: Sequence[Sequence[Step]], second: Sequence[Sequence[Step]], between: int = 2
) -> PairedTest:
    """Computes the matched-pairs sentence-segment word error test.

    Args:
        first: Alignments of the first system, utterance by utterance.
        second: Alignments of the second system with the same references in the same order.
        between: Number of correct words that separate two segments.

    Raises:
        OptionError: The systems have different numbers of utterances.
    """
    if len(first) != len(second):
        raise OptionError(
            f"the systems have {len(first)} and {len(second)} utterances; expected the same "
            "utterances for both systems"
        )
    found = [cut for a, b in zip(first, second, strict=True) for cut in segments(a, b, between)]
    return paired_test([mine - other for _, mine, other in found])


def paired_bootstrap(
    first: np.ndarray,
    second: np.ndarray,
    words: np.ndarray,
    groups: Sequence[str] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PairedBootstrap:
    """Bootstraps the difference of two error rates, with the same units drawn for both systems.

    Args:
        first: Errors of the first system in each item, ``(items,)``.
        second: Errors of the second system in each item, ``(items,)``.
        words: Reference words of each item, ``(items,)``; ``(items, 2)`` if their number differs
            between the systems.
        groups: Speaker or recording of each item, the unit that is drawn; ``None``: each item is
            its own unit.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.
    """
    both = np.broadcast_to(words.reshape(len(first), -1), (len(first), 2))
    table = np.column_stack([first, second, both])
    resampled = resampled_sums(sums_by(table, groups), resamples, seed)
    totals = table.sum(0)[None]
    rates, total = (s[:, :2] / np.maximum(s[:, 2:], 1) for s in (resampled, totals))
    differences = rates[:, 0] - rates[:, 1]
    low, high = interval(differences)
    return PairedBootstrap(
        difference=float(total[0, 0] - total[0, 1]),
        low=low,
        high=high,
        p_second_better=float((differences > 0).mean()),
    )


def sums_by(table: np.ndarray, groups: Sequence[str] | None) -> np.ndarray:
    """Sums the rows of ``table`` by group; without groups it returns the table itself."""
    if groups is None:
        return table
    _, index = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    sums = np.zeros((index.max() + 1, table.shape[1]), dtype=table.dtype)
    np.add.at(sums, index, table)
    return sums


def resampled_sums(
    table: np.ndarray, resamples: int = RESAMPLES, seed: int = 0, *, at_once: int = AT_ONCE
) -> np.ndarray:
    """Column sums of bootstrap samples; each sample draws as many units as there are.

    Args:
        table: Values of each unit, ``(units, columns)``.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.
        at_once: Largest number of drawn units held in memory at a time; it does not change the
            result.

    Returns:
        Sums, ``(resamples, columns)``.
    """
    random = np.random.default_rng(seed)
    units = len(table)
    step = max(1, at_once // units)
    chunks = [min(step, resamples - start) for start in range(0, resamples, step)]
    return np.concatenate([table[random.integers(units, size=(n, units))].sum(1) for n in chunks])


def interval(draws: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval of bootstrap draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def ratio_interval(
    table: np.ndarray,
    groups: Sequence[str] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % interval of the sum of a first column over the sum of a second, by bootstrap.

    Args:
        table: Both values of each item, ``(items, 2)``; a second sum of 0 counts as 1.
        groups: Unit of each item, see `sums_by`.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.
    """
    above, below = resampled_sums(sums_by(table, groups), resamples, seed).T
    return interval(above / np.where(below == 0, 1, below))


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrects p-values for multiple tests (Holm, 1979), in the order given."""
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = worst
    return adjusted


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value of McNemar's test (1947) of two systems on the same items.

    The test assumes that items are independent. If several items share an image, report it together
    with a bootstrap interval that resamples images.

    Args:
        gained: Number of items that only the second system has right.
        lost: Number of items that only the first system has right.
    """
    flips = gained + lost
    tail = sum(math.comb(flips, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**flips)


def bootstrap_p(draws: np.ndarray) -> float:
    """Two-sided p-value of a difference from its bootstrap draws.

    The p-value comes from the share of draws beyond zero. If fewer than 20 draws are, the smaller
    of this value and the tail of a normal distribution with the draws' mean and standard deviation
    is returned: corrections for many comparisons need p-values that counting cannot resolve.
    """
    beyond = min((draws <= 0).sum(), (draws >= 0).sum())
    counted = min(1.0, 2 * (float(beyond) + 1) / (len(draws) + 1))
    spread = float(draws.std())
    if beyond >= _TAIL or not spread:
        return counted
    return min(counted, 2 * NormalDist().cdf(-abs(float(draws.mean())) / spread))


@lru_cache(maxsize=4)
def draw_units(units: int, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """How often each unit occurs in each bootstrap sample; results are cached.

    Args:
        units: Number of units.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Returns:
        Read-only counts, ``(resamples, units)``.
    """
    random = np.random.default_rng(seed)
    counts = random.multinomial(units, np.full(units, 1 / units), resamples).astype(np.float64)
    counts.flags.writeable = False
    return counts


def bootstrap_sums(
    table: np.ndarray, groups: Sequence[str] | None, resamples: int = RESAMPLES, seed: int = 0
) -> np.ndarray:
    """Column sums of bootstrap samples of groups; tables with the same groups share the draws.

    Args:
        table: Values of each item, ``(items, columns)``.
        groups: Unit of each item, such as its image; ``None``: each item is its own unit.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Returns:
        Sums, ``(resamples, columns)``.
    """
    units = sums_by(table, groups)
    return draw_units(len(units), resamples, seed) @ units


def item_weights(groups: Sequence[str], resamples: int, seed: int) -> np.ndarray:
    """How often each item counts in each bootstrap sample of groups, as in `bootstrap_sums`.

    Args:
        groups: Unit of each item, such as its image.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Returns:
        Counts, ``(resamples, items)``.
    """
    _, index = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    return draw_units(int(index.max()) + 1, resamples, seed)[:, index]
