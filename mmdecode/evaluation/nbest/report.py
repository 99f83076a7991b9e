"""`NBestReport`: word errors of methods on N-best lists, of the first hypotheses and of oracles."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mmdecode.evaluation.nbest.methods import FIRST, Output, Parts
from mmdecode.evaluation.nbest.n_best import Aligner, count_lists, reference_of
from mmdecode.evaluation.report.examples import Example, Examples
from mmdecode.evaluation.report.layout import Rows, between, percent, without_empty
from mmdecode.evaluation.report.report import Report
from mmdecode.evaluation.speech.comparison import Comparison
from mmdecode.evaluation.speech.normalisers import ORIGINS
from mmdecode.evaluation.speech.samples import Sample
from mmdecode.evaluation.speech.wer import ERRORS, Step, align_as_written, summed
from mmdecode.evaluation.speech.word_report import WERReport
from mmdecode.evaluation.stats.intervals import ratio_interval
from mmdecode.runs.tables import rows_text

THRESHOLD = " (threshold)"
"""Suffix of the name of a method with its copy threshold."""
SHOWN = 5  # improved lists, and worse lists, that a page shows for each method
RULES = 20  # rules of a table that a page shows


class NBestReport(Report):
    """Report on methods on the test part of one set of N-best lists, with the fitted settings.

    Lists whose reference has no words count too, as in published results.

    Args:
        data: Name of the set.
        parts: Parts of the set; the test lists must have references.
        found: Outputs of the methods for the test part, by name; the first hypotheses are added as
            the baseline.
        aligner: Aligner that counts errors.
        conditions: Settings of the run by name; kept in the summary and shown on the page.
        **resampling: Resamples and seed of every bootstrap, by name.

    Attributes:
        texts: Texts of each method, by name; the first hypotheses come first.
        counts: Counts of the test lists.
        words: Word error report of the methods.
    """

    def __init__(
        self,
        data: str,
        parts: Parts,
        found: Mapping[str, Output],
        aligner: Aligner,
        *,
        conditions: Mapping[str, Any] | None = None,
        **resampling: Any,
    ) -> None:
        self.data, self.parts, self.outputs, self.aligner = data, parts, dict(found), aligner
        self.conditions = dict(conditions or {})
        texts = {FIRST: [one.best for one in parts.test]}
        for name, output in found.items():
            texts[name] = output.texts
            if output.thresholded is not None:
                texts[name + THRESHOLD] = output.thresholded
        self.texts = texts
        self.counts = count_lists(parts.test, aligner)
        samples = [
            Sample(id=one.id, mode=mode, text=reference_of(one), pred_text=text)
            for mode, written in texts.items()
            for one, text in zip(parts.test, written, strict=True)
        ]
        self.words = WERReport(
            samples,
            normaliser=aligner.normaliser,
            scorer=aligner.scorer,
            only_scored=False,
            **resampling,
        )

    @property
    def comparisons(self) -> list[Comparison]:
        """Comparison of each method with the first hypotheses; p-values are corrected by Holm."""
        return self.words.comparisons

    @cached_property
    def summary(self) -> dict[str, Any]:
        """All numbers and settings of the report, without texts."""
        before = {self.aligner.normal(one.reference or "") for one in self.parts.before}
        test = [self.aligner.normal(reference_of(one)) for one in self.parts.test]
        return {
            "data": self.data,
            "normaliser": self.aligner.normaliser,
            "normaliser_origin": ORIGINS[self.aligner.normaliser],
            "scorer": self.aligner.scorer,
            "training": len(self.parts.training),
            "development": len(self.parts.development),
            "test": len(test),
            "references_seen_before": sum(text in before for text in test) / len(test),
            "hypotheses": float(self.counts.hypotheses.mean()),
            "distinct": float(self.counts.distinct.mean()),
            "interval": {"unit": "list", **self.words.resampling},
            "oracles": self._oracles(),
            "methods": {mode: self._method(mode) for mode in self.texts},
            "fixed": {name: one.fixed for name, one in self.outputs.items() if one.fixed},
            "failed": {name: len(one.failed) for name, one in self.outputs.items() if one.failed},
            "comparisons": [dataclasses.asdict(found) for found in self.comparisons],
            "conditions": self.conditions,
        }

    def _method(self, mode: str) -> dict[str, Any]:
        """Errors of a method, and what it changed in the first hypotheses.

        Lists have fewer, equally many or more errors than before (``improved``, ``unchanged``,
        ``worse``), or another normalised text (``edited``); new words are in no hypothesis of their
        list (``new_words``), and may be right (``new_words_right``).
        """
        names = ("wer", "wer_low", "wer_high", "words", "heard_words", *ERRORS)
        found = {name: self.words.summary["modes"][mode][name] for name in names}
        before = self.counts.first[:, 2:5].sum(1)
        after = self.words.counts[mode][:, 2:5].sum(1)
        new = [
            step.kind
            for steps, present in zip(self.words.alignments[mode], self.counts.present, strict=True)
            for step in steps
            for word in step.hypothesis.split()
            if word not in present
        ]
        normal = self.aligner.normal
        pairs = zip(self.parts.test, self.texts[mode], strict=True)
        return found | {
            "errors": sum(found[name] for name in ERRORS),
            "improved": int((after < before).sum()),
            "unchanged": int((after == before).sum()),
            "worse": int((after > before).sum()),
            "edited": sum(normal(one.best) != normal(text) for one, text in pairs),
            "new_words": len(new),
            "new_words_right": new.count("equal"),
        }

    def _oracles(self) -> dict[str, dict[str, float]]:
        """Errors and rates of the oracles o_nb and o_cp (see `n_best`), with intervals."""
        named = self.aligner.normaliser, self.aligner.scorer
        best = summed(self.counts.best, *named, **self.words.resampling)
        table = np.stack([self.counts.missing, self.counts.first[:, 0]], 1)
        low, high = ratio_interval(table, **self.words.resampling)
        missing, words = (int(total) for total in table.sum(0))
        return {
            "o_nb": {"errors": best.errors, "rate": best.value, "low": best.low, "high": best.high},
            "o_cp": {"errors": missing, "rate": missing / max(words, 1), "low": low, "high": high},
        }

    def rows(self) -> list[dict[str, str]]:
        """Table with a row per method and a row per oracle."""
        of = len(self.parts.test)
        tests = {found.second: found for found in self.comparisons}
        rows = []
        for mode, found in self.summary["methods"].items():
            row = _row(mode, found["wer"], found["wer_low"], found["wer_high"])
            for name in ERRORS:
                row[f"{name[0].upper()} %"] = percent(found[name] / max(found["words"], 1))
            row |= {name: str(found[name]) for name in ("improved", "unchanged", "worse")}
            test = tests.get(mode)
            row |= {
                "edited %": percent(found["edited"] / of, ".1f"),
                "new words": str(found["new_words"]),
                "right": str(found["new_words_right"]),
                "difference, 95 %": "{} [{}, {}]".format(*test.points) if test else "",
                "p, matched pairs": _p(test.p_holm) if test else "",
            }
            rows.append(row)
        for mode, found in self.summary["oracles"].items():
            row = _row(mode, found["rate"], found["low"], found["high"])
            rows.append(dict.fromkeys(rows[0], "") | row)
        return without_empty(rows)

    def verdict(self) -> list[str]:
        """States which methods differ from the first hypotheses in word errors."""
        rate = self.summary["methods"][FIRST]["wer"]
        if not self.comparisons:
            return [f"{self.data}: {FIRST} has {percent(rate)} % word errors."]
        return [f"{self.data}: {line}" for line in self.words.verdict()]

    def tables(self) -> list[Rows]:
        """The table of scores, and the strongest rules of learned replacements."""
        return [self.rows(), *([rules] if (rules := self._rules()) else [])]

    def about(self) -> str:
        """Explains the numbers in a sentence or two."""
        found = self.summary
        parts = [
            f"{self.data}: {found['test']} lists of the test part, "
            f"{found['methods'][FIRST]['words']} words; {found['development']} development lists "
            f"to fit thresholds on, {found['training']} training lists",
            f"{found['distinct']:.2f} different hypotheses of {found['hypotheses']:.2f}",
            f"{100 * found['references_seen_before']:.1f} % of the references are in the other "
            "parts too",
            f"normaliser {found['normaliser']} ({found['normaliser_origin']}), scorer "
            f"{found['scorer']}; 95 % intervals by bootstrap over lists; p by matched pairs "
            "(MAPSSWE), corrected by Holm",
            "new words are in no hypothesis of their list",
        ]
        fixed = [
            f"{name} {', '.join(f'{key} {_short(value)}' for key, value in one.items())}"
            for name, one in found["fixed"].items()
        ]
        if fixed:
            parts.append(f"fitted before the test: {'; '.join(fixed)}")
        parts += [
            f"{count} lists failed under {name}: their first hypotheses count"
            for name, count in found["failed"].items()
        ]
        if self.conditions.get("limit"):
            parts.append("only a part of the set was scored: not a result to report")
        return "; ".join(parts)

    def examples(self) -> dict[str, Examples]:
        """The lists that each method improved or worsened most."""
        found = {}
        errors = {mode: counts[:, 2:5].sum(1) for mode, counts in self.words.counts.items()}
        before = errors[FIRST]
        for mode in self.texts:
            change = errors[mode] - before
            order = np.argsort(change, kind="stable")
            better = [int(i) for i in order[:SHOWN] if change[i] < 0]
            worse = [int(i) for i in order[::-1][:SHOWN] if change[i] > 0]
            for what, indices in (("better", better), ("worse", worse)):
                found[f"{self.data}: {mode}, {len(indices)} that it made {what}"] = Examples(
                    self._example(mode, i, int(before[i]), int(change[i])) for i in indices
                )
        return found

    def _example(self, mode: str, index: int, before: int, change: int) -> Example:
        one = self.parts.test[index]
        reference = reference_of(one)

        def aligned(hypothesis: str) -> Sequence[Step]:
            return align_as_written(reference, hypothesis, **self.words.scoring)

        others = [other for other in dict.fromkeys(one.hypotheses[1:]) if other != one.best]
        return Example(
            name=one.id,
            note=f"{before} word error{'s' * (before != 1)} before, {before + change} after",
            lines=[
                ("reference", reference),
                ("1-best", aligned(one.best)),
                (mode, aligned(self.texts[mode][index])),
                *(("also", aligned(other)) for other in others),
            ],
        )

    def _rules(self) -> Rows:
        rules = [rule for output in self.outputs.values() for rule in output.rules or ()]
        return [
            {
                "recognised": " ".join(rule.hypothesis),
                "replaced by": " ".join(rule.reference),
                "errors saved": str(rule.errors_saved),
                "seen": str(rule.seen),
            }
            for rule in sorted(rules, key=lambda rule: -rule.errors_saved)[:RULES]
        ]

    def records(self) -> list[dict[str, Any]]:
        """Reference of each list, and its text by each method."""
        return [
            {
                "data": self.data,
                "id": one.id,
                "reference": one.reference,
                "texts": {mode: texts[index] for mode, texts in self.texts.items()},
            }
            for index, one in enumerate(self.parts.test)
        ]

    def failures(self) -> list[dict[str, Any]]:
        """Lists that failed under a method."""
        return [
            {"data": self.data, "method": name, "id": which, "error": error}
            for name, output in self.outputs.items()
            for which, error in output.failed.items()
        ]


class NBestReports(Report):
    """Reports of several sets as one; see `NBestReport`.

    The summary and the tables contain numbers only; references and texts are in ``texts.jsonl`` and
    on the page.

    Args:
        sets: Report of each set.
    """

    title = "N-best lists"

    def __init__(self, sets: Sequence[NBestReport]) -> None:
        self.sets, self.conditions = list(sets), sets[0].conditions

    @property
    def summary(self) -> dict[str, Any]:
        """All numbers and settings, without texts."""
        return {"task": "nbest", "sets": [one.summary for one in self.sets]}

    @property
    def comparisons(self) -> list[Comparison]:
        """Comparisons of all sets."""
        return [found for one in self.sets for found in one.comparisons]

    def verdict(self) -> list[str]:
        """A sentence on each set."""
        return [line for one in self.sets for line in one.verdict()]

    def rows(self) -> Rows:
        """The tables of all sets, with a column for the name of the set."""
        rows = [{"data": one.data} | row for one in self.sets for row in one.rows()]
        names = list(dict.fromkeys(name for row in rows for name in row))
        return [{name: row.get(name, "") for name in names} for row in rows]

    def tables(self) -> list[Rows]:
        """The joined table, and the further tables of each set."""
        return [self.rows(), *(rows for one in self.sets for rows in one.tables()[1:])]

    def about(self) -> str:
        """A line on each set."""
        return "\n".join(one.about() for one in self.sets)

    def examples(self) -> dict[str, Examples]:
        """Examples of all sets."""
        return {name: shown for one in self.sets for name, shown in one.examples().items()}

    def records(self) -> list[dict[str, Any]]:
        """Texts of all sets."""
        return [row for one in self.sets for row in one.records()]

    def failures(self) -> list[dict[str, Any]]:
        """Failed lists of all sets."""
        return [failed for one in self.sets for failed in one.failures()]

    def further_files(self) -> dict[str, str | bytes]:
        """References and texts."""
        return {"texts.jsonl": rows_text(self.records())}


def _row(mode: str, rate: float, low: float, high: float) -> dict[str, str]:
    return {"method": mode, "WER %": percent(rate), "95 %": between(low, high)}


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
