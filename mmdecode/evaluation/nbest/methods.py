"""Methods that turn an N-best list into one text, with settings fitted on a development part.

A method proposes a text, with a number for how strongly it prefers this text to the first
hypothesis. Three settings are fitted on the development part of the lists: the *copy threshold*
(if the preference is below it, the first hypothesis is kept), the weight of a language model that
is added to the recogniser's scores, and a table of replacements of words. Lists are assigned to
parts by their ids alone (`mmdecode.asr.correction.n_best_lists.split`), so that parts are the same
in every run. `METHODS` describes the methods by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.asr.correction.corrector import HINT
from mmdecode.asr.correction.guard import edits_of, words_of
from mmdecode.asr.correction.n_best_lists import NBestList, split
from mmdecode.asr.correction.selection import TextScore, highest, joined_scores, least_risk
from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.nbest.n_best import Aligner, reference_of
from mmdecode.evaluation.nbest.substitutions import Rule, fitted
from mmdecode.runs.files import complete_lines
from mmdecode.runs.items import Failed, Watch, each, tried

if TYPE_CHECKING:
    from mmdecode.asr.correction.corrector import Corrector
    from mmdecode.asr.correction.selection import TextScorer

FIRST = "1best"
"""Name of the baseline, which copies the first hypothesis."""
METHODS = {
    FIRST: "the first hypothesis: always copy",
    "mbr": "the hypothesis with the fewest expected word edits, each hypothesis one vote",
    "mbr+scores": "the same, votes weighted by the softmax of the recogniser's scores",
    "table": "the first hypothesis, spelt by a table learned from the development part",
    "lm": "the hypothesis with the highest log-probability per token under a language model",
    "lm-total": "the same by total log-probability",
    "lm+scores": "the same by the recogniser's score plus a fitted weight times the mean",
    "corrector": "the text that a generative corrector writes for the list",
}
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
_AT_ONCE = 256  # lists whose language model scores are computed before their rows are written


@dataclass(frozen=True)
class Parts:
    """Training, development and test part of one set of N-best lists.

    Attributes:
        training: Lists that a corrector was trained on; method ``table`` learns from them too.
        development: Lists on which thresholds and weights are fitted; method ``table`` learns from
            them too.
        test: Lists on which results are reported.
    """

    training: list[NBestList]
    development: list[NBestList]
    test: list[NBestList]

    @property
    def before(self) -> list[NBestList]:
        """Training and development lists."""
        return self.training + self.development

    @property
    def scored(self) -> list[NBestList]:
        """Development and test lists, for which models are run."""
        return self.development + self.test


def parts_of(lists: Sequence[NBestList], train_share: float, dev_share: float) -> Parts:
    """Splits lists into parts by their ids.

    Args:
        lists: All lists.
        train_share: Share of training lists, from 0 to 1.
        dev_share: Share of development lists, from 0 to 1; the rest is the test part.

    Raises:
        OptionError: The shares are out of range, or leave no list for the test part.
    """
    if min(train_share, dev_share) < 0 or train_share + dev_share >= 1:
        raise OptionError(
            f"a training share of {train_share} and a development share of {dev_share}; expected "
            "two shares of at least 0 with a sum below 1"
        )
    before, test = split(lists, train_share + dev_share)
    training, development = split(before, train_share)
    if not test:
        raise OptionError(
            f"none of {len(lists)} lists falls into the test part; give smaller shares"
        )
    return Parts(training, development, test)


@dataclass(frozen=True)
class Method:
    """A method of `METHODS`, with its model if it has one.

    Attributes:
        kind: Name in `METHODS`.
        model: Language model or corrector: a folder, a Hub id or ``zoo:NAME``; ``None``: the method
            needs no model.
    """

    kind: str
    model: str | None = None

    @classmethod
    def of(cls, text: str) -> Method:
        """Parses a method such as ``mbr`` or ``lm:MODEL``.

        Raises:
            OptionError: The method needs a model and none is named, or it takes no model.
            UnknownNameError: There is no such method.
        """
        kind, _, model = text.partition(":")
        if kind not in METHODS:
            raise UnknownNameError.of("method", kind, METHODS)
        takes = kind in ("lm", "lm-total", "lm+scores", "corrector")
        if takes != bool(model):
            example = f"{kind}:MODEL" if takes else kind
            raise OptionError(f"method {text!r}; expected {example}")
        return cls(kind, model or None)

    @property
    def name(self) -> str:
        """Text from which `of` makes the method."""
        return self.kind if self.model is None else f"{self.kind}:{self.model}"

    @property
    def source(self) -> str | None:
        """Value of `ModelRow.source` for the method's model; ``None``: it has no model."""
        if self.model is None:
            return None
        return f"{'corrector' if self.kind == 'corrector' else 'lm'}:{self.model}"


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """Output of a language model or corrector for one list.

    Attributes:
        data: Name of the set.
        source: ``lm:MODEL`` or ``corrector:MODEL``.
        id: Id of the list.
        totals, tokens: Log-probability in nats and number of tokens of each hypothesis under a
            language model; ``None``: the row is a corrector's.
        text: Text of a corrector, after its guard (rules that refuse implausible answers).
        refused: Reason for which the guard refused the corrector's answer; ``None``: it did not.
        preference: Log-probability of the corrector's answer minus that of the first hypothesis, in
            nats; ``None``: not known.
        error: Error message if the list failed; ``None``: it did not.
    """

    data: str
    source: str
    id: str
    totals: list[float] | None = None
    tokens: list[int] | None = None
    text: str | None = None
    refused: str | None = None
    preference: float | None = None
    error: str | None = None

    @property
    def means(self) -> list[float]:
        """Log-probability per token of each hypothesis."""
        pairs = zip(self.totals or (), self.tokens or (), strict=True)
        return [TextScore(total, count).mean for total, count in pairs]

    def as_dict(self) -> dict[str, Any]:
        """The fields as a JSON row, without fields that are ``None``."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_model_rows(path: Path) -> Iterator[ModelRow]:
    """Reads the rows of an earlier run; an incomplete last line is ignored.

    Raises:
        InputError: A line is damaged.
    """
    for number, line in enumerate(complete_lines(path), 1):
        try:
            yield ModelRow(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{path}, line {number} is not a row of model outputs; remove the line, and "
                "--resume computes it again"
            ) from error


def scored(
    scorer: TextScorer,
    lists: Sequence[NBestList],
    data: str,
    source: str,
    watch: Watch | None = None,
) -> Iterator[ModelRow]:
    """Scores lists by a language model; a list that fails gets a row with its error.

    Args:
        scorer: The language model.
        lists: Lists to score.
        data: Name of the set.
        source: See `ModelRow`.
        watch: Counter of failures that is shared by several sets; ``None``: a new one.

    Raises:
        MMDecodeError: The configuration is wrong, so that every list fails.
    """
    watch = Watch() if watch is None else watch

    def outcomes() -> Iterator[tuple[ModelRow, Failed | None]]:
        for start in range(0, len(lists), _AT_ONCE):
            some = lists[start : start + _AT_ONCE]
            found = each(some, scorer.of_lists, hint=HINT, name=lambda one: one.id, watch=watch)
            for one, scores in found:
                row = partial(ModelRow, data=data, source=source, id=one.id)
                if isinstance(scores, Failed):
                    yield row(error=scores.error), scores
                    continue
                totals = [score.total for score in scores]
                yield row(totals=totals, tokens=[score.tokens for score in scores]), None

    yield from watch.released(outcomes())


def corrected(
    corrector: Corrector,
    lists: Sequence[NBestList],
    data: str,
    source: str,
    watch: Watch | None = None,
) -> Iterator[ModelRow]:
    """Corrects lists; yields rows batch by batch. Arguments as in `scored`."""
    for one in corrector.corrections(lists, watch=watch):
        known = {name: getattr(one, name) for name in ("text", "refused", "preference", "error")}
        yield ModelRow(data=data, source=source, id=one.id, **known)


@dataclass(frozen=True)
class Edit:
    """Text that a method proposes for a list.

    Attributes:
        text: The proposed text.
        preference: How strongly the method prefers this text to the first hypothesis; it is
            compared with the copy threshold, and its unit depends on the method.
    """

    text: str
    preference: float


@dataclass(frozen=True, kw_only=True)
class Output:
    """Texts of a method for the test part, with the settings that were fitted.

    Attributes:
        texts: Proposed text of each list.
        thresholded: Text of each list after the copy threshold: the first hypothesis if the
            preference is below it. ``None``: there is no development part, or no threshold.
        threshold: Copy threshold, the smallest preference for which a proposed text is used;
            infinity: the first hypothesis is always kept.
        weight: Weight of the language model that is added to the recogniser's scores.
        minimum: Number of errors that a replacement rule must have removed to be kept; ``None``: no
            rule was learned.
        rules: Replacement rules; ``None``: the method has none.
        refused: Number of answers of a corrector that its guard refused.
        failed: Error messages of lists that failed, by id; their first hypotheses are used.
    """

    texts: list[str]
    thresholded: list[str] | None = None
    threshold: float | None = None
    weight: float | None = None
    minimum: int | None = None
    rules: Sequence[Rule] | None = field(default=None, repr=False)
    refused: int | None = None
    failed: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def fixed(self) -> dict[str, Any]:
        """Fitted settings and counts by name, without texts."""
        found = {
            "threshold": "copy all" if self.threshold == math.inf else self.threshold,
            "weight": self.weight,
            "minimum": self.minimum,
            "rules": None if self.rules is None else len(self.rules),
            "refused": self.refused,
        }
        return {name: value for name, value in found.items() if value is not None}


def outputs(method: Method, parts: Parts, aligner: Aligner, rows: Mapping[str, ModelRow]) -> Output:
    """Fits a method on the development part and applies it to the test part.

    Args:
        method: The method.
        parts: Parts of one set.
        aligner: Aligner that counts errors.
        rows: Rows of the method's model for development and test lists, by id.

    Raises:
        InputError: The method needs the recogniser's scores, and no list has them.
        OptionError: The method must be fitted, and there is no development part.
    """
    if method.kind == FIRST:
        return Output(texts=[one.best for one in parts.test])
    if method.kind == "table":
        _needs(parts.before, method)
        table, minimum = fitted(parts.before, aligner)
        return Output(
            texts=[table(one.best) for one in parts.test], minimum=minimum, rules=table.rules
        )
    weight = 0.0
    if method.kind == "lm+scores":
        _needs(parts.development, method)
        weight = _weight(parts.development, aligner, rows)
    failed: dict[str, str] = {}
    proposed = _edited(method.kind, parts.test, rows, failed, weight)
    found: dict[str, Any] = {"texts": [one.text for one in proposed], "failed": failed}
    if method.kind == "lm+scores":
        found["weight"] = weight
    if method.kind == "corrector":
        found["refused"] = sum(rows[one.id].refused is not None for one in parts.test)
    if parts.development:
        edits = _edited(method.kind, parts.development, rows, failed, weight)
        threshold = copy_threshold(parts.development, edits, aligner)
        found["threshold"] = threshold
        found["thresholded"] = [
            edited.text if edited.preference >= threshold else one.best
            for one, edited in zip(parts.test, proposed, strict=True)
        ]
    return Output(**found)


def _edited(
    kind: str,
    lists: Sequence[NBestList],
    rows: Mapping[str, ModelRow],
    failed: dict[str, str],
    weight: float,
) -> list[Edit]:
    """Applies a method to lists; a list that fails keeps its first hypothesis.

    Its error message is added to ``failed``.

    Raises:
        Exception: The exception of the first list, if every list raised one.
    """
    found: list[Edit] = []
    problems: list[Exception] = []
    for one in lists:
        row = rows.get(one.id)
        if row is not None and row.error is not None:
            failed[one.id] = row.error
            found.append(Edit(one.best, 0.0))
            continue
        made = tried(partial(_edit, kind, one, row, weight), HINT)
        if isinstance(made, Failed):
            failed[one.id] = made.error
            problems.append(made.problem)
            made = Edit(one.best, 0.0)
        found.append(made)
    if problems and len(problems) == len(lists):
        raise problems[0]
    return found


def _edit(kind: str, one: NBestList, row: ModelRow | None, weight: float) -> Edit:
    """Text that a method proposes for a list; ``row`` is the output of its model, if it has one."""
    if kind in ("mbr", "mbr+scores"):
        choice = least_risk(one, "uniform" if kind == "mbr" else "scores")
        return Edit(one.hypotheses[choice.index], choice.gain)
    assert row is not None, "the method has a model"
    if kind == "corrector":
        text, words = row.text or "", words_of(one.best)
        if row.preference is not None:
            return Edit(text, row.preference)
        # not known: minus the share of changed words
        return Edit(text, -edits_of(words, words_of(text)) / max(len(words), 1))
    scores = (row.totals or []) if kind == "lm-total" else row.means
    choice = highest(joined_scores(one, scores, weight) if kind == "lm+scores" else scores)
    return Edit(one.hypotheses[choice.index], choice.gain)


def copy_threshold(lists: Sequence[NBestList], edits: Sequence[Edit], aligner: Aligner) -> float:
    """Finds the copy threshold that removes the most errors; if several do, the highest.

    Args:
        lists: Lists with references.
        edits: Text that the method proposes for each list.
        aligner: Aligner that counts errors.

    Returns:
        The threshold; infinity if no threshold removes errors.
    """
    saved: dict[float, int] = {}
    for one, edit in zip(lists, edits, strict=True):
        reference = reference_of(one)
        fewer = aligner.errors(reference, one.best) - aligner.errors(reference, edit.text)
        saved[edit.preference] = saved.get(edit.preference, 0) + fewer
    best, threshold, total = 0, math.inf, 0
    for preference in sorted(saved, reverse=True):
        total += saved[preference]
        if total > best:
            best, threshold = total, preference
    return threshold


def _needs(lists: Sequence[NBestList], method: Method) -> None:
    if not lists:
        raise OptionError(
            f"{method.name!r} is fitted on a development part, and there is none; give a "
            "development share above 0"
        )


def _weight(lists: Sequence[NBestList], aligner: Aligner, rows: Mapping[str, ModelRow]) -> float:
    """Finds the weight of `WEIGHTS` with the fewest errors; if several have, the smallest."""

    def errors(weight: float) -> int:
        edits = _edited("lm+scores", lists, rows, {}, weight)
        return sum(
            aligner.errors(reference_of(one), edited.text)
            for one, edited in zip(lists, edits, strict=True)
        )

    return min(WEIGHTS, key=errors)
