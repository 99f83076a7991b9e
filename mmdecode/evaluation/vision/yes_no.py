"""Scores of yes/no answers: accuracy, share of yes, and answers that could not be parsed.

Yes is the positive class. The images are the sample, so intervals draw images. An answer that
cannot be parsed, or that never came, is wrong; it stays in every denominator, unless the chosen
rule's own project leaves it out of the recall (`mmdecode.evaluation.vision.answers.Parser`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmdecode.errors import OptionError
from mmdecode.evaluation.stats.intervals import RESAMPLES, drawn_sums, interval
from mmdecode.evaluation.vision.answers import Label, Parser, parser_of
from mmdecode.evaluation.vision.items import YesNoItem

COLUMNS = ("true_yes", "false_yes", "true_no", "false_no", "unparsed_yes", "unparsed_no")
"""What `count_answers` counts, in order; the last two by the right answer."""
METRICS = ("accuracy", "precision", "recall", "f1", "yes_ratio", "unparsed")


@dataclass(frozen=True, kw_only=True)
class YesNoScore:
    """Scores of one set; each is a share, 0 where it has no denominator.

    Attributes:
        accuracy: Right answers.
        precision: Of the answers yes, those that are right.
        recall: Of the yes-questions, those answered yes.
        f1: Harmonic mean of the two; saying yes to half no-questions already earns 2 / 3.
        yes_ratio: Answers yes.
        unparsed: Answers that say neither, and missing ones.
        intervals: 95 % interval of each, by bootstrap over images.
        answers: Their number.
        images: Number of images.
        parser: Name of the rule.
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
    """What an answer says; ``None``: nothing, or there is none."""
    return None if item.error is not None else parser.parse(item.output, item.target)


def count_answers(verdicts: Sequence[Label | None], targets: Sequence[Label]) -> np.ndarray:
    """One row per answer with a single 1.

    Args:
        verdicts: What the answers say.
        targets: What is right.

    Returns:
        ``(answers, 6)``; the columns are `COLUMNS`.

    Raises:
        OptionError: The two differ in length, or are empty.
    """
    if len(verdicts) != len(targets) or not targets:
        raise OptionError(f"{len(verdicts)} answers for {len(targets)} questions; expected pairs")
    table = np.zeros((len(targets), len(COLUMNS)), dtype=np.int64)
    places = {
        ("yes", "yes"): 0,
        ("yes", "no"): 1,
        ("no", "no"): 2,
        ("no", "yes"): 3,
        (None, "yes"): 4,
        (None, "no"): 5,
    }
    pairs = zip(verdicts, targets, strict=True)
    table[np.arange(len(targets)), [places[pair] for pair in pairs]] = 1
    return table


def rates(counts: np.ndarray, drops_unparsed: bool = False) -> dict[str, np.ndarray]:
    """`METRICS` of summed counts.

    Args:
        counts: ``(..., 6)`` under `COLUMNS`.
        drops_unparsed: See `mmdecode.evaluation.vision.answers.Parser`.

    Returns:
        ``(...)`` each.
    """
    counts = counts.astype(float)
    true_yes, false_yes, true_no, false_no, lost_yes, lost_no = np.moveaxis(counts, -1, 0)
    total = counts.sum(-1)
    said = true_yes + false_yes
    asked = true_yes + false_no + (0 if drops_unparsed else lost_yes)
    precision, recall = _share(true_yes, said), _share(true_yes, asked)
    return {
        "accuracy": _share(true_yes + true_no, total),
        "precision": precision,
        "recall": recall,
        "f1": _share(2 * precision * recall, precision + recall),
        "yes_ratio": _share(said, total),
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
        outputs: Answers as they came.
        targets: What is right.
        images: The image of each, which the interval draws.
        parser: Of `mmdecode.evaluation.vision.answers.PARSERS`.
        resamples: Bootstrap draws of the intervals.
        seed: Of the bootstrap.

    Raises:
        OptionError: The three differ in length, or are empty.
        UnknownNameError: There is no such parser.
    """
    rule = parser_of(parser)
    if len(outputs) != len(targets):
        raise OptionError(f"{len(outputs)} answers for {len(targets)} questions; expected pairs")
    verdicts = [rule.parse(said, right) for said, right in zip(outputs, targets, strict=True)]
    return summed(count_answers(verdicts, targets), images, rule, resamples, seed)


def summed(
    counts: np.ndarray, images: Sequence[str], parser: Parser, resamples: int, seed: int
) -> YesNoScore:
    """The score of counted answers; arguments as of `score_answers`.

    Args:
        counts: Of `count_answers`.
        images: See `score_answers`.
        parser: With which they were parsed.
        resamples: See `score_answers`.
        seed: See `score_answers`.

    Raises:
        OptionError: There are not as many images as answers.
    """
    if len(images) != len(counts):
        raise OptionError(f"{len(images)} images for {len(counts)} answers; expected one for each")
    drawn = drawn_sums(counts, images, resamples, seed)
    found = rates(counts.sum(0), parser.drops_unparsed)
    draws = rates(drawn, parser.drops_unparsed)
    return YesNoScore(
        **{name: float(value) for name, value in found.items()},
        intervals={name: interval(values) for name, values in draws.items()},
        answers=len(counts),
        images=len(set(images)),
        parser=parser.name,
    )


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
