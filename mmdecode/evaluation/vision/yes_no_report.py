"""`YesNoReport`: yes/no answers of several modes, with controls that a better method has to beat.

Each mode is compared with the shifted baseline: a constant is added to the baseline's margins, so
that it answers yes as often as the mode. The constant is fitted on other images
(`mmdecode.evaluation.stats.margins`). If the shifted baseline gains as much as the mode, the gain
comes from answering yes more often. Tasks: POPE, MME, AMBER's questions, VSR and HallusionBench.

Yes is the positive class. An answer that cannot be parsed, or is missing, is wrong and stays in
every denominator. Only a parser with ``drops_unparsed`` leaves it out of the recall
(`mmdecode.evaluation.vision.answers.Parser`).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.errors import OptionError, UnknownNameError
from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.item_comparison import ItemComparison, difference
from mmdecode.evaluation.report.item_report import UNPARSED, ItemReport
from mmdecode.evaluation.report.layout import Rows, number, percent, without_empty
from mmdecode.evaluation.stats import margins as margins_of
from mmdecode.evaluation.stats.intervals import interval
from mmdecode.evaluation.vision.answers import Label, Parser, parser_of
from mmdecode.evaluation.vision.items import YesNoItem
from mmdecode.evaluation.vision.tasks.amber import amber_scores
from mmdecode.evaluation.vision.tasks.hallusion import hallusion_scores
from mmdecode.evaluation.vision.tasks.mme import mme_scores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mmdecode.evaluation.vision.benchmarks import YesNoTask

CLASSES = (("yes", "yes"), ("yes", "no"), ("no", "no"), ("no", "yes"), (None, "yes"), (None, "no"))
"""Columns of `count_answers`: parsed and right answer of the answers that each counts."""
ScoreFunction = Callable[[Sequence[YesNoItem], Sequence[bool]], dict[str, float]]
"""Scores of a benchmark's own tool, by name, from answered items and whether each is right."""
TASKS: dict[str, ScoreFunction | None] = {
    "pope": None,
    "mme": mme_scores,
    "amber": None,
    "vsr": None,
    "hallusionbench": hallusion_scores,
    "yes_no": None,
}
"""Scores of the benchmarks' own tools, by task; AMBER's have two levels."""
ALWAYS = "always yes"
COLUMNS = 4
"""Largest number of question sets for which the short table has a column per set."""
TOTALS = ("perception", "cognition", "hallucination", "aacc", "facc", "qacc")
"""Scores of the benchmarks' own tools that are shown in the short table."""


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

    compared = ("accuracy", "yes_ratio", "f1")
    columns = ("accuracy %", "95 %")
    truth = attrgetter("target", "sets")

    def __init__(
        self,
        items: Sequence[YesNoItem],
        *,
        task: str | YesNoTask = "yes_no",
        parser: str = "leading",
        baseline_controls: bool = True,
        **basis: Any,
    ) -> None:
        if isinstance(task, str) and task not in TASKS:
            raise UnknownNameError.of("task", task, TASKS)
        self.task, self._scores = (
            (task, TASKS[task]) if isinstance(task, str) else (task.name, task.scores)
        )
        self.options = {"task": task, "parser": parser, "baseline_controls": False}
        self.parser, self.title = parser_of(parser), f"{self.task}: yes or no"
        super().__init__(items, **basis)
        self.settings = {
            "task": self.task,
            "parser": self.parser.name,
            "parser_origin": self.parser.origin,
        }
        self.paired: dict[str, tuple[str, str]] = {}
        self._unshifted = 0
        self._aurocs: dict[tuple[str, str, bytes], tuple[float, np.ndarray]] = {}
        if baseline_controls:
            self._add_controls()

    def _add_controls(self) -> None:
        baseline, *others = self.recorded_modes
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
                    share = np.mean(np.array(self.verdicts(mode)) == "yes", 0)
                    name = f"{baseline} shifted to {mode}"
                    self.add(shifted(plain, share, name, self.seed), after=mode)
                    self.paired[mode] = name, mode
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

    def _count(self, answers: Sequence[YesNoItem]) -> np.ndarray:
        parsed = [verdict(item, self.parser) for item in answers]
        return count_answers(parsed, [item.target for item in answers])

    def _rates(self, counts: np.ndarray) -> dict[str, np.ndarray]:
        return rates(counts, self.parser.drops_unparsed)

    def _sizes(self, counts: np.ndarray, within: str) -> dict[str, Any]:
        images = len(set(self._units(within)))
        return {"answers": counts[..., 0].size, "images": images, "parser": self.parser.name}

    @cached_property
    def positive(self) -> np.ndarray:
        """Whether the right answer to each question is yes, ``(questions,)``."""
        return np.array([item.target == "yes" for item in self.questions])

    @cached_property
    def margins(self) -> dict[str, np.ndarray]:
        """Margin (logit of yes minus no) by mode, ``(seeds, questions)``; NaN where unknown."""
        found = {}
        for mode in self.modes:
            margins = [[None if i.error else i.margin for i in one] for one in self.answers(mode)]
            found[mode] = np.array(margins, dtype=float)
        return found

    def _asked(self) -> dict[str, Any]:
        sizes = {}
        for name, indices in self.sets.items():
            sizes[name] = {"questions": len(indices), "yes": int(self.positive[indices].sum())}
        return {"sets": sizes}

    def _found(self, mode: str) -> dict[str, Any]:
        computed, own = mode not in self.recorded_modes, self._own_scores(mode)
        return {"computed": computed, **super()._found(mode), "task": own}

    def _scored(self, mode: str, within: str) -> dict[str, Any]:
        """Scores of a mode in a question set, also of its margins."""
        return super()._scored(mode, within) | {"margin": self._margin(mode, within)}

    def _margin(self, mode: str, name: str) -> dict[str, Any] | None:
        """Threshold-free scores of the margins, on questions that have a margin in every seed.

        Returns:
            The scores, and under ``missing`` the number of other questions; ``None``: the questions
            with a margin all have the same right answer.
        """
        indices = self.sets[name]
        known = ~np.isnan(self.margins[mode][:, indices]).any(0)
        found, positive = self.margins[mode][:, indices[known]], self.positive[indices[known]]
        if len(np.unique(positive)) < 2:
            return None
        value, draws = self._auroc(mode, name, known)
        low, high = interval(draws[~np.isnan(draws)])
        precisions = [margins_of.average_precision(one, positive) for one in found]
        accuracies = [margins_of.best_threshold(one, positive)[0] for one in found]
        return {
            "auroc": value,
            "auroc_low": low,
            "auroc_high": high,
            "average_precision": float(np.mean(precisions)),
            "best_accuracy": float(np.mean(accuracies)),
            "missing": int((~known).sum()),
        }

    def _own_scores(self, mode: str) -> dict[str, Any] | None:
        """Scores of the benchmark's own tool, averaged over seeds; ``None``: it has none."""
        if self.task == "amber":
            return {"amber": [amber_scores(answers) for answers in self.answers(mode)]}
        if self._scores is None:
            return None
        found = [
            self._scores(answers, [self._fault(item) is None for item in answers])
            for answers in self.answers(mode)
        ]
        return {name: float(np.mean([one[name] for one in found])) for name in found[0]}

    def _refuse(self, other: ItemReport[YesNoItem]) -> None:
        if isinstance(other, YesNoReport) and other.parser != self.parser:
            raise OptionError(
                f"one report is parsed by {self.parser.name!r}, the other by "
                f"{other.parser.name!r}; use the same parser"
            )
        super()._refuse(other)

    def _compared(self, first: str, second: str, within: str) -> ItemComparison:
        """Compares two modes, in AUROC too, on questions that have a margin in both."""
        found, indices = super()._compared(first, second, within), self.sets[within]
        both = [self.margins[mode][:, indices] for mode in (first, second)]
        known = ~np.isnan(np.concatenate(both)).any(0)
        if len(np.unique(self.positive[indices[known]])) < 2:
            return found
        (before, first_draws), (after, second_draws) = (
            self._auroc(mode, within, known) for mode in (first, second)
        )
        draws = second_draws - first_draws
        ranked = difference(after - before, draws[~np.isnan(draws)])
        return dataclasses.replace(found, differences=found.differences | {"auroc": ranked})

    def _auroc(self, mode: str, name: str, known: np.ndarray) -> tuple[float, np.ndarray]:
        """AUROC of the ``known`` questions, averaged over seeds, and its bootstrap over images."""
        key = mode, name, known.tobytes()
        if key not in self._aurocs:
            indices, images = self.sets[name], self._units(name)
            margins = np.where(known, self.margins[mode][:, indices], np.nan)
            # where no branch is random, the seeds have the same margins
            same = np.array_equal(margins, np.broadcast_to(margins[0], margins.shape), True)
            distinct, positive = margins[:1] if same else margins, self.positive[indices]
            values = [margins_of.auroc(one[known], positive[known]) for one in distinct]
            draws = [margins_of.auroc_draws(m, positive, images, seed=self.seed) for m in distinct]
            self._aurocs[key] = float(np.mean(values)), np.mean(draws, 0)
        return self._aurocs[key]

    def summary_line(self, mode: str, within: str) -> str:
        """Accuracy, F1 and share of answers yes of a mode on a question set, in words."""
        score = self.scores(mode, within)
        return (
            f"accuracy {percent(score['accuracy'], '.1f')} %, F1 {percent(score['f1'], '.1f')} %, "
            f"yes {percent(score['yes_ratio'], '.0f')} %"
        )

    def brief(self) -> list[Rows]:
        """Short table with a row per mode: accuracy by set, other scores averaged over the sets."""
        rows = []
        for mode, found in self.summary["modes"].items():
            scores = found["sets"]
            mean = {
                name: float(np.mean([one[name] for one in scores.values()]))
                for name in ("accuracy", "f1", "yes_ratio", "unparsed")
            }
            of_sets = {f"{name} %": percent(one["accuracy"], ".1f") for name, one in scores.items()}
            margins = [one["margin"]["auroc"] for one in scores.values() if one["margin"]]
            ranked = float(np.mean(margins)) if len(margins) == len(scores) else None
            own = {
                name: number(value, ".2f")
                for name, value in (found["task"] or {}).items()
                if name in TOTALS or self.task not in TASKS
            }
            rows.append(
                {"mode": mode}
                | (of_sets if 1 < len(scores) <= COLUMNS else {})
                | {
                    "accuracy %": percent(mean["accuracy"], ".1f"),
                    "F1 %": percent(mean["f1"], ".1f"),
                    "yes %": percent(mean["yes_ratio"], ".0f"),
                    "unparsed %": percent(mean["unparsed"], ".1f"),
                    "AUROC": number(ranked, ".3f"),
                }
                | own
            )
        return [without_empty(rows)]

    def _cells(self, score: Mapping[str, Any]) -> dict[str, str]:
        margin = score["margin"] or {}
        return {
            "precision %": percent(score["precision"]),
            "recall %": percent(score["recall"]),
            "F1 %": percent(score["f1"]),
            "yes %": percent(score["yes_ratio"], ".1f"),
            "unparsed %": percent(score["unparsed"], ".1f"),
            "AUROC": number(margin.get("auroc"), ".4f"),
            "AP": number(margin.get("average_precision"), ".4f"),
            "best accuracy %": percent(margin.get("best_accuracy")),
            "no margin": str(margin.get("missing") or ""),
        }

    def tables(self) -> list[Rows]:
        """The table of scores, and a table of the scores of the benchmark's own tool, if any."""
        own = {mode: found["task"] for mode, found in self.summary["modes"].items()}
        form = ".2f" if self.task == "mme" else ".4f"
        rows: list[dict[str, str]] = []
        for mode, found in own.items():
            if self.task == "amber":
                for dimension in found["amber"][0]:
                    by_seed = [scores[dimension] for scores in found["amber"]]
                    means = {k: float(np.mean([one[k] for one in by_seed])) for k in by_seed[0]}
                    shown = {name: number(value, ".1f") for name, value in means.items()}
                    rows.append({"mode": mode, "dimension": dimension} | shown)
            elif found is not None:
                rows.append({"mode": mode} | {k: number(v, form) for k, v in found.items()})
        return [self.rows(), rows] if rows else [self.rows()]

    def _notes(self) -> dict[str, Any]:
        scores = [self.scores(mode, name) for mode in self.modes for name in self.sets]
        unparsed = max(score["unparsed"] for score in scores)
        return {
            f"{len(self.ids)} questions on {len(set(self.image_names))} images; parser "
            f"{self.parser.name} ({self.parser.origin}), yes is positive; 95 % interval by "
            "bootstrap over images": True,
            f"the short table has means over {len(self.sets)} sets, of equal weight": (
                len(self.sets) > COLUMNS
            ),
            "in the table by dimension, as AMBER's tool has it, no is positive": (
                self.task == "amber"
            ),
            f"up to {100 * unparsed:.1f} % of the answers are neither yes nor no: check the "
            "prompt and the stop rule": unparsed > UNPARSED,
            "a shifted baseline answers yes as often as its mode, by a constant fitted on other "
            "images; a gain that it has too comes from answering yes more often": self.paired,
            f"{self._unshifted} answers of the baseline have no margin: not shifted": (
                self.paired and self._unshifted
            ),
            "AUROC, AP and best accuracy leave out questions without a margin, and AUROC is "
            "compared on those that have one in both modes": any(
                score["margin"] and score["margin"]["missing"] for score in scores
            ),
        }

    def _fault(self, item: YesNoItem) -> tuple[float, str] | None:
        answer = verdict(item, self.parser)
        if answer == item.target:
            return None
        margin = "" if item.margin is None else f", margin {item.margin:+.2f}"
        note = f"says {answer or 'neither'}, right is {item.target}{margin}"
        return abs(item.margin or 0.0), note

    def figures(self) -> dict[str, Figure | bytes]:
        """Figures by name; a figure without data is left out."""
        scores = {m: f["sets"] for m, f in self.summary["modes"].items() if m != ALWAYS}
        first, indices = next(iter(self.sets.items()))
        known = {
            mode: self.margins[mode][0, indices]
            for mode in self.recorded_modes
            if (self.scores(mode, first)["margin"] or {}).get("missing") == 0
        }
        controls = {mode: control for mode, (control, _) in self.paired.items()}
        found = {"accuracy_against_yes": plots.accuracy_against_yes(scores, controls)}
        if known:
            found["margin_roc"] = plots.margin_roc(known, self.positive[indices], first)
        return {**found, **super().figures()}


