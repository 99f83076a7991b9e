"""Scores of yes/no answers: accuracy, precision, recall, F1, share of yes, and unparsed answers.

Yes is the positive class. The bootstrap resamples images. An answer that cannot be parsed, or is
missing, is wrong and stays in every denominator. Only a parser with ``drops_unparsed`` leaves it
out of the recall (`mmdecode.evaluation.vision.answers.Parser`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mmdecode.errors import OptionError
from mmdecode.evaluation.vision.answers import Label, Parser
from mmdecode.evaluation.vision.items import YesNoItem

CLASSES = (("yes", "yes"), ("yes", "no"), ("no", "no"), ("no", "yes"), (None, "yes"), (None, "no"))
"""Columns of `count_answers`: parsed and right answer of the answers that each counts."""
ScoreFunction = Callable[[Sequence[YesNoItem], Sequence[bool]], dict[str, float]]
"""Scores of a benchmark's own tool, by name, from answered items and whether each is right."""


def verdict(item: YesNoItem, parser: Parser) -> Label | None:
    """Parses an item's answer; ``None``: it is neither yes nor no, or there is no answer."""
    return None if item.error is not None else parser.parse(item.output, item.target)


def count_answers(verdicts: Sequence[Label | None], targets: Sequence[Label]) -> np.ndarray:
    """Classifies answers, with one row per answer and a 1 in the column of its class.

    Args:
        verdicts: Parsed answers, see `verdict`.
        targets: Right answers.

    Returns:
        Table of zeros and ones, ``(answers, 6)``; the columns are `CLASSES`.

    Raises:
        OptionError: Answers and targets differ in number, or are empty.
    """
    if len(verdicts) != len(targets) or not targets:
        raise OptionError(f"{len(verdicts)} answers for {len(targets)} questions; expected pairs")
    table = np.zeros((len(targets), len(CLASSES)), dtype=np.int64)
    pairs = zip(verdicts, targets, strict=True)
    table[np.arange(len(targets)), [CLASSES.index(pair) for pair in pairs]] = 1
    return table


def rates(counts: np.ndarray, drops_unparsed: bool = False) -> dict[str, np.ndarray]:
    """Computes shares from summed counts.

    Args:
        counts: ``(..., 6)``, see `CLASSES`.
        drops_unparsed: See `mmdecode.evaluation.vision.answers.Parser`.

    Returns:
        Each metric, of shape ``(...)``, by name; 0 where its denominator is 0. ``precision`` is the
        share of right answers among the answers yes, ``recall`` the share of the yes-questions that
        are answered yes, and ``f1`` their harmonic mean: 2 / 3 for always yes if half of the
        questions are yes-questions. ``accuracy``, ``yes_ratio`` and ``unparsed`` (neither yes nor
        no, or missing) are shares of all answers.
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


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
