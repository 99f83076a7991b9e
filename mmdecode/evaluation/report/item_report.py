"""Base class of reports on questions about images: scores of modes, tables, files, HTML page.

A mode is a way of decoding whose answers are compared: the baseline, a guide (such as contrastive
decoding) or a control. Scores are rates of counts, such as the share of right answers.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic

import numpy as np

from mmdecode.errors import OptionError, UnknownNameError
from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.examples import Example, Examples, ImageSource, image_url
from mmdecode.evaluation.report.item_comparison import (
    ItemComparison,
    compared_rows,
    corrected,
    difference,
    flips,
    verdict_of,
)
from mmdecode.evaluation.report.layout import Rows, between, number, percent, without_empty
from mmdecode.evaluation.report.report import Report
from mmdecode.evaluation.stats.intervals import RESAMPLES, bootstrap_sums, interval
from mmdecode.evaluation.vision.items import ITEMS, Some
from mmdecode.runs.tables import rows_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNPARSED = 0.01
"""Share of unparsed answers above which a report asks to check prompt and stopping criterion."""


class ItemReport(Report, Generic[Some]):
    """Base class of reports on saved answers; each kind of question has a subclass.

    Args:
        items: Answers of one or more modes, the baseline first; each seed of each mode answers the
            same questions.
        resamples: Number of resamples of every bootstrap.
        seed: Seed of every bootstrap.
        conditions: Settings and hardware of the run, by name; shown in the report.
        against: For each mode, by name, the modes that it is compared with. The first of them also
            serves as the baseline of the controls that the report computes. A mode without an
            entry is compared with the baseline; ``None``: all modes are.
        controls: Names of the modes that are controls; the verdict does not judge them.
        images: Folder of the images, or a function from an image's name to its bytes, for
            `worst`; ``None``: images are not shown.

    Attributes:
        modes: Names of the modes, the baseline first, with the controls that the report computes.
        recorded_modes: Names of the modes of the items.
        ids: Ids of the questions.
        options: Arguments of the class's own, for a report of other answers.
        settings: First entries of the summary.
        paired: Further comparison of each mode, by its name, with controls that are computed.

    Raises:
        OptionError: There are no answers, or modes have different questions.
    """

    title = "Answers"
    unit = "image"
    """Unit that the bootstrap resamples."""
    gain = 1
    """Sign of a comparison's first difference if the second mode is better: 1 or -1."""
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

    def __init__(
        self,
        items: Sequence[Some],
        *,
        resamples: int = RESAMPLES,
        seed: int = 0,
        conditions: Mapping[str, Any] | None = None,
        against: Mapping[str, Sequence[str]] | None = None,
        controls: Collection[str] = (),
        images: ImageSource = None,
    ) -> None:
        self.resamples, self.seed, self.images = resamples, seed, images
        self.conditions = dict(conditions or {})
        self._against = dict(against or {})
        self.controls = frozenset(controls)
        self.recorded = list(items)
        self.modes: list[str] = []
        self._of: dict[str, dict[int | None, dict[str, Some]]] = {}
        if not items:
            raise OptionError("there are no answers to score; expected at least one")
        self.ids = list(dict.fromkeys(item.id for item in items))
        self.add(items)
        self.recorded_modes = list(self.modes)

    def add(self, items: Sequence[Some], after: str | None = None) -> None:
        """Adds the answers of further modes to the report.

        Args:
            items: Answers of the new modes.
            after: Mode after which the new modes are listed; ``None``: they are listed last.

        Raises:
            OptionError: A mode does not answer the questions of the report, or one seed of a mode
                has two answers to a question.
        """
        for item in items:
            found = self._of.setdefault(item.mode, {}).setdefault(item.seed, {})
            if item.id in found:
                raise OptionError(f"{item.mode!r} has two answers to {item.id!r}; expected one")
            found[item.id] = item
        for mode, seeds in self._of.items():
            for seed, answers in seeds.items():
                other = set(answers).symmetric_difference(self.ids)
                if other:
                    raise OptionError(
                        f"{mode!r}{f', seed {seed},' * (seed is not None)} lacks answers that "
                        f"other modes have ({min(other)!r}); finish the run with --resume"
                    )
        new = [one for one in self._of if one not in self.modes]
        index = len(self.modes) if after is None else self.modes.index(after) + 1
        self.modes[index:index] = new

    def against(self, mode: str) -> list[str]:
        """Names of the modes that a mode is compared with; empty for the baseline."""
        first = self.recorded_modes[0]
        named = [one for one in self._against.get(mode, ()) if one in self.recorded_modes]
        return [] if mode == first else named or [first]

    def answers(self, mode: str) -> list[list[Some]]:
        """Answers of a mode, one list per seed, questions in order.

        Raises:
            UnknownNameError: There is no such mode.
        """
        if mode not in self._of:
            raise UnknownNameError.of("mode", mode, self.modes)
        return [[answers[name] for name in self.ids] for answers in self._of[mode].values()]

    @cached_property
    def questions(self) -> list[Some]:
        """The questions, each as the baseline's answer to it."""
        return self.answers(self.modes[0])[0]

    @cached_property
    def image_names(self) -> list[str]:
        """Name of each question's image; a question without an image has its id instead."""
        return [item.image or item.id for item in self.questions]

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
        return [self.image_names[index] for index in self.sets[within]]

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

    def cost(self, mode: str) -> dict[str, Any]:
        """Cost of a mode: failures, mean length, time and passes per token; ``None``: not known."""
        items = [item for answers in self.answers(mode) for item in answers]
        tokens = [item.tokens for item in items if item.tokens is not None]
        times = [item.seconds for item in items if item.seconds is not None]
        counted = [i for i in items if i.passes is not None and i.tokens]
        made = sum(item.tokens or 0 for item in counted)
        # reading the prompt decides the first token
        later = sum((i.tokens or 1) - 1 for i in items if i.forwards is not None)
        traced = [i for i in items if i.changed is not None and i.tokens]
        guided = sum(item.tokens or 0 for item in traced)
        return {
            "seeds": [seed for seed in self._of[mode] if seed is not None],
            "failed": sum(item.error is not None for item in items),
            "mean_tokens": float(np.mean(tokens)) if tokens else None,
            "mean_seconds": float(np.mean(times)) if times else None,
            "rows_per_token": sum(i.passes or 0 for i in counted) / made if made else None,
            "forwards_per_token": sum(i.forwards or 0 for i in items) / later if later else None,
            "changed": sum(i.changed or 0 for i in traced) / guided if guided else None,
        }

    @cached_property
    def summary(self) -> dict[str, Any]:
        """All numbers and settings of the report."""
        return {
            **self.settings,
            "questions": len(self.ids),
            "images": len(set(self.image_names)),
            "interval": {"unit": self.unit, "resamples": self.resamples, "seed": self.seed},
            "conditions": self.conditions,
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

    @cached_property
    def comparisons(self) -> list[ItemComparison]:
        """Comparison of each mode with its baselines and controls, in every set."""
        pairs = [(one, mode) for mode in self.recorded_modes for one in self.against(mode)]
        pairs += self.paired.values()
        return corrected([self._compared(*pair, name) for name in self.sets for pair in pairs])

    def compare(
        self,
        other: ItemReport[Some] | str,
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

    def _refuse(self, other: ItemReport[Some]) -> None:
        """Refuses a report that cannot be compared with this one; see `compare`."""
        truths, others = ({i.id: self.truth(i) for i in one.questions} for one in (self, other))
        if truths != others:
            raise OptionError(
                f"the reports have different {self.asked}; compare runs on the same data"
            )

    def _compared(self, first: str, second: str, within: str) -> ItemComparison:
        """Compares two modes on a question set; both are scored on the same bootstrap samples."""
        for mode in (first, second):
            self.answers(mode)
        tables = [self.counts[mode][within].sum(0) for mode in (first, second)]
        basis = self._units(within), self.resamples, self.seed
        before, after = (self._rates(bootstrap_sums(table, *basis)) for table in tables)
        was, now = (self._rates(table.sum(0)) for table in tables)
        found = {
            name: difference(now[name] - was[name], after[name] - before[name])
            for name in self._known(within)
        }
        one, other = (self._right(mode, within) for mode in (first, second))
        flipped = None
        if one is not None and other is not None and len(one) == len(other) == 1:
            asked: list[Any] = self._questions_in(within)
            flipped = flips(one[0], other[0], [item.target for item in asked])
        return ItemComparison(
            first=first, second=second, within=within, differences=found, flips=flipped
        )

    @abc.abstractmethod
    def summary_line(self, mode: str, within: str) -> str:
        """The main scores of a mode on the question set ``within``, in a few words."""

    def verdict(self) -> list[str]:
        """States the result: a sentence on all methods, one on the baseline, some on each method.

        A method is a mode that is no control. It helps if, in at least one question set, it is
        significantly better than its baseline and than every control.
        """
        return verdict_of(self)

    def scores(self, mode: str, within: str) -> dict[str, Any]:
        """Scores of a mode on a question set, from the summary."""
        found: dict[str, Any] = self.summary["modes"][mode]
        return found["sets"][within] if "sets" in found else found

    def level(self, mode: str, within: str) -> float:
        """The main score of a mode on the question set ``within``; larger is better."""
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
                    ends: between(*score["intervals"][main]),
                    "seeds sd": percent((score["seed_sd"] or {}).get(main)),
                }
                rows.append(first | self._cells(score) | cost)
        return without_empty(rows)

    def differences(self) -> Rows:
        """Table of the comparisons, in percentage points."""
        return compared_rows(self.comparisons)

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

    def examples(self) -> dict[str, Examples]:
        """Wrong answers of each mode."""
        return {f"Most wrong, {mode}": self.worst(5, mode) for mode in self.modes}

    def shown(self, items: Sequence[Some], notes: Sequence[str]) -> Examples:
        """Answers with their images.

        Args:
            items: Answers, in order.
            notes: A line of text for each answer.
        """
        return Examples(
            Example(
                name=item.id,
                note=note,
                lines=[("asked", item.question), ("answered", item.error or item.output)],
                image=image_url(item.image, self.images),
            )
            for item, note in zip(items, notes, strict=True)
        )

    def figures(self) -> dict[str, Figure | bytes]:
        """Figures by name; a figure without data is left out."""
        figure = plots.forest(self.comparisons, self.compared[0])
        return {} if figure is None else {"differences": figure}

    def records(self) -> list[dict[str, Any]]:
        """Every answer."""
        return [i.as_dict() for m in self.modes for answers in self.answers(m) for i in answers]

    def failures(self) -> list[dict[str, Any]]:
        """Questions whose decoding failed."""
        failed = [item for item in self.recorded if item.error is not None]
        names = "id", "mode", "seed", "error"
        return [{name: getattr(item, name) for name in names} for item in failed]

    def further_files(self) -> dict[str, str | bytes]:
        """The recorded answers."""
        return {ITEMS: rows_text(item.as_dict() for item in self.recorded)}
