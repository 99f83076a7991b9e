"""Checks published rows of POPE for numbers that no answers can have produced.

All numbers of a row follow from two counts, the right and the wrong answers yes. A row of one run
can therefore be obtained by rounding from some pair of counts, or it is wrong; all pairs are tried.
On 1,500 yes- and 1,500 no-questions, accuracy = 0.5 + 0.5 R (2 - 1 / P) and the share of yes =
R / (2 P) for recall R and precision P. A mean of several runs need not correspond to a pair of
counts, but these equations hold for it approximately.

The yes-questions are the same in the three splits, so a decoder without randomness has the same
recall in each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from mmdecode.errors import InputError, OptionError
from mmdecode.runs.tables import read_rows

SIZES = {"3,000 questions": (1500, 1500), "the old 2,910 questions": (1500, 1410)}
"""Numbers of yes- and of no-questions of one split, by version of POPE."""
_SLACK = 1e-9
_BENT = 0.5  # points by which a mean of runs may deviate from the equations


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One row of a published table, in percent.

    Attributes:
        accuracy, precision, recall, f1, yes_ratio: Printed numbers; ``None``: not printed.
        step: Unit of the last printed digit. A printed number may be rounded or truncated.
        averaged: Whether the row is the mean of several runs, models or splits.
    """

    accuracy: float | None = None
    precision: float | None = None
    recall: float | None = None
    f1: float | None = None
    yes_ratio: float | None = None
    step: float = 0.01
    averaged: bool = False

    def printed(self) -> dict[str, float]:
        """The printed numbers, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name in _NAMES}
        return {name: value for name, value in values.items() if value is not None}


_NAMES = ("accuracy", "precision", "recall", "f1", "yes_ratio")


def check_row(row: PublishedRow) -> list[str]:
    """Finds contradictions between the numbers of a row; an empty list means none.

    Raises:
        OptionError: The row prints fewer than two numbers, so that there is nothing to check.
    """
    printed = row.printed()
    if len(printed) < 2:
        raise OptionError(f"the row prints {sorted(printed)}; expected at least two numbers")
    out_of_range = [f"{n} is {v}" for n, v in printed.items() if not 0 <= v <= 100]
    if out_of_range:
        return [f"{found}; expected a number from 0 to 100" for found in out_of_range]
    if row.averaged:
        return _mean_problems(row)
    fitting = [name for name, size in SIZES.items() if len(_fits(row, *size)[0])]
    newest = next(iter(SIZES))
    if newest in fitting:
        return []
    shown = ", ".join(f"{name} {value}" for name, value in printed.items())
    if fitting:
        return [f"no answers to {newest} give {shown}; answers to {fitting[0]} do"]
    implied = ", ".join(f"{name} of {value:.2f}" for name, value in _implied(row).items())
    return [f"no answers of one run give {shown}{f'; they imply {implied}' if implied else ''}"]


def check_recalls(splits: Mapping[str, PublishedRow]) -> list[str]:
    """Checks whether the splits can have the same recall, as they must in greedy decoding.

    Some old copies of POPE's files have misspelt questions. Their splits also differ in the
    yes-questions, so their recalls may differ.

    Args:
        splits: Rows of one method by split, each from a single run.

    Returns:
        Contradictions in words; an empty list means none.

    Raises:
        OptionError: A row prints fewer than two numbers, or is an average.
    """
    ranges = {}
    for name, row in splits.items():
        if row.averaged or len(row.printed()) < 2:
            raise OptionError(
                f"the row of {name!r} is an average or prints fewer than two numbers; expected the "
                "row of a single run"
            )
        sizes = [(_fits(row, *size)[0], size[0]) for size in SIZES.values()]
        true, asked = next((one for one in sizes if len(one[0])), sizes[0])
        if not len(true):
            return [f"no answers of one run give the row of {name!r}"]
        ranges[name] = (100 * true.min() / asked, 100 * true.max() / asked)
    if max(low for low, _ in ranges.values()) <= min(high for _, high in ranges.values()) + _SLACK:
        return []
    shown = ", ".join(f"{name} {low:.2f} to {high:.2f}" for name, (low, high) in ranges.items())
    return [
        f"the recalls differ ({shown}): answers were sampled, or the splits have different "
        "yes-questions"
    ]


def read_published(path: Path) -> Iterator[tuple[str, str, PublishedRow]]:
    """Reads the rows of a published table.

    Args:
        path: A table (see `mmdecode.runs.tables`) with any of the numbers of `PublishedRow` in
            percent, and optional columns ``method``, ``split`` and ``averaged`` (yes or no). The
            step of a row follows from its number with the most decimals.

    Yields:
        Method, split and row.

    Raises:
        InputError: The table cannot be read, or a value is not a number.
    """
    for line, row in read_rows(path):
        shown = {name: str(row[name]).strip() for name in _NAMES if row.get(name) is not None}
        shown = {name: text for name, text in shown.items() if text}
        try:
            numbers: dict[str, Any] = {name: float(text) for name, text in shown.items()}
        except ValueError as error:
            raise InputError(f"{path}, line {line}: {error}; expected numbers in percent") from None
        decimals = max((len(text.partition(".")[2]) for text in shown.values()), default=0)
        averaged = str(row.get("averaged") or "").lower() in ("yes", "true", "1")
        yield (
            str(row.get("method") or f"line {line}"),
            str(row.get("split") or ""),
            PublishedRow(**numbers, step=10.0**-decimals, averaged=averaged),
        )


def check_table(path: Path) -> list[str]:
    """Finds contradictions in a published table, within rows and between the splits of a method.

    Args:
        path: See `read_published`.

    Raises:
        InputError: The table cannot be read, has no row, or a row prints fewer than two numbers.
    """
    problems, splits = [], dict[str, dict[str, PublishedRow]]()
    for method, split, row in read_published(path):
        name = f"{method}, {split}" if split else method
        try:
            found = check_row(row)
        except OptionError as error:
            raise InputError(f"{path}, {name}: {error}") from error
        problems += [f"{name}: {problem}" for problem in found]
        of_method = splits.setdefault(method, {})
        if split and not found and not row.averaged:
            of_method[split] = row
    if not splits:
        raise InputError(f"{path} holds no row")
    for method, rows in splits.items():
        if len(rows) > 1:
            problems += [f"{method}: {problem}" for problem in check_recalls(rows)]
    return problems


def _fits(row: PublishedRow, asked_yes: int, asked_no: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of right and of wrong answers yes from which a row can result by rounding."""
    true, false = np.arange(asked_yes + 1.0)[:, None], np.arange(asked_no + 1.0)[None]
    with np.errstate(invalid="ignore"):
        found = {
            "accuracy": (true + asked_no - false) / (asked_yes + asked_no),
            "precision": true / (true + false),
            "recall": true / asked_yes + 0 * false,
            "f1": 2 * true / (true + false + asked_yes),
            "yes_ratio": (true + false) / (asked_yes + asked_no),
        }
    fits = np.ones((asked_yes + 1, asked_no + 1), dtype=bool)
    for name, value in row.printed().items():
        # rounded: within half a step; truncated: up to a step above the printed number
        above = 100 * np.nan_to_num(found[name]) - value
        fits &= (above >= -row.step / 2 - _SLACK) & (above < row.step - _SLACK)
    true_yes, false_yes = np.nonzero(fits)
    return true_yes, false_yes


def _mean_problems(row: PublishedRow) -> list[str]:
    """Contradictions in a mean of runs: the equations, with tolerance for averaging."""
    printed = row.printed()
    return [
        f"the other numbers of the row imply {name} of {value:.2f}, but {printed[name]} is printed"
        for name, value in _implied(row).items()
        if name in printed and abs(value - printed[name]) > _BENT + row.step
    ]


def _implied(row: PublishedRow) -> dict[str, float]:
    """Numbers in percent that follow from precision and recall, or from accuracy and F1."""
    if row.precision and row.recall is not None:
        precision, recall = row.precision / 100, row.recall / 100
        return {
            "accuracy": 50 + 50 * recall * (2 - 1 / precision),
            "f1": 200 * precision * recall / (precision + recall),
            "yes_ratio": 50 * recall / precision,
        }
    if row.accuracy is not None and row.f1 is not None and row.f1 < 100:
        excess, f1 = row.accuracy / 100 - 0.5, row.f1 / 100
        true = f1 * (0.5 - excess) / (2 - 2 * f1)
        return {"yes_ratio": 100 * (2 * true - excess)}
    return {}
