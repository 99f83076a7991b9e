"""Base class of reports whose scores are rates of counts, such as the share of right answers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mmdecode.errors import OptionError
from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.examples import Examples
from mmdecode.evaluation.report.item_comparison import ItemComparison, corrected, differences, flips
from mmdecode.evaluation.report.item_report import ItemReport
from mmdecode.evaluation.report.layout import number, percent, without_empty
from mmdecode.evaluation.stats.intervals import bootstrap_sums, interval
from mmdecode.evaluation.vision.items import Some

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNPARSED = 0.01
"""Share of unparsed answers above which a report asks to check prompt and stopping criterion."""


class CountedReport(ItemReport[Some]):
    """Base class of reports whose scores are rates of counts.

    Attributes:
        options: Arguments of the class's own, for a report of other answers.
        settings: First entries of the summary.
        paired: Further comparison of each mode, by its name, with controls that are computed.
    """

    compared: ClassVar[tuple[str, ...]]
    """Names of the scores that are compared, the main one first."""
    columns: ClassVar[tuple[str, str]]
    """Columns of the main score and of its interval."""
    truth: ClassVar[attrgetter[Any]]
    """Fields of a question that are equal in reports that can be compared."""
    asked = "questions"
    """Name of what two reports must share to be compared, for the message."""
    options: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    paired: Mapping[str, tuple[str, str]] = {}

    @cached_property
    def sets(self) -> dict[str, np.ndarray]:
        """Indices of the questions of each set; a question may be in a set several times."""
        found: dict[str, list[int]] = {}
        for index, item in enumerate(self.questions):
            for name in item.sets:
                found.setdefault(name, []).append(index)
        return {name: np.array(indices) for name, indices in found.items()}

    def _questions_in(self, within: str) -> list[Some]:
        """The questions of a set."""
        return [self.questions[index] for index in self.sets[within]]

    def _answers_in(self, mode: str, within: str) -> list[list[Some]]:
        """Answers of a mode in a set, one list per seed."""
        return [[answers[index] for index in self.sets[within]] for answers in self.answers(mode)]

    @abc.abstractmethod
    def _count(self, answers: Sequence[Some]) -> np.ndarray:
        """Counts of answers, each to another question: ``(units, columns)``."""

    @cached_property
    def counts(self) -> dict[str, dict[str, np.ndarray]]:
        """Counts by mode and question set, ``(seeds, units, columns)``."""
        return {
            mode: {
                name: np.stack([self._count(answers) for answers in self._answers_in(mode, name)])
                for name in self.sets
            }
            for mode in self.modes
        }

    def _units(self, within: str) -> list[str]:
        """Unit of the bootstrap of each row of `_count`: the question's image."""
        return [item.image or item.id for item in self._questions_in(within)]

    @abc.abstractmethod
    def _rates(self, counts: np.ndarray) -> dict[str, np.ndarray]:
        """Rates by name, of shape ``(...)``, from summed counts, ``(..., columns)``.

        A rate is NaN where there is nothing to count.
        """

    def _known(self, within: str) -> Sequence[str]:
        """Names of the compared scores that a question set has."""
        return self.compared

    @abc.abstractmethod
    def _sizes(self, counts: np.ndarray, within: str) -> dict[str, Any]:
        """Numbers of what was counted in a question set."""

    def _constants(self, within: str) -> dict[str, float]:
        """Scores of a question set that do not depend on the answers."""
        return {}

    def _resampled(self, counts: np.ndarray, within: str) -> np.ndarray:
        """Column sums of bootstrap samples of the counts of a question set."""
        return bootstrap_sums(counts, self._units(within), self.resamples, self.seed)

    def _right(self, mode: str, within: str) -> np.ndarray | None:
        """Whether each answer in a set is right, ``(seeds, questions)``; ``None``: not known."""
        answers = self._answers_in(mode, within)
        return np.array([[self._fault(item) is None for item in one] for one in answers])

    @abc.abstractmethod
    def _fault(self, item: Some) -> tuple[float, str] | None:
        """Size of an answer's fault and a note on it; ``None``: the answer has none."""

    @abc.abstractmethod
    def _cells(self, score: Mapping[str, Any]) -> dict[str, str]:
        """Cells of the full table, by column, besides the main score and the cost."""

    @abc.abstractmethod
    def _notes(self) -> dict[str, Any]:
        """Explanations of the numbers, each with whether it is needed."""

    def _scored(self, mode: str, within: str) -> dict[str, Any]:
        """Scores of a mode in a question set, with intervals and their spread over seeds."""
        counts = self.counts[mode][within]
        table = counts.sum(0)
        found, draws = self._rates(table.sum(0)), self._rates(self._resampled(table, within))
        known = [name for name, value in found.items() if not np.isnan(value)]
        spread = None
        if len(counts) > 1:
            by_seed = self._rates(counts.sum(1))
            spread = {name: float(by_seed[name].std(ddof=1)) for name in known}
        return {
            **{name: float(value) if name in known else None for name, value in found.items()},
            **self._constants(within),
            "intervals": {name: interval(draws[name][~np.isnan(draws[name])]) for name in known},
            **self._sizes(counts, within),
            "seed_sd": spread,
        }

    @cached_property
    def summary(self) -> dict[str, Any]:
        """All numbers and settings of the report."""
        return {
            **self.settings,
            **self._basis(),
            **self._asked(),
            "modes": {mode: {**self.cost(mode), **self._found(mode)} for mode in self.modes},
            "comparisons": [dataclasses.asdict(found) for found in self.comparisons],
        }

    def _asked(self) -> dict[str, Any]:
        """Entries of the summary on the question sets."""
        return {"sets": {name: len(indices) for name, indices in self.sets.items()}}

    def _found(self, mode: str) -> dict[str, Any]:
        """Entries of the summary on a mode, besides its cost."""
        return {"sets": {name: self._scored(mode, name) for name in self.sets}}

    def _pairs(self) -> list[tuple[str, str]]:
        return super()._pairs() + list(self.paired.values())

    def rivals(self, mode: str) -> list[tuple[str, str]]:
        """Comparisons of a mode with its controls, those that are computed too."""
        return super().rivals(mode) + [pair for one, pair in self.paired.items() if one == mode]

    @cached_property
    def comparisons(self) -> list[ItemComparison]:
        """Comparison of each mode with its baselines and controls, in every set."""
        return corrected([self._compared(*p, name) for name in self.sets for p in self._pairs()])

    def compare(
        self,
        other: CountedReport[Some] | str,
        *,
        mode: str | None = None,
        other_mode: str | None = None,
    ) -> list[ItemComparison]:
        """Compares two modes of this report, or one with a mode of another report.

        Args:
            other: The second mode of this report, or another report on the same questions.
            mode: Mode of this report that is the baseline; ``None``: its first mode.
            other_mode: Mode of the other report; ``None``: its first mode.

        Returns:
            One comparison for each set; p-values are corrected by Holm.

        Raises:
            OptionError: The reports have different questions or different parsers.
            UnknownNameError: There is no such mode.
        """
        first = mode or self.modes[0]
        if isinstance(other, str):
            return corrected([self._compared(first, other, name) for name in self.sets])
        self._refuse(other)
        second = other_mode or other.modes[0]
        named = f"{second} (other)"
        items = [item for answers in self.answers(first) for item in answers]
        for answers in other.answers(second):
            items += [dataclasses.replace(item, mode=named) for item in answers]
        joined = type(self)(items, resamples=self.resamples, seed=self.seed, **self.options)
        return corrected([joined._compared(first, named, name) for name in self.sets])

    def _refuse(self, other: CountedReport[Some]) -> None:
        """Refuses a report that cannot be compared with this one; see `compare`."""
        truths, others = ({i.id: self.truth(i) for i in one.questions} for one in (self, other))
        if truths != others:
            raise OptionError(
                f"the reports have different {self.asked}; compare runs on the same data"
            )

    def _compared(self, first: str, second: str, within: str) -> ItemComparison:
        for mode in (first, second):
            self.answers(mode)
        before, after = (self.counts[mode][within].sum(0) for mode in (first, second))
        found = differences(
            before,
            after,
            self._units(within),
            self._rates,
            self._known(within),
            self.resamples,
            self.seed,
        )
        was, now = (self._right(mode, within) for mode in (first, second))
        flipped = None
        if was is not None and now is not None and len(was) == len(now) == 1:
            asked: list[Any] = self._questions_in(within)
            flipped = flips(was[0], now[0], [item.target for item in asked])
        return ItemComparison(
            first=first, second=second, within=within, differences=found, flips=flipped
        )

    def scores(self, mode: str, within: str) -> dict[str, Any]:
        """Scores of a mode on a question set, from the summary."""
        found: dict[str, Any] = self.summary["modes"][mode]
        return found["sets"][within] if "sets" in found else found

    def level(self, mode: str, within: str) -> float:
        """The main score of a mode on a question set."""
        return float(self.scores(mode, within)[self.compared[0]])

    def rows(self) -> list[dict[str, str]]:
        """Table of all scores with a row per mode and set; empty columns are left out."""
        rows = []
        main, (share, ends) = self.compared[0], self.columns
        for mode, found in self.summary["modes"].items():
            cost = {
                "failed": str(found["failed"] or ""),
                "changed %": percent(found["changed"], ".1f"),
                "rows/token": number(found["rows_per_token"]),
                "forwards/token": number(found["forwards_per_token"]),
                "s/answer": number(found["mean_seconds"], ".3f"),
            }
            for name in self.sets:
                score = self.scores(mode, name)
                first = {
                    "mode": mode,
                    "set": name if "sets" in found else "",
                    share: percent(score[main]),
                    ends: span(score, main),
                    "seeds sd": percent((score["seed_sd"] or {}).get(main)),
                }
                rows.append(first | self._cells(score) | cost)
        return without_empty(rows)

    def about(self) -> str:
        """Explains the numbers in a sentence or two."""
        limited = "only a part of the set was scored: not a result to report"
        notes = {**self._notes(), limited: self.conditions.get("limit")}
        return "; ".join(note for note, needed in notes.items() if needed)

    def worst(self, count: int = 5, mode: str | None = None) -> Examples:
        """Returns answers with a fault, the largest first.

        Args:
            count: Largest number of answers.
            mode: Name of the mode; ``None``: the first.
        """
        answers = [item for one in self.answers(mode or self.modes[0]) for item in one]
        faults = [(fault, item) for item in answers if (fault := self._fault(item)) is not None]
        faults.sort(key=lambda one: -one[0][0])
        return self.shown([item for _, item in faults[:count]], [n for (_, n), _ in faults[:count]])

    def figures(self) -> dict[str, Figure | bytes]:
        """Figures by name; a figure without data is left out."""
        figure = plots.forest(self.comparisons, self.compared[0])
        return {} if figure is None else {"differences": figure}


def span(score: Mapping[str, Any], name: str) -> str:
    """The 95 % interval of a score, in percent."""
    low, high = score["intervals"][name]
    return f"{percent(low)} to {percent(high)}"
