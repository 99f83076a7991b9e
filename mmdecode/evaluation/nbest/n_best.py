"""N-best lists against what was said: what choosing and composing could reach, and what edits did.

For utterances u with reference r_u and hypotheses h (Chen et al., 2023, arXiv:2309.15701):

* ``o_nb = sum_u min_h ED(h, r_u) / sum_u |r_u|``: the best hypothesis of each list.
* ``o_cp = sum_u #{words of r_u that are in no hypothesis} / sum_u |r_u|``: the best text made of
  the list's words. Words are looked up in the set of the list's words, however often and wherever
  they stand there; whether the published figures count a word that the reference has twice and a
  hypothesis once as missing is not known.

``o_cp <= o_nb <= WER of the first hypothesis`` holds list by list, since each missing word is an
error of every hypothesis. With merged compounds a word also counts as present where some alignment
of the list merges it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mmdecode.asr.correction.n_best_lists import NBestList
from mmdecode.asr.output.manifest import Entry
from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.speech.normalisers import DATA, normaliser_of
from mmdecode.evaluation.speech.wer import Step, align, count_steps, default_scorer

SHIPPED: Mapping[str, Path] = {
    path.name.partition(".")[0]: path for path in sorted((DATA / "nbest").glob("*.jsonl.gz"))
}
"""Real lists of a Whisper that come with the package, by name; see the README next to them."""


class Aligner:
    """Aligns texts under one normaliser and remembers what it has seen.

    Args:
        normaliser: Of `NORMALISERS`.
        scorer: ``plain`` or ``merge``; ``None``: as `mmdecode.evaluation.speech.wer.wer` chooses.

    Raises:
        OptionError: The scorer is ``sclite``, whose references have several readings.
        UnknownNameError: There is no such normaliser.
    """

    def __init__(self, normaliser: str = "whisper", scorer: str | None = None) -> None:
        self.normaliser, self.scorer = normaliser, scorer or default_scorer(normaliser)
        if self.scorer == "sclite":
            raise OptionError(
                "scorer='sclite' allows several readings of a reference, over which the words of "
                "a list cannot be counted; use 'plain' or 'merge'"
            )
        self._normalise = normaliser_of(normaliser)
        self._normal: dict[str, str] = {}
        self._errors: dict[tuple[str, str], int] = {}

    def normal(self, text: str) -> str:
        """The text as it is scored."""
        if text not in self._normal:
            self._normal[text] = " ".join(self._normalise(text).split())
        return self._normal[text]

    def steps(self, said: str, heard: str) -> list[Step]:
        """The alignment that is scored."""
        return self.aligned(self.normal(said), self.normal(heard))

    def aligned(self, said: str, heard: str) -> list[Step]:
        """The alignment of texts that are normalised already; twice is not the same as once."""
        return align(said, heard, "none", self.scorer)

    def errors(self, said: str, heard: str) -> int:
        """Word errors of a text."""
        pair = self.normal(said), self.normal(heard)
        if pair not in self._errors:
            self._errors[pair] = errors_in(self.aligned(*pair))
        return self._errors[pair]


@dataclass(frozen=True)
class ListCounts:
    """Counts of lists, in order.

    Attributes:
        first: ``(lists, 7)`` of `mmdecode.evaluation.speech.wer.count_errors`, of the first
            hypotheses.
        best: The same of the hypothesis with the fewest errors, of equals the first.
        missing: ``(lists,)`` words of the reference that no hypothesis has.
        present: Words of the hypotheses, as they are scored.
        distinct: ``(lists,)`` different texts among the hypotheses, as they came.
        hypotheses: ``(lists,)`` hypotheses.
    """

    first: np.ndarray
    best: np.ndarray
    missing: np.ndarray
    present: list[frozenset[str]]
    distinct: np.ndarray
    hypotheses: np.ndarray


def count_lists(lists: Sequence[NBestList], aligner: Aligner) -> ListCounts:
    """Counts lists that have references.

    Raises:
        InputError: A list has no reference.
        OptionError: There is no list.
    """
    if not lists:
        raise OptionError("there is no list to score; expected at least one")
    first, best, missing, present = zip(*(_counted(one, aligner) for one in lists), strict=True)
    return ListCounts(
        first=count_steps(first),
        best=count_steps(best),
        missing=np.array(missing, dtype=np.int64),
        present=list(present),
        distinct=np.array([len(set(one.hypotheses)) for one in lists], dtype=np.int64),
        hypotheses=np.array([len(one.hypotheses) for one in lists], dtype=np.int64),
    )


def _counted(
    one: NBestList, aligner: Aligner
) -> tuple[list[Step], list[Step], int, frozenset[str]]:
    """Alignments of the first and of the best hypothesis, words missing, and words present."""
    said = aligner.normal(reference_of(one))
    texts = dict.fromkeys(map(aligner.normal, one.hypotheses))
    alignments = [aligner.aligned(said, text) for text in texts]
    present = frozenset(w for steps in alignments for step in steps for w in step.heard.split())
    missing = sum(
        not right and word not in present
        for word, right in zip(_said(alignments[0]), _right(alignments), strict=True)
    )
    return alignments[0], min(alignments, key=errors_in), missing, present


def _said(steps: Sequence[Step]) -> list[str]:
    return [word for step in steps for word in step.said.split()]


def _right(alignments: Sequence[Sequence[Step]]) -> list[bool]:
    """Whether each word of the reference is right in one of them."""
    each = [[s.kind == "equal" for s in steps for _ in s.said.split()] for steps in alignments]
    return [any(flags) for flags in zip(*each, strict=True)]


def errors_in(steps: Sequence[Step]) -> int:
    """Errors of an alignment."""
    return sum(step.kind != "equal" for step in steps)


def reference_of(one: NBestList) -> str:
    """What was said.

    Raises:
        InputError: It is not known.
    """
    if one.reference is None:
        raise InputError(
            f"the list {one.id!r} has no reference to score against; give the references with a "
            "manifest, or write them into the file"
        )
    return one.reference


def with_references(lists: Sequence[NBestList], entries: Sequence[Entry]) -> list[NBestList]:
    """Lists with the texts of a manifest, found by id or by the path of the recording.

    Lists that have a reference keep it.

    Raises:
        InputError: A list has none, and the manifest has no text for it.
    """
    texts = {entry.audio: entry.text for entry in entries if entry.audio is not None}
    texts |= {entry.id: entry.text for entry in entries}
    found = []
    for one in lists:
        text = one.reference if one.reference is not None else texts.get(one.id)
        if text is None and "#" not in one.id:  # the text of a recording is not that of a window
            text = texts.get(one.audio or "")
        if text is None:
            raise InputError(
                f"the manifest has no text for the list {one.id!r}; expected an entry of that id, "
                "and for recordings of several windows one for each window"
            )
        found.append(replace(one, reference=text))
    return found


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What became of the first hypotheses when they were replaced.

    Attributes:
        improved, unchanged, worse: Lists by their number of errors, before and after.
        edited: Lists whose normalised text is another.
        new_words: Words that stand in no hypothesis of their list.
        new_words_right: Of these, the ones that are right.
    """

    improved: int
    unchanged: int
    worse: int
    edited: int
    new_words: int
    new_words_right: int


def changes(
    lists: Sequence[NBestList],
    counts: ListCounts,
    texts: Sequence[str],
    alignments: Sequence[Sequence[Step]],
    aligner: Aligner,
) -> Changes:
    """Compares texts with the first hypotheses of their lists.

    Args:
        lists: With references.
        counts: Of these.
        texts: What is handed on for each.
        alignments: Of the references with ``texts``.
        aligner: With which they were made.
    """
    before = counts.first[:, 2:5].sum(1)
    after = np.array([errors_in(steps) for steps in alignments])
    new = [
        step.kind
        for steps, present in zip(alignments, counts.present, strict=True)
        for step in steps
        for word in step.heard.split()
        if word not in present
    ]
    pairs = zip(lists, texts, strict=True)
    return Changes(
        improved=int((after < before).sum()),
        unchanged=int((after == before).sum()),
        worse=int((after > before).sum()),
        edited=sum(aligner.normal(one.best) != aligner.normal(text) for one, text in pairs),
        new_words=len(new),
        new_words_right=new.count("equal"),
    )
