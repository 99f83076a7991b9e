"""`YesNoReport`: yes/no answers of several modes, with controls that a better method has to beat.

Each mode is compared with the shifted baseline: a constant is added to the baseline's margins, so
that it answers yes as often as the mode. The constant is fitted on other images
(`mmdecode.evaluation.stats.margins`). If the shifted baseline gains as much as the mode, the gain
comes from answering yes more often. Tasks: POPE, MME, AMBER's questions, VSR and HallusionBench.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.errors import OptionError, UnknownNameError
from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.examples import Examples
from mmdecode.evaluation.report.item_comparison import (
    Difference,
    ItemComparison,
    corrected,
    difference,
    differences,
    flips,
)
from mmdecode.evaluation.report.item_report import ItemReport
from mmdecode.evaluation.report.layout import Rows, number, percent, without_empty
from mmdecode.evaluation.stats import margins as margins_of
from mmdecode.evaluation.stats.intervals import interval
from mmdecode.evaluation.vision.answers import Label, parser_of
from mmdecode.evaluation.vision.items import YesNoItem, indices_by_set
from mmdecode.evaluation.vision.shifted import shifted
from mmdecode.evaluation.vision.tasks.amber import amber_scores
from mmdecode.evaluation.vision.tasks.hallusion import hallusion_scores
from mmdecode.evaluation.vision.tasks.mme import mme_scores
from mmdecode.evaluation.vision.yes_no import (
    Benchmark,
    ScoreFunction,
    count_answers,
    rates,
    summed,
    verdict,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASKS = ("pope", "mme", "amber", "vsr", "hallusionbench", "yes_no")
SCORERS: dict[str, ScoreFunction] = {"mme": mme_scores, "hallusionbench": hallusion_scores}
"""Scores of the benchmarks' own tools, by task; AMBER's have two levels."""
ALWAYS = "always yes"
COLUMNS = 4
"""Largest number of question sets for which the short table has a column per set."""
TOTALS = ("perception", "cognition", "hallucination", "aacc", "facc", "qacc")
"""Scores of the benchmarks' own tools that are shown in the short table."""
UNPARSED = 0.01
"""Share of unparsed answers above which a report asks to check prompt and stopping criterion."""


