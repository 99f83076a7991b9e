"""Threshold-free measures of the margin: the logit of yes minus the logit of no.

A method that adds the same constant to every margin answers yes more often but ranks the questions
no better: AUROC and average precision do not change. The control is therefore the plain model's
margin plus a constant, as in the published critique (Yin, Si and Wang, 2025). The constant is
fitted on other images than those it is applied to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmdecode.errors import OptionError
from mmdecode.evaluation.stats.intervals import item_weights

RESAMPLES = 1_000
_AT_ONCE = 1 << 22  # drawn items held in memory together


def auroc(
    margins: np.ndarray, positive: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """Chance that a yes-question has a larger margin than a no-question; equal margins count half.

    Args:
        margins: Margin of each question, ``(items,)``.
        positive: Whether the right answer to each question is yes, ``(items,)``.
        weights: How often each question counts in each bootstrap sample, ``(draws, items)``;
            ``None``: once.

    Returns:
        AUROC of each bootstrap sample, ``(draws,)``, or a single number without weights; NaN if
        there is no yes-question or no no-question.
    """
    yes, no = _by_margin(margins, positive, weights)
    below = np.cumsum(no, axis=-1) - no
    pairs = yes.sum(-1) * no.sum(-1)
    return _ratio((yes * (below + no / 2)).sum(-1), pairs)


def average_precision(margins: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Precision at each threshold, weighted by the recall gained there; arguments as in `auroc`."""
    yes, no = (side[::-1] for side in _by_margin(margins, positive))
    found = np.cumsum(yes)
    return _ratio((yes * _ratio(found, found + np.cumsum(no))).sum(), yes.sum())


def best_threshold(margins: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """Finds the threshold of the margin that has the highest accuracy on these same questions.

    Returns:
        This accuracy, which is optimistic, and the threshold above which the answer is yes: the
        middle between two margins, or infinite if the same answer to all questions is best.
    """
    yes, no = (side[::-1] for side in _by_margin(margins, positive))
    right = np.concatenate([[0], np.cumsum(yes)]) + no.sum()
    right -= np.concatenate([[0], np.cumsum(no)])
    best = int(right.argmax())
    values = np.concatenate([[np.inf], np.unique(margins)[::-1], [-np.inf]])
    return float(right[best] / len(margins)), float((values[best] + values[best + 1]) / 2)


def auroc_draws(
    margins: np.ndarray,
    positive: np.ndarray,
    groups: Sequence[str],
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> np.ndarray:
    """AUROC of bootstrap samples of whole images; equal groups and seed give equal samples.

    Args:
        margins: See `auroc`; NaN where an item has no margin: such items do not count, and do not
            change which images are drawn.
        positive: See `auroc`.
        groups: Image of each item.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Returns:
        AUROC of each sample, ``(resamples,)``.
    """
    known = ~np.isnan(margins)
    weights = item_weights(groups, resamples, seed)[:, known]
    step = max(1, _AT_ONCE // len(margins))
    parts = (weights[i : i + step] for i in range(0, resamples, step))
    return np.concatenate([auroc(margins[known], positive[known], part) for part in parts])


def fit_shift(margins: np.ndarray, yes_ratio: float) -> float:
    """Finds the constant that makes a given share of the margins positive, as near as ties allow.

    Args:
        margins: Margin of each item, ``(items,)``.
        yes_ratio: Wanted share of items with the answer yes, 0 to 1.

    Returns:
        The constant to add to the margins; 0 if the share is right already.
    """
    values, counts = np.unique(margins, return_counts=True)
    over = np.concatenate([[0], np.cumsum(counts[::-1])]) / len(margins)  # yes-ratio by threshold
    cut = int(np.abs(over - yes_ratio).argmin())
    room = 1 + float(np.abs(values).max())
    edges = np.concatenate([[values[-1] + room], values[::-1], [values[0] - room]])
    high, low = edges[cut], edges[cut + 1]
    return 0.0 if low <= 0 < high else -float((low + high) / 2)


def cross_fitted_shifts(
    margins: np.ndarray,
    yes_share: np.ndarray,
    groups: Sequence[str],
    folds: int = 5,
    seed: int = 0,
) -> np.ndarray:
    """For each item, fits the constant of `fit_shift` to a method's yes-ratio on other images.

    Args:
        margins: Margin of the plain model for each item, ``(items,)``.
        yes_share: Share of the method's answers to each item that are yes, ``(items,)``: 0 or 1 for
            one seed, in between for several seeds.
        groups: Image of each item.
        folds: Number of folds of cross-fitting; images are assigned to folds at random.
        seed: Seed of this assignment.

    Returns:
        The constant for each item, ``(items,)``.

    Raises:
        OptionError: There is only one image.
    """
    names, index = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    if len(names) < 2:
        raise OptionError("a shift is fitted on other images, but there is only one; give two")
    dealt = np.random.default_rng(seed).permutation(len(names)) % min(folds, len(names))
    fold = dealt[index]
    shifts = np.empty(len(margins))
    for one in np.unique(fold):
        rest = fold != one
        shifts[~rest] = fit_shift(margins[rest], float(yes_share[rest].mean()))
    return shifts


def roc(margins: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rate at each threshold, from all answers no to all answers yes."""
    yes, no = (np.cumsum(side[::-1]) for side in _by_margin(margins, positive))
    start = [0.0]
    return np.concatenate([start, no / no[-1]]), np.concatenate([start, yes / yes[-1]])


def _by_margin(
    margins: np.ndarray, positive: np.ndarray, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Weight of yes- and of no-questions at each distinct margin, in ascending order."""
    order = np.argsort(margins, kind="stable")
    counted = np.ones(len(margins)) if weights is None else weights.astype(float)
    counted, right = counted[..., order], positive[order].astype(bool)
    starts = np.unique(margins[order], return_index=True)[1]
    yes = np.add.reduceat(counted * right, starts, axis=-1)
    return yes, np.add.reduceat(counted * ~right, starts, axis=-1)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0)
