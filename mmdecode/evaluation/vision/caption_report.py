"""`CaptionReport`: CHAIR (hallucinated objects) of several modes, also at equal caption length.

Shorter captions hallucinate less. If a mode's captions are shorter than the baseline's on average,
a copy of the baseline's captions is cut to the mode's mean length and compared with the mode. If
they are longer, a copy of the mode's captions is cut and compared with the baseline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.item_comparison import ItemComparison
from mmdecode.evaluation.report.item_report import ItemReport
from mmdecode.evaluation.report.layout import Rows, between, number, percent
from mmdecode.evaluation.vision.items import CaptionItem
from mmdecode.evaluation.vision.tasks import chair
from mmdecode.evaluation.vision.tasks.chair import Vocabulary

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
    compared = ("chair_i", "chair_s", "recall")
    columns = ("CHAIR_i %", "95 % of i")
    truth = attrgetter("objects")
    asked = "images"

    def __init__(
        self,
        items: Sequence[CaptionItem],
        *,
        vocabulary: Vocabulary | None = None,
        baseline_controls: bool = True,
        **basis: Any,
    ) -> None:
        super().__init__(items, **basis)
        self.vocabulary = vocabulary or chair.coco_vocabulary()
        self.options = {"vocabulary": self.vocabulary, "baseline_controls": False}
        found = {"names": len(self.vocabulary.names), "hash": self.vocabulary.hash}
        self.settings = {"task": "chair", "vocabulary": found}
        self._cut: dict[str, str] = {}
        self.paired: dict[str, tuple[str, str]] = {}
        for mode in self.recorded_modes[1:] if baseline_controls else []:
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
            texts = chair.shortened([item.output for item in answers], float(lengths[other]))
            pairs = zip(answers, texts, strict=True)
            unknown = dict.fromkeys(("tokens", "passes", "forwards", "changed", "seconds"))
            cut = [i.answered(mode=name, output=text, **unknown) for i, text in pairs]
            self.add(cut, after=mode)
        self._cut[mode] = name
        self.paired[mode] = (name, mode) if longer == baseline else (baseline, name)

    def _count(self, answers: Sequence[CaptionItem]) -> np.ndarray:
        texts = ["" if item.error else item.output for item in answers]
        return chair.count_mentions(texts, [item.objects for item in answers], self.vocabulary)

    def _asked(self) -> dict[str, Any]:
        return {}

    def _found(self, mode: str) -> dict[str, Any]:
        return {"computed": mode not in self.recorded_modes, **self._scored(mode, "all")}

    _rates = staticmethod(chair.rates)

    def _sizes(self, counts: np.ndarray, within: str) -> dict[str, Any]:
        return {"captions": counts[..., 0].size, "images": len(set(self.image_names))}

    def _right(self, mode: str, within: str) -> None:
        """Captions are not right or wrong."""

    def compare(  # type: ignore[override]
        self, other: CaptionReport | str, **modes: str | None
    ) -> ItemComparison:
        """Compares two modes; see `ItemReport.compare`. The p-value is not corrected."""
        (found,) = super().compare(other, **modes)
        return dataclasses.replace(found, p_holm=None)

    def summary_line(self, mode: str, within: str) -> str:
        """CHAIR_i, CHAIR_s, recall and mean length of a mode's captions, in words."""
        score = self.scores(mode, within)
        return (
            f"CHAIR_i {percent(score['chair_i'], '.1f')} %, "
            f"CHAIR_s {percent(score['chair_s'], '.1f')} %, "
            f"recall {percent(score['recall'], '.1f')} %, {score['length']:.1f} words"
        )

    def level(self, mode: str, within: str) -> float:
        """Share of mentioned objects that are in the image."""
        return 1 - super().level(mode, within)

    def brief(self) -> list[Rows]:
        """Short table with a row per mode: hallucinated objects, recall and length."""
        names = ("mode", "CHAIR_i %", "CHAIR_s %", "recall %", "words")
        return [[{name: row[name] for name in names} for row in self.rows()]]

    def _cells(self, score: Mapping[str, Any]) -> dict[str, str]:
        return {
            "CHAIR_s %": percent(score["chair_s"]),
            "95 % of s": between(*score["intervals"]["chair_s"]),
            "recall %": percent(score["recall"]),
            "words": number(score["length"], ".1f"),
            "mentions": number(score["mentions"]),
            "tokens": number(score["mean_tokens"], ".1f"),
        }

    def _notes(self) -> dict[str, Any]:
        basis = (
            f"{len(self.ids)} captions of {len(set(self.image_names))} images; "
            f"{len(self.vocabulary.names)} kinds of objects; 95 % interval by bootstrap over images"
        )
        return {basis: True, "rows that are cut have the mean length of the other mode": self._cut}

    def _fault(self, item: CaptionItem) -> tuple[float, str] | None:
        mentioned = [] if item.error else self.vocabulary.objects(item.output)
        absent = [name for name in mentioned if name not in item.objects]
        note = f"not there: {', '.join(dict.fromkeys(absent))}; there: "
        return (len(absent), note + (", ".join(item.objects) or "nothing")) if absent else None

    def figures(self) -> dict[str, Figure | bytes]:
        """Figures by name; a figure without data is left out."""
        figure = plots.chair_against_recall(self.summary["modes"], self._cut)
        return {"chair_against_recall": figure, **super().figures()}