class YesNoReport(ItemReport[YesNoItem]):
    """Report on yes/no answers of several modes.

    For example::

        report = YesNoReport(read_items(folder, YesNoItem), task="pope")
        report.table(), report.compare("vcd"), report.worst(3)

    Args:
        items: See `ItemReport`.
        task: One of `TASKS`, or a task of one's own. MME, AMBER and HallusionBench add the scores
            of their own tools.
        parser: Name in `mmdecode.evaluation.vision.answers.PARSERS`.
        baseline_controls: Whether to add a mode that always answers yes, and the shifted baseline
            of each mode that is no control itself.
        **basis: See `ItemReport`.

    Raises:
        OptionError: See `ItemReport`.
        UnknownNameError: There is no such task or parser.
    """

    def __init__(
        self,
        items: Sequence[YesNoItem],
        *,
        task: str | Benchmark = "yes_no",
        parser: str = "leading",
        baseline_controls: bool = True,
        **basis: Any,
    ) -> None:
        if isinstance(task, str) and task not in TASKS:
            raise UnknownNameError.of("task", task, TASKS)
        self.task = task if isinstance(task, str) else task.name
        self._scores = SCORERS.get(task) if isinstance(task, str) else task.scores
        self.parser, self.title = parser_of(parser), f"{self.task}: yes or no"
        super().__init__(items, **basis)
        self._shifted: dict[str, str] = {}
        self._unshifted = 0
        self._aurocs: dict[tuple[str, str, bytes], tuple[float, np.ndarray]] = {}
        if baseline_controls:
            self._add_controls()

    def _add_controls(self) -> None:
        baseline, *others = self._recorded_modes
        plain = self.answers(baseline)[0]
        known = [item for item in plain if item.margin is not None]
        self._unshifted = len(plain) - len(known) if known and others else 0
        if self._unshifted:
            warnings.warn(
                f"{self._unshifted} answers of {baseline!r} have no margin; they are not used to "
                "fit the shift, and the shifted baseline contains them unchanged",
                stacklevel=3,
            )
        if len({item.image or item.id for item in known}) > 1:
            for mode in others:
                if mode not in self.controls:
                    share = np.mean([self._is_yes(answers) for answers in self.answers(mode)], 0)
                    name = f"{baseline} shifted to {mode}"
                    self.add(shifted(plain, share, name, self.seed), after=mode)
                    self._shifted[mode] = name
        unknown = "margin main_margin tokens passes forwards changed seconds error".split()
        self.add(
            [
                i.answered(mode=ALWAYS, output="Yes", seed=None, **dict.fromkeys(unknown))
                for i in self.questions
            ]
        )

    def verdicts(self, mode: str) -> list[list[Label | None]]:
        """Parsed answers of a mode, one list per seed, questions in order."""
        return [[verdict(item, self.parser) for item in one] for one in self.answers(mode)]

    def _is_yes(self, answers: Sequence[YesNoItem]) -> np.ndarray:
        return np.array([verdict(item, self.parser) == "yes" for item in answers])

    @cached_property
    def sets(self) -> dict[str, np.ndarray]:
        """Indices of the questions of each set; a question may be in a set several times."""
        return indices_by_set(self.questions)

    @cached_property
    def counts(self) -> dict[str, np.ndarray]:
        """Counts of `yes_no.count_answers` by mode, ``(seeds, questions, 6)``."""
        targets = [item.target for item in self.questions]
        return {
            mode: np.stack([count_answers(one, targets) for one in self.verdicts(mode)])
            for mode in self.modes
        }

    @cached_property
    def margins(self) -> dict[str, np.ndarray]:
        """Margin (logit of yes minus no) by mode, ``(seeds, questions)``; NaN where unknown."""
        return {
            mode: np.array(
                [
                    [np.nan if i.margin is None or i.error else i.margin for i in answers]
                    for answers in self.answers(mode)
                ]
            )
            for mode in self.modes
        }

    @cached_property
    def summary(self) -> dict[str, Any]:
        """All numbers and settings of the report."""
        return {
            "task": self.task,
            "parser": self.parser.name,
            "parser_origin": self.parser.origin,
            **self._basis(),
            "sets": {
                name: {
                    "questions": len(indices),
                    "yes": sum(self.questions[index].target == "yes" for index in indices),
                }
                for name, indices in self.sets.items()
            },
            "modes": {mode: self._mode(mode) for mode in self.modes},
            "comparisons": [dataclasses.asdict(found) for found in self.comparisons],
        }

    def _mode(self, mode: str) -> dict[str, Any]:
        return {
            **self.cost(mode),
            "computed": mode not in self._recorded_modes,
            "sets": {name: self._set(mode, name) for name in self.sets},
            "task": self._own_scores(mode),
        }

    def _set(self, mode: str, name: str) -> dict[str, Any]:
        indices = self.sets[name]
        counts = self.counts[mode][:, indices]
        score = summed(
            counts.reshape(-1, counts.shape[-1]),
            [self.image_names[index] for _ in counts for index in indices],
            self.parser,
            self.resamples,
            self.seed,
        )
        spread = None
        if len(counts) > 1:
            by_seed = rates(counts.sum(1), self.parser.drops_unparsed)
            spread = {name: float(values.std(ddof=1)) for name, values in by_seed.items()}
        return {
            **dataclasses.asdict(score),
            "seed_sd": spread,
            "margin": self._margin(mode, name),
        }

    def _margin(self, mode: str, name: str) -> dict[str, Any] | None:
        """Threshold-free scores of the margins, on questions that have a margin in every seed.

        Returns:
            The scores, and under ``missing`` the number of other questions; ``None``: the questions
            with a margin all have the same right answer.
        """
        indices = self.sets[name]
        found, positive = self.margins[mode][:, indices], self._positive(indices)
        known = ~np.isnan(found).any(0)
        if not _both(positive[known]):
            return None
        value, draws = self._auroc(mode, name, known)
        low, high = interval(_known(draws))
        found, positive = found[:, known], positive[known]
        best = [margins_of.best_threshold(one, positive) for one in found]
        return {
            "auroc": value,
            "auroc_low": low,
            "auroc_high": high,
            "average_precision": float(
                np.mean([margins_of.average_precision(one, positive) for one in found])
            ),
            "best_accuracy": float(np.mean([accuracy for accuracy, _ in best])),
            "missing": int((~known).sum()),
        }

    def _positive(self, indices: np.ndarray) -> np.ndarray:
        return np.array([self.questions[index].target == "yes" for index in indices])

    def _own_scores(self, mode: str) -> dict[str, Any] | None:
        """Scores of the benchmark's own tool, averaged over seeds; ``None``: it has none."""
        if self.task == "amber":
            return {"amber": [amber_scores(answers) for answers in self.answers(mode)]}
        if self._scores is None:
            return None
        found = []
        for answers, parsed in zip(self.answers(mode), self.verdicts(mode), strict=True):
            right = [v == i.target for v, i in zip(parsed, answers, strict=True)]
            found.append(self._scores(answers, right))
        return {name: float(np.mean([one[name] for one in found])) for name in found[0]}

    @cached_property
    def comparisons(self) -> list[ItemComparison]:
        """Comparison of each mode with its baselines and the shifted baseline, in every set."""
        pairs = self._pairs() + [(control, mode) for mode, control in self._shifted.items()]
        return corrected([self._compared(*pair, name) for name in self.sets for pair in pairs])

    def compare(
        self,
        other: YesNoReport | str,
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
        if other.parser != self.parser:
            raise OptionError(
                f"one report is parsed by {self.parser.name!r}, the other by "
                f"{other.parser.name!r}; use the same parser"
            )
        second = other_mode or other.modes[0]
        asked = {item.id: (item.target, item.sets) for item in self.questions}
        if asked != {item.id: (item.target, item.sets) for item in other.questions}:
            raise OptionError("the reports have different questions; compare runs on the same data")
        mine, theirs = self.answers(first), other.answers(second)
        both = [item for answers in mine for item in answers] + [
            dataclasses.replace(item, mode=f"{second} (other)") for one in theirs for item in one
        ]
        joined = YesNoReport(
            both,
            task=self.task,
            parser=self.parser.name,
            baseline_controls=False,
            resamples=self.resamples,
            seed=self.seed,
        )
        return joined.compare(f"{second} (other)")

    def _compared(self, first: str, second: str, name: str) -> ItemComparison:
        indices = self.sets[name]
        for mode in (first, second):
            self.answers(mode)
        before, after = (self.counts[mode][:, indices] for mode in (first, second))
        found = differences(
            before.sum(0),
            after.sum(0),
            [self.image_names[index] for index in indices],
            lambda counts: rates(counts, self.parser.drops_unparsed),
            ("accuracy", "yes_ratio", "f1"),
            self.resamples,
            self.seed,
        )
        ranked = self._ranking(first, second, name)
        flipped = None
        if len(before) == len(after) == 1:
            was, now = (counts[0][:, [0, 2]].any(1) for counts in (before, after))
            flipped = flips(was, now, [self.questions[index].target for index in indices])
        return ItemComparison(
            first=first,
            second=second,
            within=name,
            differences=found | ({"auroc": ranked} if ranked else {}),
            flips=flipped,
        )

    def _ranking(self, first: str, second: str, name: str) -> Difference | None:
        """Difference in AUROC, on questions that have a margin in both modes."""
        indices = self.sets[name]
        both = [self.margins[mode][:, indices] for mode in (first, second)]
        known = ~np.isnan(np.concatenate(both)).any(0)
        if not _both(self._positive(indices)[known]):
            return None
        (before, first_draws), (after, second_draws) = (
            self._auroc(mode, name, known) for mode in (first, second)
        )
        return difference(after - before, _known(second_draws - first_draws))

    def _auroc(self, mode: str, name: str, known: np.ndarray) -> tuple[float, np.ndarray]:
        """AUROC of the ``known`` questions, averaged over seeds, and its bootstrap over images."""
        key = mode, name, known.tobytes()
        if key not in self._aurocs:
            indices = self.sets[name]
            images = [self.image_names[index] for index in indices]
            margins = np.where(known, self.margins[mode][:, indices], np.nan)
            # where no branch is random, the seeds have the same margins
            same = np.array_equal(margins, np.broadcast_to(margins[0], margins.shape), True)
            distinct, positive = margins[:1] if same else margins, self._positive(indices)
            values = [margins_of.auroc(one[known], positive[known]) for one in distinct]
            draws = [margins_of.auroc_draws(m, positive, images, seed=self.seed) for m in distinct]
            self._aurocs[key] = float(np.mean(values)), np.mean(draws, 0)
        return self._aurocs[key]

    def summary_line(self, mode: str, within: str) -> str:
        """Accuracy, F1 and share of answers yes of a mode on a question set, in words."""
        score = self.summary["modes"][mode]["sets"][within]
        return (
            f"accuracy {percent(score['accuracy'], '.1f')} %, F1 {percent(score['f1'], '.1f')} %, "
            f"yes {percent(score['yes_ratio'], '.0f')} %"
        )

    def level(self, mode: str, within: str) -> float:
        """Accuracy of a mode on a question set."""
        return float(self.summary["modes"][mode]["sets"][within]["accuracy"])

    def rivals(self, mode: str) -> list[tuple[str, str]]:
        """Pairs of each recorded control with the mode, and of the shifted baseline with it."""
        return super().rivals(mode) + [
            (control, mode) for control in [self._shifted.get(mode)] if control
        ]

    def brief(self) -> list[Rows]:
        """Short table with a row per mode: accuracy by set, other scores averaged over the sets."""
        own = {m: found["task"] or {} for m, found in self.summary["modes"].items()}
        rows = []
        for mode, found in self.summary["modes"].items():
            scores = found["sets"]

            def mean(name: str, form: str, scores: dict[str, Any] = scores) -> str:
                return percent(float(np.mean([one[name] for one in scores.values()])), form)

            of_sets = {f"{name} %": percent(one["accuracy"], ".1f") for name, one in scores.items()}
            margins = [one["margin"]["auroc"] for one in scores.values() if one["margin"]]
            ranked = float(np.mean(margins)) if len(margins) == len(scores) else None
            totals = {k: v for k, v in own[mode].items() if k in TOTALS or self.task not in TASKS}
            rows.append(
                {"mode": mode}
                | (of_sets if 1 < len(scores) <= COLUMNS else {})
                | {"accuracy %": mean("accuracy", ".1f"), "F1 %": mean("f1", ".1f")}
                | {"yes %": mean("yes_ratio", ".0f"), "unparsed %": mean("unparsed", ".1f")}
                | {"AUROC": number(ranked, ".3f")}
                | {k: number(v, ".2f") for k, v in totals.items()}
            )
        return [without_empty(rows)]

    def rows(self) -> list[dict[str, str]]:
        """Table of all scores with a row per mode and set; empty columns are left out."""
        rows = []
        for mode, found in self.summary["modes"].items():
            for name, score in found["sets"].items():
                margin = score["margin"] or {}
                low, high = score["intervals"]["accuracy"]
                spread = (score["seed_sd"] or {}).get("accuracy")
                rows.append(
                    {
                        "mode": mode,
                        "set": name,
                        "accuracy %": percent(score["accuracy"]),
                        "95 %": f"{percent(low)} to {percent(high)}",
                        "seeds sd": percent(spread),
                        "precision %": percent(score["precision"]),
                        "recall %": percent(score["recall"]),
                        "F1 %": percent(score["f1"]),
                        "yes %": percent(score["yes_ratio"], ".1f"),
                        "unparsed %": percent(score["unparsed"], ".1f"),
                        "AUROC": number(margin.get("auroc"), ".4f"),
                        "AP": number(margin.get("average_precision"), ".4f"),
                        "best accuracy %": percent(margin.get("best_accuracy")),
                        "no margin": str(margin["missing"]) if margin.get("missing") else "",
                        "failed": str(found["failed"]) if found["failed"] else "",
                        "changed %": percent(found["changed"], ".1f"),
                        "rows/token": number(found["rows_per_token"]),
                        "forwards/token": number(found["forwards_per_token"]),
                        "s/answer": number(found["mean_seconds"], ".3f"),
                    }
                )
        return without_empty(rows)

    def tables(self) -> list[Rows]:
        """The table of scores, and a table of the scores of the benchmark's own tool, if any."""
        own = {mode: found["task"] for mode, found in self.summary["modes"].items()}
        if self.task == "amber":
            rows = [
                {"mode": mode, "dimension": name}
                | {
                    k: number(float(np.mean([s[name][k] for s in found["amber"]])), ".1f")
                    for k in v
                }
                for mode, found in own.items()
                for name, v in found["amber"][0].items()
            ]
            return [self.rows(), rows]
        if own[self.modes[0]] is None:
            return [self.rows()]
        form = ".2f" if self.task == "mme" else ".4f"
        return [
            self.rows(),
            [
                {"mode": m} | {k: number(v, form) for k, v in found.items()}
                for m, found in own.items()
            ],
        ]

    def about(self) -> str:
        """Explains the numbers in a sentence or two."""
        found = self.summary
        parts = [
            f"{found['questions']} questions on {found['images']} images; parser "
            f"{self.parser.name} ({self.parser.origin}), yes is positive; 95 % interval by "
            "bootstrap over images"
        ]
        sets = len(next(iter(found["modes"].values()))["sets"])
        parts += [f"the short table has means over {sets} sets, of equal weight"] * (sets > COLUMNS)
        if self.task == "amber":
            parts.append("in the table by dimension, as AMBER's tool has it, no is positive")
        shares = [s["unparsed"] for m in found["modes"].values() for s in m["sets"].values()]
        if max(shares) > UNPARSED:
            parts.append(
                f"up to {100 * max(shares):.1f} % of the answers are neither yes nor no: check "
                "the prompt and the stop rule"
            )
        if self._shifted:
            parts.append(
                "a shifted baseline answers yes as often as its mode, by a constant fitted on "
                "other images; a gain that it has too comes from answering yes more often"
            )
        if self._shifted and self._unshifted:
            parts.append(f"{self._unshifted} answers of the baseline have no margin: not shifted")
        margins = [s["margin"] for m in found["modes"].values() for s in m["sets"].values()]
        if any(one and one["missing"] for one in margins):
            parts.append(
                "AUROC, AP and best accuracy leave out questions without a margin, and AUROC is "
                "compared on those that have one in both modes"
            )
        if self.conditions.get("limit"):
            parts.append("only a part of the set was scored: not a result to report")
        return "; ".join(parts)

    def worst(self, count: int = 5, mode: str | None = None) -> Examples:
        """Returns wrong answers, ordered from the largest margin to the smallest.

        Args:
            count: Largest number of answers.
            mode: Name of the mode; ``None``: the first.
        """
        found: list[tuple[float, YesNoItem, str]] = []
        name = mode or self.modes[0]
        for answers, parsed in zip(self.answers(name), self.verdicts(name), strict=True):
            for item, answer in zip(answers, parsed, strict=True):
                if answer != item.target:
                    size = abs(item.margin) if item.margin is not None else 0.0
                    note = f"says {answer or 'neither'}, right is {item.target}"
                    margin = "" if item.margin is None else f", margin {item.margin:+.2f}"
                    found.append((size, item, note + margin))
        found.sort(key=lambda one: -one[0])
        return self.shown([i for _, i, _ in found[:count]], [n for _, _, n in found[:count]])

    def figures(self) -> dict[str, Figure | bytes]:
        """Figures by name; a figure without data is left out."""
        scores = {m: f["sets"] for m, f in self.summary["modes"].items() if m != ALWAYS}
        first = next(iter(self.sets))
        positive = self._positive(self.sets[first])
        known = {
            mode: self.margins[mode][0, self.sets[first]]
            for mode in self._recorded_modes
            if (self.summary["modes"][mode]["sets"][first]["margin"] or {}).get("missing") == 0
        }
        found = {
            "accuracy_against_yes": plots.accuracy_against_yes(scores, self._shifted),
            "margin_roc": plots.margin_roc(known, positive, first) if known else None,
            "differences": plots.forest(self.comparisons, "accuracy"),
        }
        return {name: figure for name, figure in found.items() if figure is not None}


def _both(positive: np.ndarray) -> bool:
    """Whether there are both yes-questions and no-questions."""
    return bool(positive.any()) and not positive.all()


def _known(draws: np.ndarray) -> np.ndarray:
    """Bootstrap draws of samples that contain both yes-questions and no-questions."""
    return draws[~np.isnan(draws)]
