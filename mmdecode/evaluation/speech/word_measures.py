"""Optional measures of `WERReport`: PIER (errors of chosen words), hallucinations, punctuation.

Hallucinations are words on non-speech, runs of insertions, and repetition. Their counts need only
reference and hypothesis, so that transcripts of other systems can be scored too. A transcriber of
this package also counts the audio windows whose text ended in repetition
(`mmdecode.evaluation.speech.samples.Sample.repetitive_windows`).

For punctuation and case, words are aligned by minimal edit distance, without marks and case. Marks
are compared after each pair of aligned words, equal or substituted: each of `MARKS` there is right,
missed or false. Marks after deleted or inserted words have no counterpart; they are counted
separately. Case is compared where reference and hypothesis have the same word. Full-width,
ideographic, Arabic and Devanagari marks count as their counterparts in `MARKS`. No normaliser is
applied.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mmdecode.asr.decoding.repetition import first_round_end
from mmdecode.errors import OptionError
from mmdecode.evaluation.report.layout import between, percent
from mmdecode.evaluation.speech.pier import TAGS, pier
from mmdecode.evaluation.speech.samples import Sample
from mmdecode.evaluation.speech.scripts import units
from mmdecode.evaluation.speech.wer import Step, align_units

RUN = 5
"""Smallest number of consecutive inserted words that count as a hallucinated run."""
MARKS = ",.?!"
_PLAIN = str.maketrans("\uff0c\u3001\u060c\u3002\uff0e\u0964\uff1f\u061f\uff01", ",,,...??!")
_WORD = re.compile(r"\w+(?:(?:['\u2019\-](?=\w)|(?<=\d)[.,](?=\d))\w+)*")


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Selection of the optional measures.

    Attributes:
        points: Words that PIER scores: ``tags`` or the name of a script, see
            `mmdecode.evaluation.speech.pier`; ``None``: PIER is not computed.
        split_hyphens: Whether hyphens separate words, for PIER.
        hallucinations: Whether to count hallucinations, see `count_hallucinations`.
        punctuation: Whether to score punctuation and case, see `score_punctuation`.

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
            found["made_up"] = count_hallucinations(alignments)
        if self.punctuation:
            texts = [sample.text for sample in samples]
            found["punctuation"] = score_punctuation(texts, hypotheses)
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
            rates = {f"{rate} %": percent(one[rate]) for rate in ("precision", "recall", "f1")}
            counts = {n: str(one[n]) for n in ("right", "missed", "false")}
            rows.append({"mode": mode, "mark": name, **rates, **counts})
    return rows


def count_hallucinations(alignments: Iterable[Sequence[Step]]) -> dict[str, Any]:
    """Counts hallucinations in aligned utterances.

    Args:
        alignments: Alignment of each utterance, at least one; see
            `mmdecode.evaluation.speech.wer.align`.

    Returns:
        Shares of the empty references with recognised words (``rate``; ``None``: no reference is
        empty), of the utterances with a run of insertions (``run_rate``) and of those that end in
        repetition (``loop_rate``); and the numbers of ``utterances``; of those whose reference is
        ``empty`` (non-speech), of these with recognised words (``empty_heard``), and of those words
        (``empty_words``); of utterances with a run of at least `RUN` insertions (``runs``), empty
        references included, and of the words of all such runs (``run_words``); and of hypotheses
        that end in repetition, see `mmdecode.asr.decoding.repetition`, while the reference does not
        (``loops``).
    """
    counts: Counter[str] = Counter()
    for steps in alignments:
        expected = [word for step in steps for word in step.reference.split()]
        recognised = [word for step in steps for word in step.hypothesis.split()]
        inserted = [
            sum(len(step.hypothesis.split()) for step in group)
            for kind, group in groupby(steps, lambda step: step.kind)
            if kind == "insert"
        ]
        long = [words for words in inserted if words >= RUN]
        counts["utterances"] += 1
        if not expected:
            counts["empty"] += 1
            counts["empty_heard"] += bool(recognised)
            counts["empty_words"] += len(recognised)
        counts["runs"] += bool(long)
        counts["run_words"] += sum(long)
        counts["loops"] += bool(first_round_end(recognised) and not first_round_end(expected))
    names = ("utterances", "empty", "empty_heard", "empty_words", "runs", "run_words", "loops")
    return {
        "rate": counts["empty_heard"] / counts["empty"] if counts["empty"] else None,
        "run_rate": counts["runs"] / counts["utterances"],
        "loop_rate": counts["loops"] / counts["utterances"],
        **{name: counts[name] for name in names},
    }


def score_punctuation(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, Any]:
    """Scores punctuation and casing of a corpus of texts that are not normalised.

    Args:
        references: Reference texts.
        hypotheses: Recognised texts, in the same order.

    Returns:
        Counts and rates (`_agreement`) of each mark of `MARKS` (``marks``), of all marks together
        (``overall``), and of words with a capital letter among the aligned pairs of equal words
        (``capitals``; right if both words of the pair have the same case); the numbers of aligned
        pairs of words that are equal when case is ignored (``same_words``), of these with the same
        case (``same_case``; ``case`` is their share, ``None``: there is no pair), of aligned pairs
        after which marks are compared (``places``), of marks of the reference after deleted words
        (``unplaced``) and of the hypothesis after inserted words (``unplaced_heard``); and the
        ``f1`` of all marks.

    Raises:
        OptionError: References and hypotheses differ in number.
    """
    if len(references) != len(hypotheses):
        raise OptionError(
            f"{len(references)} references and {len(hypotheses)} hypotheses; expected pairs"
        )
    found: Counter[tuple[str, bool, bool]] = Counter()  # mark, in reference, in hypothesis
    cased: list[tuple[str, str]] = []  # a word of both sides, as each writes it
    positions = unplaced = unplaced_hypothesis = 0
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        left, right = list(marked_words(reference)), list(marked_words(hypothesis))
        steps = align_units([w.casefold() for w, _ in left], [w.casefold() for w, _ in right])
        ours, theirs = iter(left), iter(right)
        for step in steps:
            word, marks = next(ours) if step.reference else ("", "")
            other, other_marks = next(theirs) if step.hypothesis else ("", "")
            if not word or not other:
                unplaced += len(marks)
                unplaced_hypothesis += len(other_marks)
                continue
            positions += 1
            found.update((m, m in marks, m in other_marks) for m in {*marks, *other_marks})
            if step.kind == "equal":
                cased.append((word, other))
    sides = ((True, True), (True, False), (False, True))
    marked = {mark: _agreement(*(found[mark, *side] for side in sides)) for mark in MARKS}
    totals = (sum(one[name] for one in marked.values()) for name in ("right", "missed", "false"))
    overall = _agreement(*totals)
    same_case = sum(word == other for word, other in cased)
    return {
        "marks": marked,
        # a pair of words that differ in case is missed, false, or both
        "capitals": _agreement(
            sum(word == other and word != word.lower() for word, other in cased),
            sum(word != other and word != word.lower() for word, other in cased),
            sum(word != other and other != other.lower() for word, other in cased),
        ),
        "same_words": len(cased),
        "same_case": same_case,
        "places": positions,
        "unplaced": unplaced,
        "unplaced_heard": unplaced_hypothesis,
        "f1": overall["f1"],
        "case": same_case / len(cased) if cased else None,
        "overall": overall,
    }


def marked_words(text: str) -> Iterable[tuple[str, str]]:
    """Yields each word with the marks after it; marks before the first word are left out."""
    text = text.translate(_PLAIN)
    spans = [*_WORD.finditer(text)]
    ends = [span.start() for span in spans[1:]] + [len(text)]
    for span, end in zip(spans, ends, strict=False):
        marks = "".join(mark for mark in MARKS if mark in text[span.end() : end])
        *first, last = units(span[0])
        yield from ((unit, "") for unit in first)
        yield last, marks


def _agreement(right: int, missed: int, false: int) -> dict[str, Any]:
    """Counts of a mark or of capitals, with precision, recall and their harmonic mean F1.

    A rate is ``None`` if there is no occurrence that it is a share of.

    Args:
        right: Occurrences in both texts.
        missed: Occurrences in the reference only.
        false: Occurrences in the hypothesis only.
    """
    return {
        "right": right,
        "missed": missed,
        "false": false,
        "precision": right / (right + false) if right + false else None,
        "recall": right / (right + missed) if right + missed else None,
        "f1": 2 * right / (2 * right + missed + false) if right + missed + false else None,
    }
