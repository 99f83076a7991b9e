"""Classifier features of images, distances between samples, and the check against memorisation.

A distance of features is never called FID here: it depends on the classifier, and compares with
nothing but other distances by the same one at the same number of images.

Source: Heusel et al. 2017, arXiv:1706.08500 (Frechet distance); Binkowski et al. 2018,
arXiv:1801.01401 (unbiased kernel distance).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mmdecode.errors import OptionError
from mmdecode.evaluation.stats.image_means import Mean, mean_of, scipy_parts
from mmdecode.evaluation.stats.intervals import draw_units, interval


@dataclass(frozen=True, kw_only=True)
class Distance:
    """A distance of two samples of features.

    Attributes:
        value: Value of the samples as they are.
        low, high: 95 % interval, by bootstrap over images of both; what resampling alone adds to
            the distance is taken off.
    """

    value: float
    low: float
    high: float


def frechet(first: np.ndarray, second: np.ndarray, resamples: int = 200, seed: int = 0) -> Distance:
    """Classifier distance: Frechet distance of Gaussians fitted to features ``(n, d)``.

    Too large by about a constant over the number of images; hold it next to its `floor` and the
    distance of two plain runs of the same size.

    Args:
        first: Features of one sample.
        second: Features of the other.
        resamples: Draws of the bootstrap.
        seed: Seed of the draws.
    """
    tables = [np.asarray(features, dtype=np.float64) for features in (first, second)]
    even = [np.ones(len(table)) for table in tables]
    value = _frechet(*(_moments(t, w) for t, w in zip(tables, even, strict=True)))
    weights = [draw_units(len(t), resamples, seed + n) for n, t in enumerate(tables)]
    draws = np.array(
        [
            _frechet(*(_moments(t, w) for t, w in zip(tables, pair, strict=True)))
            for pair in zip(*weights, strict=True)
        ]
    )
    low, high = interval(draws - draws.mean() + value)
    return Distance(value=value, low=max(low, 0.0), high=high)


def kernel_distance(
    first: np.ndarray, second: np.ndarray, resamples: int = 200, seed: int = 0
) -> Distance:
    """Unbiased squared maximum mean discrepancy with the kernel ``(x . y / d + 1) ** 3``.

    0 on average for equal distributions, below 0 half of the time, whatever the number of images.

    Args:
        first: Features of one sample, ``(n, d)``.
        second: Features of the other, ``(m, d)``.
        resamples: Draws of the bootstrap.
        seed: Seed of the draws.
    """
    size = first.shape[1]
    one, other = (np.asarray(features, dtype=np.float32) for features in (first, second))
    within = [(t @ t.T / size + 1) ** 3 for t in (one, other)]
    across = (one @ other.T / size + 1) ** 3
    weights = [
        np.concatenate([np.ones((1, len(t))), draw_units(len(t), resamples, seed + n)])
        for n, t in enumerate((one, other))
    ]
    total = np.zeros(resamples + 1)
    for kernel, w in zip(within, weights, strict=True):
        # an image is never paired with itself, however often it was drawn
        pairs = ((w @ kernel) * w).sum(1) - (w**2) @ np.diag(kernel)
        total += pairs / (w.sum(1) ** 2 - (w**2).sum(1))
    crossed = ((weights[0] @ across) * weights[1]).sum(1)
    total -= 2 * crossed / (weights[0].sum(1) * weights[1].sum(1))
    value, draws = float(total[0]), total[1:]
    low, high = interval(draws - draws.mean() + value)
    return Distance(value=value, low=low, high=high)


def floor(features: np.ndarray, size: int, splits: int = 20, seed: int = 0) -> Distance:
    """Classifier distance of two disjoint parts of one sample: the floor at that size.

    Args:
        features: ``(n, d)``.
        size: Images in each part, at most half of them.
        splits: Random splits; the value is their mean, the interval holds 95 % of them.
        seed: Seed of the splits.

    Raises:
        OptionError: There are too few images.
    """
    if not 2 <= size <= len(features) // 2:
        raise OptionError(f"two parts of {size} images cannot be made of {len(features)}")
    random, found = np.random.default_rng(seed), []
    for _ in range(splits):
        parts = features[random.permutation(len(features))[: 2 * size]].reshape(2, size, -1)
        found.append(_frechet(*(_moments(part, np.ones(size)) for part in parts)))
    low, high = interval(np.array(found))
    return Distance(value=float(np.mean(found)), low=low, high=high)


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


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Output of a classifier for images.

    Attributes:
        accuracy: Share that shows the class asked for.
        diversity: Entropy of the mean of its distributions, in bits.
        mean_entropy: Mean entropy of its distributions, in bits.
    """

    accuracy: Mean
    diversity: float
    mean_entropy: float

    def as_dict(self) -> dict[str, Any]:
        """The fields as a JSON object, in which the mean entropy has the key ``doubt``."""
        found = asdict(self)
        return found | {"doubt": found.pop("mean_entropy")}


def judged(probabilities: np.ndarray, wanted: np.ndarray) -> Classes:
    """Class accuracy and entropies.

    Args:
        probabilities: Probabilities of a classifier, ``(n, classes)``.
        wanted: Class asked for, ``(n,)``.
    """
    share = mean_of(probabilities.argmax(1) == wanted, list(wanted))
    return Classes(
        accuracy=replace(share, low=max(share.low, 0.0), high=min(share.high, 1.0)),
        diversity=float(_entropy(probabilities.mean(0))),
        mean_entropy=float(_entropy(probabilities).mean()),
    )


def _entropy(probabilities: np.ndarray) -> np.ndarray:
    """Entropy of each distribution, in bits."""
    return -(probabilities * np.log2(np.maximum(probabilities, 1e-30))).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Distance of samples to the nearest training image, next to that of held-out images.

    Attributes:
        samples, held_out: Median distance to the nearest training image.
        copies: Share of samples that are nearer to one than 99 % of the held-out images are.
        p: P-value of samples being as near as held-out images, against nearer (Mann and Whitney,
            1947).
    """

    samples: float
    held_out: float
    copies: float
    p: float


def nearest(points: np.ndarray, training: np.ndarray, at_once: int = 4096) -> np.ndarray:
    """Euclidean distance of each of ``(n, d)`` to the nearest of ``(m, d)``, ``(n,)``."""
    points = np.asarray(points, dtype=np.float32)
    own = (points**2).sum(1)
    best = np.full(len(points), np.inf)
    for start in range(0, len(training), at_once):
        part = np.asarray(training[start : start + at_once], dtype=np.float32)
        squares = own[:, None] - 2 * points @ part.T + (part**2).sum(1)
        best = np.minimum(best, squares.min(1))
    return np.sqrt(np.maximum(best, 0))


def memory(samples: np.ndarray, held_out: np.ndarray) -> Memory:
    """Compares distances to the nearest training image.

    Args:
        samples: Distances of samples, ``(n,)``; see `nearest`.
        held_out: Distances of images that were not trained on and went the same way, through the
            tokenizer if samples did, ``(m,)``.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    test = scipy_parts().stats.mannwhitneyu(samples, held_out, alternative="less")
    return Memory(
        samples=float(np.median(samples)),
        held_out=float(np.median(held_out)),
        copies=float((samples < np.quantile(held_out, 0.01)).mean()),
        p=float(test.pvalue),
    )
