"""Optional measures of `WERReport`: PIER (errors of chosen words), hallucinations, punctuation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmdecode.errors import OptionError
from mmdecode.evaluation.report.layout import between, percent
from mmdecode.evaluation.speech.hallucinated import RUN, count_hallucinations
from mmdecode.evaluation.speech.pier import TAGS, pier
from mmdecode.evaluation.speech.punctuation import punctuation
from mmdecode.evaluation.speech.samples import Sample
from mmdecode.evaluation.speech.wer import Step

RATES = ("precision", "recall", "f1")
_KEYS = {
    "empty_hallucinated": "empty_heard",
    "unplaced_hypothesis": "unplaced_heard",
    "positions": "places",
}
"""Keys of results that differ from the names of their fields."""


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Selection of the optional measures.

    Attributes:
        points: Words that PIER scores: ``tags`` or the name of a script, see
            `mmdecode.evaluation.speech.pier`; ``None``: PIER is not computed.
        split_hyphens: Whether hyphens separate words, for PIER.
        hallucinations: Whether to count hallucinations, see
            `mmdecode.evaluation.speech.hallucinated`.
        punctuation: Whether to score punctuation and case, see
            `mmdecode.evaluation.speech.punctuation`.

    Raises:
        OptionError: ``split_hyphens`` is set without points of interest.
    """

    points: str | None = None
    split_hyphens: bool = False
    hallucinations: bool = False
    punctuation: bool = False

    def __post_init__(self) -> None:
        if self.split_hyphens and self.points is None:
            raise OptionError(
                "split_hyphens affects only the scores of points of interest; give points too, or "
                "leave split_hyphens out"
            )

    def scores(
        self,
        references: Sequence[str],
        samples: Sequence[Sample],
        alignments: Sequence[Sequence[Step]],
        **scoring: Any,
    ) -> dict[str, Any]:
        """Computes the selected measures of one mode, such as a drafter or a guide.

        Args:
            references: Reference texts, with the tags that mark PIER's words, if any.
            samples: Recognised texts, and the references without tags.
            alignments: Alignment of each sample.
            **scoring: Options of `mmdecode.evaluation.speech.pier.pier`.
        """
        found: dict[str, Any] = {}
        hypotheses = [sample.pred_text for sample in samples]
        if self.points is not None:
            chosen: dict[str, Any] = {"points": self.points, "split_hyphens": self.split_hyphens}
            score = pier(references, hypotheses, **chosen, **scoring)
            rates = {"value": score.value, "rest_value": score.rest.value}
            found["pier"] = rates | dataclasses.asdict(score)
        if self.hallucinations:
            counted = count_hallucinations(alignments)
            found["made_up"] = _rates(counted, ("rate", "run_rate", "loop_rate")) | _entry(counted)
        if self.punctuation:
            marked = punctuation([sample.text for sample in samples], hypotheses)
            found["punctuation"] = _entry(marked) | {
                "f1": marked.overall.f1,
                "case": marked.case,
                "marks": {mark: _entry(one) | _rates(one) for mark, one in marked.marks.items()},
                "overall": _entry(marked.overall) | _rates(marked.overall),
                "capitals": _entry(marked.capitals) | _rates(marked.capitals),
            }
        return found

    def about(self, scores: Mapping[str, Any]) -> list[str]:
        """Returns sentences that explain the table columns, given the `scores` of one mode."""
        parts = []
        if self.points is not None:
            found = scores["pier"]["interest"]
            count = found["hits"] + found["substitutions"] + found["deletions"]
            named = "tagged spans" if self.points == TAGS else f"words in {self.points} script"
            parts.append(f"PIER over {count} points of interest ({named}), rest: all other words")
        if self.hallucinations:
            parts.append(
                f"hallucinated: share of the {scores['made_up']['empty']} references without words "
                f"in which words were recognised; insertion runs: recordings with {RUN} or more "
                "insertions in a row; repetition: texts that end in repetition"
            )
        if self.punctuation:
            parts.append(
                "marks: F1 of , . ? ! after aligned words, as written; case: share of the words of "
                "both sides that have the same case"
            )
        return parts


def cells(scores: Mapping[str, Any]) -> dict[str, str]:
    """Table cells of one mode, by column; cells of measures that are not selected are empty."""
    points, counted, marked = (scores.get(key, {}) for key in ("pier", "made_up", "punctuation"))
    known = points.get("low") is not None
    return {
        "PIER %": percent(points.get("value")),
        "PIER 95 %": between(points["low"], points["high"]) if known else "",
        "PIER rest %": percent(points.get("rest_value")),
        "hallucinated %": percent(counted.get("rate")),
        "insertion runs %": percent(counted.get("run_rate")),
        "repetition %": percent(counted.get("loop_rate")),
        "marks F1 %": percent(marked.get("f1")),
        "case %": percent(marked.get("case")),
    }


def mark_rows(modes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """Table with a row per mode and punctuation mark; empty if punctuation is not scored.

    Args:
        modes: Scores by mode.
    """
    rows = []
    for mode, scores in modes.items():
        if (marked := scores.get("punctuation")) is None:
            continue
        named = marked["marks"] | {"all marks": marked["overall"], "capitals": marked["capitals"]}
        for name, one in named.items():
            rates = {f"{rate} %": percent(one[rate]) for rate in RATES}
            counts = {n: str(one[n]) for n in ("right", "missed", "false")}
            rows.append({"mode": mode, "mark": name, **rates, **counts})
    return rows


def _entry(counts: Any) -> dict[str, Any]:
    """Fields of counts by key of the results."""
    return {_KEYS.get(name, name): value for name, value in dataclasses.asdict(counts).items()}


def _rates(counts: Any, names: Sequence[str] = RATES) -> dict[str, float | None]:
    return {name: getattr(counts, name) for name in names}
