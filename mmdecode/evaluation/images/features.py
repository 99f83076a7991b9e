"""Classifier features of images, distances between samples, and the check against memorisation.

A distance of features is never called FID here: it depends on the classifier, and it can only be
compared with distances by the same classifier for the same number of images.

Source: Heusel et al. 2017, arXiv:1706.08500 (Frechet distance); Binkowski et al. 2018,
arXiv:1801.01401 (unbiased kernel distance).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from mmdecode.errors import OptionError
from mmdecode.evaluation.stats.image_tests import mean_of, scipy_parts
from mmdecode.evaluation.stats.intervals import Estimate, draw_units, interval


def frechet(first: np.ndarray, second: np.ndarray, resamples: int = 200, seed: int = 0) -> Estimate:
    """Frechet distance between Gaussians fitted to classifier features.

    The estimate is too large, by an amount that falls as one over the number of images; compare it
    with `floor` and with the distance between two plain runs of the same size.

    Args:
        first: Features of one sample, ``(n, d)``.
        second: Features of the other sample, ``(m, d)``.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Returns:
        The distance, with an interval by bootstrap over the images of both samples; the bias that
        resampling adds to the distance is subtracted.
    """
    tables = [np.asarray(features, dtype=np.float64) for features in (first, second)]

    def distances(*weights: np.ndarray) -> np.ndarray:
        pairs = zip(*weights, strict=True)
        return np.array([_frechet(*map(_moments, tables, pair)) for pair in pairs])

    found = _bootstrapped(tables, distances, resamples, seed)
    return replace(found, low=max(found.low, 0.0))


def kernel_distance(
    first: np.ndarray, second: np.ndarray, resamples: int = 200, seed: int = 0
) -> Estimate:
    """Unbiased squared maximum mean discrepancy with the kernel ``(x . y / d + 1) ** 3``.

    For equal distributions its mean is 0 for any number of images, so about half of the values are
    negative.

    Args:
        first: Features of one sample, ``(n, d)``.
        second: Features of the other sample, ``(m, d)``.
        resamples: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Returns:
        The distance, with an interval as in `frechet`.
    """
    size = first.shape[1]
    one, other = (np.asarray(features, dtype=np.float32) for features in (first, second))
    within = [(t @ t.T / size + 1) ** 3 for t in (one, other)]
    across = (one @ other.T / size + 1) ** 3

    def distances(*weights: np.ndarray) -> np.ndarray:
        total = np.zeros(len(weights[0]))
        for kernel, w in zip(within, weights, strict=True):
            # an image is never paired with itself, however often it was drawn
            pairs = ((w @ kernel) * w).sum(1) - (w**2) @ np.diag(kernel)
            total += pairs / (w.sum(1) ** 2 - (w**2).sum(1))
        crossed = ((weights[0] @ across) * weights[1]).sum(1)
        return total - 2 * crossed / (weights[0].sum(1) * weights[1].sum(1))

    return _bootstrapped((one, other), distances, resamples, seed)


def _bootstrapped(
    samples: Sequence[np.ndarray],
    distances: Callable[[np.ndarray, np.ndarray], np.ndarray],
    resamples: int,
    seed: int,
) -> Estimate:
    """Distance of two samples, given the distances at weights ``(draws, n)`` and ``(draws, m)``."""
    first, second = (
        np.concatenate([np.ones((1, len(t))), draw_units(len(t), resamples, seed + n)])
        for n, t in enumerate(samples)
    )
    found = distances(first, second)
    value, draws = float(found[0]), found[1:]
    low, high = interval(draws - draws.mean() + value)
    return Estimate(value=value, low=low, high=high)


def floor(features: np.ndarray, size: int, splits: int = 20, seed: int = 0) -> Estimate:
    """Frechet distance between two random disjoint parts of one sample of images.

    It is the distance that two equal distributions have at this number of images.

    Args:
        features: Classifier features of the sample, ``(n, d)``.
        size: Number of images in each part, at most ``n // 2``.
        splits: Number of random splits. The value is the mean of their distances, and the interval
            covers the central 95 % of them.
        seed: Seed of the splits.

    Raises:
        OptionError: ``size`` is below 2 or above ``n // 2``.
    """
    if not 2 <= size <= len(features) // 2:
        raise OptionError(
            f"{len(features)} images cannot be split into two parts of {size}; expected parts of 2 "
            "or more images, at most half of all"
        )
    random, found = np.random.default_rng(seed), []
    for _ in range(splits):
        parts = features[random.permutation(len(features))[: 2 * size]].reshape(2, size, -1)
        found.append(_frechet(*(_moments(part, np.ones(size)) for part in parts)))
    low, high = interval(np.array(found))
    return Estimate(value=float(np.mean(found)), low=low, high=high)


def _moments(features: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = weights @ features / weights.sum()
    centred = features - mean
    return mean, (centred * weights[:, None]).T @ centred / max(weights.sum() - 1, 1)


def _frechet(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> float:
    """``|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))``."""
    (mean_1, cov_1), (mean_2, cov_2) = first, second
    values, vectors = np.linalg.eigh(cov_1)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    shared = np.linalg.eigvalsh(root @ cov_2 @ root)
    cross = float(np.sqrt(np.maximum(shared, 0)).sum())
    gap = float(((mean_1 - mean_2) ** 2).sum())
    return max(gap + float(np.trace(cov_1) + np.trace(cov_2)) - 2 * cross, 0.0)


def judged(probabilities: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    """Computes the class accuracy and the entropies of a classifier's output.

    Args:
        probabilities: Class probabilities of each image, ``(n, classes)``.
        wanted: Requested class of each image, ``(n,)``.

    Returns:
        ``accuracy``: `mean_of` whether the classifier assigns an image to the requested class;
        ``diversity``: entropy of the classifier's mean distribution over classes, in bits;
        ``doubt``: mean entropy of its distributions, in bits.
    """
    share = mean_of(probabilities.argmax(1) == wanted, list(wanted))
    accuracy = replace(share, low=max(share.low, 0.0), high=min(share.high, 1.0))
    return {
        "accuracy": asdict(accuracy),
        "diversity": float(_entropy(probabilities.mean(0))),
        "doubt": float(_entropy(probabilities).mean()),
    }


def _entropy(probabilities: np.ndarray) -> np.ndarray:
    """Entropy of each distribution, in bits."""
    return -(probabilities * np.log2(np.maximum(probabilities, 1e-30))).sum(-1)


def nearest(points: np.ndarray, training: np.ndarray, at_once: int = 4096) -> np.ndarray:
    """Computes the Euclidean distance of each point to the nearest training point.

    Args:
        points: Points, ``(n, d)``.
        training: Training points, ``(m, d)``.
        at_once: Number of training points that are compared at a time.

    Returns:
        Distances, ``(n,)``.
    """
    points = np.asarray(points, dtype=np.float32)
    own = (points**2).sum(1)
    best = np.full(len(points), np.inf)
    for start in range(0, len(training), at_once):
        part = np.asarray(training[start : start + at_once], dtype=np.float32)
        squares = own[:, None] - 2 * points @ part.T + (part**2).sum(1)
        best = np.minimum(best, squares.min(1))
    return np.sqrt(np.maximum(best, 0))


def memory(samples: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """Checks against memorisation: compares distances to the nearest training image.

    Args:
        samples: Distance of each generated image, ``(n,)``; see `nearest`.
        held_out: Distance of each image that the model was not trained on, ``(m,)``. If the
            generated images were decoded by an image tokenizer, these must be encoded and decoded
            by it too.

    Returns:
        ``samples`` and ``held_out``: median distances; ``copies``: share of generated images that
        are nearer to a training image than 99 % of the held-out images are; ``p``: one-sided
        p-value of the Mann-Whitney test (1947), small if generated images are nearer to training
        images than held-out images are.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    test = scipy_parts().stats.mannwhitneyu(samples, held_out, alternative="less")
    return {
        "samples": float(np.median(samples)),
        "held_out": float(np.median(held_out)),
        "copies": float((samples < np.quantile(held_out, 0.01)).mean()),
        "p": float(test.pvalue),
    }
