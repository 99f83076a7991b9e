"""Base class of reports on questions about images: scores of modes, tables, files, HTML page.

A mode is a way of decoding whose answers are compared: the baseline, a guide (such as contrastive
decoding) or a control.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic

import numpy as np

from mmdecode.errors import OptionError, UnknownNameError
from mmdecode.evaluation.report.examples import Example, Examples, ImageSource, image_url
from mmdecode.evaluation.report.item_comparison import ItemComparison, compared_rows
from mmdecode.evaluation.report.layout import Rows
from mmdecode.evaluation.report.report import Report
from mmdecode.evaluation.stats.intervals import RESAMPLES
from mmdecode.evaluation.vision.items import ITEMS, Some
from mmdecode.runs.tables import rows_text

LEVEL = 0.05
"""A difference counts as shown if its corrected p-value is below this level."""
_LISTED = 3  # names of methods in the first sentence of a verdict


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
        ids: Ids of the questions.

    Raises:
        OptionError: There are no answers, or modes have different questions.
    """

    title = "Answers"
    unit = "image"
    """Unit that the bootstrap resamples."""
    gain = 1
    """Sign of a comparison's first difference if the second mode is better: 1 or -1."""

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
        self._of: dict[str, dict[int | None, dict[str, Some]]] = {}
        if not items:
            raise OptionError("there are no answers to score; expected at least one")
        self.ids = list(dict.fromkeys(item.id for item in items))
        self.add(items)
        self._recorded_modes = list(self.modes)

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
        if after is not None:
            added = dict.fromkeys(item.mode for item in items)
            order = [mode for mode in self._of if mode not in added]
            index = order.index(after) + 1
            self._of = {mode: self._of[mode] for mode in (*order[:index], *added, *order[index:])}

    @property
    def modes(self) -> list[str]:
        """Names of the modes, the baseline first."""
        return list(self._of)

    def against(self, mode: str) -> list[str]:
        """Names of the modes that a mode is compared with; empty for the baseline."""
        first = self._recorded_modes[0]
        named = [one for one in self._against.get(mode, ()) if one in self._recorded_modes]
        return [] if mode == first else named or [first]

    def _pairs(self) -> list[tuple[str, str]]:
        """Compared modes, as pairs (baseline or control, mode)."""
        return [(one, mode) for mode in self._recorded_modes for one in self.against(mode)]

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

    def _basis(self) -> dict[str, Any]:
        """Entries that every summary has: questions, images, intervals and conditions."""
        return {
            "questions": len(self.ids),
            "images": len(set(self.image_names)),
            "interval": {"unit": self.unit, "resamples": self.resamples, "seed": self.seed},
            "conditions": self.conditions,
        }

    @abc.abstractmethod
    def worst(self, count: int = 5, mode: str | None = None) -> Examples:
        """Up to ``count`` wrong answers of a mode, with images; ``None``: the first mode."""

    @abc.abstractmethod
    def summary_line(self, mode: str, within: str) -> str:
        """The main scores of a mode on the question set ``within``, in a few words."""

    @abc.abstractmethod
    def level(self, mode: str, within: str) -> float:
        """The main score of a mode on the question set ``within``; larger is better."""

    def rivals(self, mode: str) -> list[tuple[str, str]]:
        """Comparisons of a mode with its controls, as pairs (control, mode)."""
        return [(control, mode) for control in self.against(mode)[1:]]

    def verdict(self) -> list[str]:
        """States the result: a sentence on all methods, one on the baseline, some on each method.

        A method is a mode that is no control. It helps if, in at least one question set, it is
        significantly better than its baseline and than every control.
        """
        baseline = self.modes[0]
        judged = [one for one in self._recorded_modes[1:] if one not in self.controls]
        sets = list(dict.fromkeys(one.within for one in self.comparisons))
        sets = sets or list(getattr(self, "sets", None) or ["all"])
        hardest = min(sets, key=lambda name: self.level(baseline, name))
        where = f" in {hardest}, where it scores lowest" if len(sets) > 1 else ""
        plain = f"{baseline}{where}: {self.summary_line(baseline, hardest)}."
        if not judged:
            return [plain]
        found = {mode: self._judged(mode, sets, hardest) for mode in judged}
        helping = [mode for mode, (helps, _) in found.items() if helps]
        if helping:
            more = f" and {len(helping) - _LISTED} more" if len(helping) > _LISTED else ""
            names = "; ".join(helping[:_LISTED])
            first = f"{len(helping)} of {len(judged)} methods help: {names}{more}"
        elif len(judged) == 1:
            first = f"{judged[0]} is not shown to help"
        else:
            first = f"None of the {len(judged)} methods is shown to help"
        tests = len(self.comparisons)
        basis = (
            f" (p below {LEVEL} after Holm's correction for {tests} comparison{'s' * (tests > 1)})"
        )
        return [f"{first}{basis}.", plain, *(line for _, line in found.values())]

    def _judged(self, mode: str, sets: Sequence[str], hardest: str) -> tuple[bool, str]:
        """Decides whether a method helps, and describes its result in a sentence or two."""
        baseline, rivals = self.against(mode)[0], self.rivals(mode)
        known = {(one.first, one.second, one.within): one for one in self.comparisons}
        beats = {name: self._sign(known[baseline, mode, name]) for name in sets}
        better = [name for name in sets if beats[name] > 0]
        worse = [name for name in sets if beats[name] < 0]
        unbeaten = {
            name: [pair for pair in rivals if self._sign(known[*pair, name]) <= 0] for name in sets
        }
        helps = [name for name in better if not unbeaten[name]]
        if helps:
            controls = " and than every control" if rivals else ""
            finding = f"better than {baseline}{controls}{_within(helps, sets)}"
        elif better:
            names = "; ".join(sorted({_rival(p, mode) for name in better for p in unbeaten[name]}))
            finding = f"better than {baseline}{_within(better, sets)}, but not than {names}"
        else:
            finding = "" if worse else f"no difference from {baseline} shown"
        if worse:
            finding += f"{', ' * bool(finding)}worse than {baseline}{_within(worse, sets)}"
        where = f"{hardest}: " if len(sets) > 1 else ""
        overall = known[baseline, mode, hardest]
        parts = [
            f"{mode}: {finding}. {where}{self.summary_line(mode, hardest)}",
            f"against {baseline} {overall.main[0]} {_points(overall)}, p = {overall.corrected:.3f}",
        ]
        if rivals:
            held = [f"against {_rival(p, mode)} {_points(known[*p, hardest])}" for p in rivals]
            parts.append(", ".join(held))
        return bool(helps), "; ".join(parts) + "."

    def _sign(self, found: ItemComparison) -> int:
        """Returns 1 if a gain is shown, -1 if a loss is shown, and 0 otherwise."""
        value = self.gain * found.main[1].value
        return 0 if found.corrected >= LEVEL or not value else 1 if value > 0 else -1

    def differences(self) -> Rows:
        """Table of the comparisons, in percentage points."""
        return compared_rows(self.comparisons)

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


def _rival(pair: tuple[str, str], mode: str) -> str:
    """Name of the control in a pair; if not the mode but its copy is compared, both are named."""
    return pair[0] if pair[1] == mode else f"{pair[0]} (as {pair[1]})"


def _within(names: Sequence[str], sets: Sequence[str]) -> str:
    if len(sets) == 1:
        return ""
    return " in all sets" if len(names) == len(sets) else f" in {', '.join(names)}"


def _points(found: ItemComparison) -> str:
    return found.main[1].points("+.1f", " points")
