"""`CaptionReport`: CHAIR (hallucinated objects) of several modes, also at equal caption length.

Shorter captions hallucinate less. If a mode's captions are shorter than the baseline's on average,
a copy of the baseline's captions is cut to the mode's mean length and compared with the mode. If
they are longer, a copy of the mode's captions is cut and compared with the baseline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.errors import OptionError
from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.examples import Examples
from mmdecode.evaluation.report.item_comparison import ItemComparison, corrected, differences
from mmdecode.evaluation.report.item_report import ItemReport
from mmdecode.evaluation.report.layout import Rows, number, percent, without_empty
from mmdecode.evaluation.vision.items import CaptionItem
from mmdecode.evaluation.vision.tasks.chair import (
    Vocabulary,
    coco_vocabulary,
    count_mentions,
    rates,
    shortened,
    summed,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class CaptionReport(ItemReport[CaptionItem]):
    """Report on hallucinated objects in captions.

    Args:
        items: See `ItemReport`. A caption that failed counts as empty: all its objects are missed.
        vocabulary: Words for each kind of object; ``None``: COCO's 80 categories.
        baseline_controls: Whether to add comparisons at equal caption length, see the module.
        **basis: See `ItemReport`.

    Raises:
        OptionError: See `ItemReport`.
    """

    title = "Hallucinated objects in captions"
    gain = -1

    def __init__(
        self,
        items: Sequence[CaptionItem],
        *,
        vocabulary: Vocabulary | None = None,
        baseline_controls: bool = True,
        **basis: Any,
    ) -> None:
        super().__init__(items, **basis)
        self.vocabulary = vocabulary or coco_vocabulary()
        self._cut: dict[str, str] = {}
        self._alike: list[tuple[str, str]] = []
        for mode in self._recorded_modes[1:] if baseline_controls else []:
            self._add_cut(self.against(mode)[0], mode)

    def _add_cut(self, baseline: str, mode: str) -> None:
        """Adds a copy of the longer of two modes' captions, cut to the other's mean length."""
        lengths = {
            one: np.mean([len(c.output.split()) for answers in self.answers(one) for c in answers])
            for one in (baseline, mode)
        }
        longer, other = (baseline, mode) if lengths[baseline] > lengths[mode] else (mode, baseline)
        name = f"{longer} cut to {other}"
        for answers in self.answers(longer):
            texts = shortened([item.output for item in answers], float(lengths[other]))
            pairs = zip(answers, texts, strict=True)
            unknown = dict.fromkeys(("tokens", "passes", "forwards", "changed", "seconds"))
            cut = [i.answered(mode=name, output=text, **unknown) for i, text in pairs]
            self.add(cut, after=mode)
        self._cut[mode] = name
        self._alike.append((name, mode) if longer == baseline else (baseline, name))

    @cached_property
    def counts(self) -> dict[str, np.ndarray]:
        """Counts of `chair.count_mentions` by mode, ``(seeds, images, 7)``."""
        return {
            mode: np.stack(
                [
                    count_mentions(
                        ["" if item.error else item.output for item in answers],
                        [item.objects for item in answers],
                        self.vocabulary,
                    )
                    for answers in self.answers(mode)
                ]
            )
            for mode in self.modes
        }

    @cached_property
    def summary(self) -> dict[str, Any]:
        """All numbers and settings of the report."""
        return {
            "task": "chair",
            "vocabulary": {"names": len(self.vocabulary.names), "hash": self.vocabulary.hash},
            **self._basis(),
            "modes": {mode: self._mode(mode) for mode in self.modes},
            "comparisons": [dataclasses.asdict(found) for found in self.comparisons],
        }

    def _mode(self, mode: str) -> dict[str, Any]:
        counts = self.counts[mode]
        score = summed(
            counts.reshape(-1, counts.shape[-1]),
            [name for _ in counts for name in self.image_names],
            self.resamples,
            self.seed,
        )
        spread = None
        if len(counts) > 1:
            spread = {k: float(v.std(ddof=1)) for k, v in rates(counts.sum(1)).items()}
        computed = mode not in self._recorded_modes
        return {**self.cost(mode), "computed": computed, **dataclasses.asdict(score)} | {
            "seed_sd": spread
        }

    @cached_property
    def comparisons(self) -> list[ItemComparison]:
        """Comparison of each mode with its baselines, in full and at equal length."""
        return corrected([self._compared(*pair) for pair in self._pairs() + self._alike])

    def compare(
        self,
        other: CaptionReport | str,
        *,
        mode: str | None = None,
        other_mode: str | None = None,
    ) -> ItemComparison:
        """Compares two modes of this report, or one with a mode of another report.

        Args:
            other: The second mode of this report, or another report on the same images.
            mode: Mode of this report that is the baseline; ``None``: its first mode.
            other_mode: Mode of the other report; ``None``: its first mode.

        Raises:
            OptionError: The reports have different images.
            UnknownNameError: There is no such mode.
        """
        first = mode or self.modes[0]
        if isinstance(other, str):
            return self._compared(first, other)
        second = other_mode or other.modes[0]
        if {i.id: i.objects for i in self.questions} != {i.id: i.objects for i in other.questions}:
            raise OptionError("the reports have different images; compare runs on the same data")
        named = f"{second} (other)"
        items = [item for answers in self.answers(first) for item in answers]
        theirs = [item for answers in other.answers(second) for item in answers]
        joined = CaptionReport(
            [*items, *(dataclasses.replace(item, mode=named) for item in theirs)],
            vocabulary=self.vocabulary,
            baseline_controls=False,
            resamples=self.resamples,
            seed=self.seed,
        )
        return joined.compare(named)

    def _compared(self, first: str, second: str) -> ItemComparison:
        for mode in (first, second):
            self.answers(mode)
        return ItemComparison(
            first=first,
            second=second,
            within="all",
            differences=differences(
                self.counts[first].sum(0),
                self.counts[second].sum(0),
                self.image_names,
                rates,
                ("chair_i", "chair_s", "recall"),
                self.resamples,
                self.seed,
            ),
            flips=None,
        )

    def summary_line(self, mode: str, within: str) -> str:
        """CHAIR_i, CHAIR_s, recall and mean length of a mode's captions, in words."""
        score = self.summary["modes"][mode]
        shares = ", ".join(
            f"{name} {percent(score[key], '.1f')} %"
            for name, key in (("CHAIR_i", "chair_i"), ("CHAIR_s", "chair_s"), ("recall", "recall"))
        )
        return f"{shares}, {score['length']:.1f} words"

    def level(self, mode: str, within: str) -> float:
        """Share of mentioned objects that are in the image."""
        return 1 - float(self.summary["modes"][mode]["chair_i"])

    def rivals(self, mode: str) -> list[tuple[str, str]]:
        """Pairs that are compared: each recorded control with the mode, and at equal length."""
        alike = [pair for pair in self._alike if self._cut.get(mode) in pair and mode in pair]
        own = [pair for pair in self._alike if pair[1] == self._cut.get(mode)]
        return super().rivals(mode) + (alike or own)

    def brief(self) -> list[Rows]:
        """Short table with a row per mode: hallucinated objects, recall and length."""
        names = ("mode", "CHAIR_i %", "CHAIR_s %", "recall %", "words")
        return [[{name: row[name] for name in names} for row in self.rows()]]

    def rows(self) -> list[dict[str, str]]:
        """Table of all scores with a row per mode; empty columns are left out."""
        rows = []
        for mode, found in self.summary["modes"].items():
            spans = {
                name: f"{percent(low)} to {percent(high)}"
                for name, (low, high) in found["intervals"].items()
            }
            spread = (found["seed_sd"] or {}).get("chair_i")
            rows.append(
                {
                    "mode": mode,
                    "CHAIR_i %": percent(found["chair_i"]),
                    "95 % of i": spans["chair_i"],
                    "seeds sd": percent(spread),
                    "CHAIR_s %": percent(found["chair_s"]),
                    "95 % of s": spans["chair_s"],
                    "recall %": percent(found["recall"]),
                    "words": number(found["length"], ".1f"),
                    "mentions": number(found["mentions"]),
                    "tokens": number(found["mean_tokens"], ".1f"),
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
            f"{found['questions']} captions of {found['images']} images; "
            f"{len(self.vocabulary.names)} kinds of objects; 95 % interval by bootstrap over images"
        ]
        if self._cut:
            parts.append("rows that are cut have the mean length of the other mode")
        if self.conditions.get("limit"):
            parts.append("only a part of the set was scored: not a result to report")
        return "; ".join(parts)

    def worst(self, count: int = 5, mode: str | None = None) -> Examples:
        """Returns the captions with the most mentions of objects that are not in the image.

        Args:
            count: Largest number of captions; captions without such a mention are left out.
            mode: Name of the mode; ``None``: the first.
        """
        name = mode or self.modes[0]
        found = [
            (int(counts[0]), item)
            for answers, table in zip(self.answers(name), self.counts[name], strict=True)
            for item, counts in zip(answers, table, strict=True)
            if counts[0]
        ]
        found.sort(key=lambda one: -one[0])
        items = [item for _, item in found[:count]]
        notes = []
        for item in items:
            mentioned = dict.fromkeys(self.vocabulary.objects(item.output))
            absent = ", ".join(one for one in mentioned if one not in item.objects)
            notes.append(f"not there: {absent}; there: {', '.join(item.objects) or 'nothing'}")
        return self.shown(items, notes)

    def figures(self) -> dict[str, Figure | bytes]:
        """Figures by name; a figure without data is left out."""
        modes = self.summary["modes"]
        found = {
            "chair_against_recall": plots.chair_against_recall(modes, self._cut),
            "differences": plots.forest(self.comparisons, "chair_i"),
        }
        return {name: figure for name, figure in found.items() if figure is not None}
