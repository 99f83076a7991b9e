"""Scores of yes/no answers: accuracy, precision, recall, F1, share of yes, and unparsed answers.

Yes is the positive class. The bootstrap resamples images. An answer that cannot be parsed, or is
missing, is wrong and stays in every denominator. Only a parser with ``drops_unparsed`` leaves it
out of the recall (`mmdecode.evaluation.vision.answers.Parser`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmdecode.errors import OptionError
from mmdecode.evaluation.stats.intervals import RESAMPLES, bootstrap_sums, interval
from mmdecode.evaluation.vision.answers import Label, Parser, parser_of
from mmdecode.evaluation.vision.items import YesNoItem

COLUMNS = ("true_yes", "false_yes", "true_no", "false_no", "unparsed_yes", "unparsed_no")
"""Columns of `count_answers`, in order; ``unparsed_yes`` counts unparsed answers to yes-questions,
``unparsed_no`` to no-questions."""
ScoreFunction = Callable[[Sequence[YesNoItem], Sequence[bool]], dict[str, float]]
"""Scores of a benchmark's own tool, by name, from answered items and whether each is right."""
METRICS = ("accuracy", "precision", "recall", "f1", "yes_ratio", "unparsed")


@dataclass(frozen=True, kw_only=True)
class YesNoScore:
    """Scores of one question set; each is a share, and 0 if its denominator is 0.

    Attributes:
        accuracy: Share of right answers.
        precision: Share of right answers among the answers yes.
        recall: Share of the yes-questions that are answered yes.
        f1: Harmonic mean of precision and recall. Always answering yes has an F1 of 2 / 3 if half
            of the questions are yes-questions.
        yes_ratio: Share of answers that are yes.
        unparsed: Share of answers that are neither yes nor no, or missing.
        intervals: 95 % interval of each score, by bootstrap over images.
        answers: Number of answers.
        images: Number of images.
        parser: Name of the parser.
    """

    accuracy: float
    precision: float
    recall: float
    f1: float
    yes_ratio: float
    unparsed: float
    intervals: dict[str, tuple[float, float]]
    answers: int
    images: int
    parser: str

    def __str__(self) -> str:
        low, high = self.intervals["accuracy"]
        return (
            f"accuracy {100 * self.accuracy:.2f} % [{100 * low:.2f}, {100 * high:.2f}], "
            f"yes {100 * self.yes_ratio:.1f} %, unparsed {100 * self.unparsed:.1f} % "
            f"({self.answers} answers on {self.images} images, {self.parser})"
        )


def verdict(item: YesNoItem, parser: Parser) -> Label | None:
    """Parses an item's answer; ``None``: it is neither yes nor no, or there is no answer."""
    return None if item.error is not None else parser.parse(item.output, item.target)


def count_answers(verdicts: Sequence[Label | None], targets: Sequence[Label]) -> np.ndarray:
    """Classifies answers, with one row per answer and a 1 in the column of its class.

    Args:
        verdicts: Parsed answers, see `verdict`.
        targets: Right answers.

    Returns:
        Table of zeros and ones, ``(answers, 6)``; the columns are `COLUMNS`.

    Raises:
        OptionError: Answers and targets differ in number, or are empty.
    """
    if len(verdicts) != len(targets) or not targets:
        raise OptionError(f"{len(verdicts)} answers for {len(targets)} questions; expected pairs")
    table = np.zeros((len(targets), len(COLUMNS)), dtype=np.int64)
    columns = {
        ("yes", "yes"): 0,
        ("yes", "no"): 1,
        ("no", "no"): 2,
        ("no", "yes"): 3,
        (None, "yes"): 4,
        (None, "no"): 5,
    }
    pairs = zip(verdicts, targets, strict=True)
    table[np.arange(len(targets)), [columns[pair] for pair in pairs]] = 1
    return table


def rates(counts: np.ndarray, drops_unparsed: bool = False) -> dict[str, np.ndarray]:
    """Computes `METRICS` from summed counts.

    Args:
        counts: ``(..., 6)``, see `COLUMNS`.
        drops_unparsed: See `mmdecode.evaluation.vision.answers.Parser`.

    Returns:
        Each metric, of shape ``(...)``, by name.
    """
    counts = counts.astype(float)
    true_yes, false_yes, true_no, false_no, lost_yes, lost_no = np.moveaxis(counts, -1, 0)
    total = counts.sum(-1)
    predicted = true_yes + false_yes
    positive = true_yes + false_no + (0 if drops_unparsed else lost_yes)
    precision, recall = _share(true_yes, predicted), _share(true_yes, positive)
    return {
        "accuracy": _share(true_yes + true_no, total),
        "precision": precision,
        "recall": recall,
        "f1": _share(2 * precision * recall, precision + recall),
        "yes_ratio": _share(predicted, total),
        "unparsed": _share(lost_yes + lost_no, total),
    }


def score_answers(
    outputs: Sequence[str],
    targets: Sequence[Label],
    images: Sequence[str],
    *,
    parser: str = "leading",
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> YesNoScore:
    """Scores answers in free text.

    Args:
        outputs: Raw answers.
        targets: Right answers.
        images: Name of each answer's image, the unit of the bootstrap.
        parser: Name in `mmdecode.evaluation.vision.answers.PARSERS`.
        resamples: Bootstrap resamples for the intervals.
        seed: Seed of the bootstrap.

    Raises:
        OptionError: Outputs, targets and images differ in number, or are empty.
        UnknownNameError: There is no such parser.
    """
    rule = parser_of(parser)
    if len(outputs) != len(targets):
        raise OptionError(f"{len(outputs)} answers for {len(targets)} questions; expected pairs")
    verdicts = [rule.parse(text, right) for text, right in zip(outputs, targets, strict=True)]
    return summed(count_answers(verdicts, targets), images, rule, resamples, seed)


def summed(
    counts: np.ndarray, images: Sequence[str], parser: Parser, resamples: int, seed: int
) -> YesNoScore:
    """Computes scores from counted answers.

    Args:
        counts: Class of each answer, ``(answers, 6)``, from `count_answers`.
        images: See `score_answers`.
        parser: Parser of the answers.
        resamples: See `score_answers`.
        seed: See `score_answers`.

    Raises:
        OptionError: There are not as many images as answers.
    """
    if len(images) != len(counts):
        raise OptionError(f"{len(images)} images for {len(counts)} answers; expected one for each")
    found = rates(counts.sum(0), parser.drops_unparsed)
    draws = rates(bootstrap_sums(counts, images, resamples, seed), parser.drops_unparsed)
    return YesNoScore(
        **{name: float(value) for name, value in found.items()},
        intervals={name: interval(values) for name, values in draws.items()},
        answers=len(counts),
        images=len(set(images)),
        parser=parser.name,
    )


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