def shifted(
    plain: Sequence[YesNoItem], yes_share: np.ndarray, mode: str, seed: int = 0
) -> list[YesNoItem]:
    """Shifts a model's margins so that it answers yes as often as a method; returns the answers.

    Args:
        plain: The model's answers; answers without a margin are kept and not used for fitting.
        yes_share: Share of the method's answers to each question that are yes, see
            `mmdecode.evaluation.stats.margins.cross_fitted_shifts`.
        mode: Mode name of the returned answers.
        seed: Seed of the folds of cross-fitting.

    Raises:
        OptionError: Fewer than two images have margins.
    """
    known = np.array([item.margin is not None for item in plain])
    # a question that counts in three splits weighs three times in the yes-ratio
    repeated = np.repeat(np.arange(len(plain)), [len(item.sets) for item in plain])
    repeated = repeated[known[repeated]]
    margins = np.array([item.margin for item in plain], dtype=float)
    images = [plain[index].image or plain[index].id for index in repeated.tolist()]
    shifts = np.zeros(len(plain))
    # every repeat of a question has its image's shift
    shifts[repeated] = margins_of.cross_fitted_shifts(
        margins[repeated], yes_share[repeated], images, seed=seed
    )
    moved = margins + shifts
    return [
        item.answered(mode=mode, output="Yes" if margin > 0 else "No", margin=float(margin))
        if has_margin
        else dataclasses.replace(item, mode=mode)
        for item, margin, has_margin in zip(plain, moved, known, strict=True)
    ]


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
