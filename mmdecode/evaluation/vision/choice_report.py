"""`ChoiceReport`: accuracy on multiple-choice questions, and on pairs and groups of questions."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.examples import Examples
from mmdecode.evaluation.report.item_comparison import ItemComparison, corrected, differences, flips
from mmdecode.evaluation.report.item_report import ItemReport
from mmdecode.evaluation.report.layout import Rows, number, percent, without_empty
from mmdecode.evaluation.vision.answers import choice
from mmdecode.evaluation.vision.items import ChoiceItem, indices_by_set
from mmdecode.evaluation.vision.tasks.spatial import count_choices, rates, summed, unit_of
from mmdecode.evaluation.vision.yes_no_report import UNPARSED

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ChoiceReport(ItemReport[ChoiceItem]):
    """Report on multiple-choice answers; see `ItemReport` for the arguments."""

    unit = "group of questions, else image"

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.conditions.get("task", "spatial"))

    @property
    def title(self) -> str:
        """Title of the page."""
        return "Spatial relations" if self.task == "spatial" else f"{self.task}: choices"

    @cached_property
    def sets(self) -> dict[str, np.ndarray]:
        """Indices of the questions of each set."""
        return indices_by_set(self.questions)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """All numbers and settings of the report."""
        return {
            "task": self.task,
            **self._basis(),
            "sets": {name: len(indices) for name, indices in self.sets.items()},
            "modes": {
                mode: {
                    **self.cost(mode),
                    "sets": {name: self._set(mode, name) for name in self.sets},
                }
                for mode in self.modes
            },
            "comparisons": [dataclasses.asdict(found) for found in self.comparisons],
        }

    def _set(self, mode: str, name: str) -> dict[str, Any]:
        questions, counts = self._chosen(mode, name)[0], self._counts(mode, name)
        score = summed(questions, counts.sum(0), self.resamples, self.seed)
        spread = None
        if len(counts) > 1:
            by_seed = rates(counts.sum(1))
            spread = {name: float(by_seed[name].std(ddof=1)) for name in score.intervals}
        return {**dataclasses.asdict(score), "seed_sd": spread}

    def _counts(self, mode: str, name: str) -> np.ndarray:
        """Counts of `spatial.count_choices` of a mode in a set, ``(seeds, units, 7)``."""
        chosen = self._chosen(mode, name)
        units = dict.fromkeys(map(unit_of, chosen[0]))
        counted = map(count_choices, chosen)
        return np.array([[table[unit] for unit in units] for table in counted])

    def _chosen(self, mode: str, name: str) -> list[list[ChoiceItem]]:
        """Answers of a mode in a set, one list per seed."""
        return [[answers[index] for index in self.sets[name]] for answers in self.answers(mode)]

    @cached_property
    def comparisons(self) -> list[ItemComparison]:
        """Comparison of each mode with its baselines, in every set."""
        return corrected([self._compared(*p, name) for name in self.sets for p in self._pairs()])

    def compare(self, other: str, *, mode: str | None = None) -> list[ItemComparison]:
        """Compares two modes, in every set.

        Args:
            other: Mode whose gain is computed.
            mode: Mode that it is compared with; ``None``: the first of this report.

        Raises:
            UnknownNameError: There is no such mode.
        """
        first = mode or self.modes[0]
        return corrected([self._compared(first, other, name) for name in self.sets])

    def _compared(self, first: str, second: str, name: str) -> ItemComparison:
        before, after = (self._chosen(mode, name) for mode in (first, second))
        tables = [self._counts(mode, name).sum(0) for mode in (first, second)]
        units = list(dict.fromkeys(map(unit_of, before[0])))
        known = ["individual"]
        known += [n for n, column in (("pair", 3), ("set", 5)) if tables[0][:, column].all()]
        flipped = None
        if len(before) == len(after) == 1:
            was, now = (np.array([_right(item) for item in one[0]]) for one in (before, after))
            flipped = flips(was, now, [item.target for item in before[0]])
        return ItemComparison(
            first=first,
            second=second,
            within=name,
            differences=differences(
                tables[0], tables[1], units, rates, known, self.resamples, self.seed
            ),
            flips=flipped,
        )

    def summary_line(self, mode: str, within: str) -> str:
        """Accuracy of a mode on a question set, and the accuracy of chance, in words."""
        score = self.summary["modes"][mode]["sets"][within]
        chance = percent(score["chance"], ".1f")
        return f"{percent(score['individual'], '.1f')} % right, by chance {chance} %"

    def level(self, mode: str, within: str) -> float:
        """Accuracy of a mode on a question set minus the accuracy of chance."""
        score = self.summary["modes"][mode]["sets"][within]
        return float(score["individual"] - score["chance"])

    def brief(self) -> list[Rows]:
        """Short table with a row per mode: accuracy on each set, and share of unparsed answers."""
        rows = []
        for mode, found in self.summary["modes"].items():
            scores = found["sets"]
            unparsed = float(np.mean([one["unparsed"] for one in scores.values()]))
            shares = {f"{n} %": percent(one["individual"], ".1f") for n, one in scores.items()}
            rows.append({"mode": mode} | shares | {"unparsed %": percent(unparsed, ".1f")})
        return [rows]

    def rows(self) -> list[dict[str, str]]:
        """Table of all scores with a row per mode and set; empty columns are left out."""
        rows = []
        for mode, found in self.summary["modes"].items():
            for name, score in found["sets"].items():
                low, high = score["intervals"]["individual"]
                spread = (score["seed_sd"] or {}).get("individual")
                rows.append(
                    {
                        "mode": mode,
                        "set": name,
                        "individual %": percent(score["individual"]),
                        "95 %": f"{percent(low)} to {percent(high)}",
                        "seeds sd": percent(spread),
                        "pairs %": percent(score["pair"]),
                        "sets %": percent(score["set"]),
                        "unparsed %": percent(score["unparsed"], ".1f"),
                        "chance %": percent(score["chance"], ".1f"),
                        "majority %": percent(score["majority"], ".1f"),
                        "failed": str(found["failed"]) if found["failed"] else "",
                        "rows/token": number(found["rows_per_token"]),
                        "forwards/token": number(found["forwards_per_token"]),
                        "s/answer": number(found["mean_seconds"], ".3f"),
                    }
                )
        return without_empty(rows)

    def about(self) -> str:
        """Explains the numbers in a sentence or two."""
        found = self.summary
        parts = [
            f"{found['questions']} questions on {found['images']} images; an answer counts if it "
            "names exactly one option; chance and majority need no image; 95 % interval by "
            "bootstrap over groups of questions"
        ]
        shares = [s["unparsed"] for m in found["modes"].values() for s in m["sets"].values()]
        if max(shares) > UNPARSED:
            parts.append(
                f"up to {100 * max(shares):.1f} % of the answers name no option, or several: name "
                "the options in the question, and look at the answers below"
            )
        if self.conditions.get("limit"):
            parts.append("only a part of the set was scored: not a result to report")
        return "; ".join(parts)

    def worst(self, count: int = 5, mode: str | None = None) -> Examples:
        """Returns the first wrong answers of a mode.

        Args:
            count: Largest number of answers.
            mode: Name of the mode; ``None``: the first.
        """
        answers = self.answers(mode or self.modes[0])
        items = [item for one in answers for item in one if not _right(item)][:count]
        return self.shown(items, [f"right is {item.target}" for item in items])

    def figures(self) -> dict[str, Figure | bytes]:
        """Figures by name; a figure without data is left out."""
        figure = plots.forest(self.comparisons, "individual")
        return {} if figure is None else {"differences": figure}


def _right(item: ChoiceItem) -> bool:
    return item.error is None and choice(item.output, item.options) == item.target
