"""`ChoiceReport`: accuracy on multiple-choice questions, and on pairs and groups of questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mmdecode.evaluation.report.item_report import UNPARSED, ItemReport
from mmdecode.evaluation.report.layout import Rows, percent
from mmdecode.evaluation.stats.intervals import bootstrap_sums
from mmdecode.evaluation.vision.answers import choice
from mmdecode.evaluation.vision.items import ChoiceItem
from mmdecode.evaluation.vision.tasks import spatial


class ChoiceReport(ItemReport[ChoiceItem]):
    """Report on multiple-choice answers; see `ItemReport` for the arguments."""

    unit = "group of questions, else image"
    compared = ("individual", "pair", "set")
    columns = ("individual %", "95 %")
    truth = attrgetter("target", "options", "group", "sets")

    def __init__(self, items: Sequence[ChoiceItem], **basis: Any) -> None:
        task = str((basis.get("conditions") or {}).get("task", "spatial"))
        self.title = "Spatial relations" if task == "spatial" else f"{task}: choices"
        self.settings = {"task": task}
        super().__init__(items, **basis)

    def _count(self, answers: Sequence[ChoiceItem]) -> np.ndarray:
        return np.array(list(spatial.count_choices(answers).values()))

    def _units(self, within: str) -> list[str]:
        return list(dict.fromkeys(map(spatial.unit_of, self._questions_in(within))))

    def _known(self, within: str) -> Sequence[str]:
        counts = self.counts[self.modes[0]][within].sum(0)
        columns = {"individual": 1, "pair": 3, "set": 5}
        return [name for name in self.compared if counts[:, columns[name]].all()]

    _rates = staticmethod(spatial.rates)

    def _constants(self, within: str) -> dict[str, float]:
        """Shares right without the image: by chance, or always with the most common answer."""
        asked = self._questions_in(within)
        targets = Counter(item.target for item in asked)
        chance = sum(1 / len(item.options) for item in asked) / len(asked)
        return {"chance": chance, "majority": max(targets.values()) / len(asked)}

    def _sizes(self, counts: np.ndarray, within: str) -> dict[str, Any]:
        total = dict(zip(spatial.COLUMNS, counts.sum((0, 1)).tolist(), strict=True))
        return {name: total[name] for name in ("questions", "pairs", "sets")}

    def _resampled(self, counts: np.ndarray, within: str) -> np.ndarray:
        return bootstrap_sums(counts, None, self.resamples, self.seed)  # a row is a unit

    def summary_line(self, mode: str, within: str) -> str:
        """Accuracy of a mode on a question set, and the accuracy of chance, in words."""
        score = self.scores(mode, within)
        chance = percent(score["chance"], ".1f")
        return f"{percent(score['individual'], '.1f')} % right, by chance {chance} %"

    def level(self, mode: str, within: str) -> float:
        """Accuracy of a mode on a question set minus the accuracy of chance."""
        return super().level(mode, within) - float(self.scores(mode, within)["chance"])

    def brief(self) -> list[Rows]:
        """Short table with a row per mode: accuracy on each set, and share of unparsed answers."""
        rows = []
        for mode in self.modes:
            scores = {name: self.scores(mode, name) for name in self.sets}
            unparsed = float(np.mean([one["unparsed"] for one in scores.values()]))
            shares = {f"{n} %": percent(one["individual"], ".1f") for n, one in scores.items()}
            rows.append({"mode": mode} | shares | {"unparsed %": percent(unparsed, ".1f")})
        return [rows]

    def _cells(self, score: Mapping[str, Any]) -> dict[str, str]:
        return {
            "pairs %": percent(score["pair"]),
            "sets %": percent(score["set"]),
            "unparsed %": percent(score["unparsed"], ".1f"),
            "chance %": percent(score["chance"], ".1f"),
            "majority %": percent(score["majority"], ".1f"),
        }

    def _notes(self) -> dict[str, Any]:
        basis = (
            f"{len(self.ids)} questions on {len(set(self.image_names))} images; an answer counts "
            "if it names exactly one option; chance and majority need no image; 95 % interval by "
            "bootstrap over groups of questions"
        )
        scores = [self.scores(mode, name) for mode in self.modes for name in self.sets]
        unparsed = max(score["unparsed"] for score in scores)
        hint = (
            f"up to {100 * unparsed:.1f} % of the answers name no option, or several: name the "
            "options in the question, and look at the answers below"
        )
        return {basis: True, hint: unparsed > UNPARSED}

    def _fault(self, item: ChoiceItem) -> tuple[float, str] | None:
        right = item.error is None and choice(item.output, item.options) == item.target
        return None if right else (0, f"right is {item.target}")
