"""Oracle word error rates of N-best lists.

For utterances u with reference r_u and hypotheses h, and the edit distance ED in words (Chen et
al., 2023, arXiv:2309.15701):

* ``o_nb = sum_u min_h ED(h, r_u) / sum_u |r_u|``: rate of the best hypothesis of each list.
* ``o_cp = sum_u #{words of r_u that are in no hypothesis} / sum_u |r_u|``: rate of the best text
  that can be composed of the list's words. A word counts as present if any hypothesis has it,
  regardless of position and count. It is not known whether the published figures count a word as
  missing if the reference has it twice and the hypotheses only once.

``o_cp <= o_nb <= WER of the first hypothesis`` holds for each list, since each missing word is an
error of every hypothesis. With scorer ``merge`` a word also counts as present if it matches merged
words of a hypothesis.
"""

from __future__ import annotations

import functools
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
"""N-best lists of a Whisper model that ship with the package, by name; see their README."""


class Aligner:
    """Aligns texts under one normaliser, with a cache.

    Args:
        normaliser: Name in `mmdecode.evaluation.speech.normalisers.NORMALISERS`.
        scorer: ``plain`` or ``merge``; ``None``: ``merge`` for the leaderboard's normaliser, else
            ``plain``.

    Raises:
        OptionError: The scorer is ``sclite``, which allows alternatives in references.
        UnknownNameError: There is no such normaliser.
    """

    def __init__(self, normaliser: str = "whisper", scorer: str | None = None) -> None:
        self.normaliser, self.scorer = normaliser, scorer or default_scorer(normaliser)
        if self.scorer == "sclite":
            raise OptionError(
                "scorer='sclite' allows alternatives in a reference, for which the oracles of a "
                "list cannot be computed; use 'plain' or 'merge'"
            )
        self._normalise = functools.cache(normaliser_of(normaliser))
        self._errors = functools.cache(lambda *pair: errors_in(self.aligned(*pair)))

    def normal(self, text: str) -> str:
        """Normalises a text."""
        return " ".join(self._normalise(text).split())

    def steps(self, reference: str, hypothesis: str) -> list[Step]:
        """Normalises and aligns two texts."""
        return self.aligned(self.normal(reference), self.normal(hypothesis))

    def aligned(self, reference: str, hypothesis: str) -> list[Step]:
        """Aligns texts that are normalised already, without normalising them again."""
        return align(reference, hypothesis, "none", self.scorer)

    def errors(self, reference: str, hypothesis: str) -> int:
        """Number of word errors of a hypothesis."""
        return self._errors(self.normal(reference), self.normal(hypothesis))


@dataclass(frozen=True)
class ListCounts:
    """Counts for each of several lists, in order.

    Attributes:
        first: Error counts of the first hypotheses, ``(lists, 7)``, as from
            `mmdecode.evaluation.speech.wer.count_errors`.
        best: Error counts of the hypotheses with the fewest errors, ``(lists, 7)``.
        missing: Number of words of the reference that no hypothesis has, ``(lists,)``.
        present: Normalised words of the hypotheses of each list.
        distinct: Number of different hypotheses before normalisation, ``(lists,)``.
        hypotheses: Number of hypotheses, ``(lists,)``.
    """

    first: np.ndarray
    best: np.ndarray
    missing: np.ndarray
    present: list[frozenset[str]]
    distinct: np.ndarray
    hypotheses: np.ndarray


def count_lists(lists: Sequence[NBestList], aligner: Aligner) -> ListCounts:
    """Counts the errors of lists with references.

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
    """Alignments of the first and the best hypothesis, number of missing words, words present."""
    reference = aligner.normal(reference_of(one))
    texts = dict.fromkeys(map(aligner.normal, one.hypotheses))
    alignments = [aligner.aligned(reference, text) for text in texts]
    present = frozenset(
        w for steps in alignments for step in steps for w in step.hypothesis.split()
    )
    words = [word for step in alignments[0] for word in step.reference.split()]
    missing = sum(
        not right and word not in present
        for word, right in zip(words, _right(alignments), strict=True)
    )
    return alignments[0], min(alignments, key=errors_in), missing, present


def _right(alignments: Sequence[Sequence[Step]]) -> list[bool]:
    """Whether each word of the reference is right in at least one alignment."""
    each = [[s.kind == "equal" for s in steps for _ in s.reference.split()] for steps in alignments]
    return [any(flags) for flags in zip(*each, strict=True)]


def errors_in(steps: Sequence[Step]) -> int:
    """Number of errors of an alignment."""
    return sum(step.kind != "equal" for step in steps)


def reference_of(one: NBestList) -> str:
    """The reference of a list.

    Raises:
        InputError: The list has no reference.
    """
    if one.reference is None:
        raise InputError(
            f"the list {one.id!r} has no reference to score against; give the references with a "
            "manifest, or write them into the file"
        )
    return one.reference


def with_references(lists: Sequence[NBestList], entries: Sequence[Entry]) -> list[NBestList]:
    """Adds references from a manifest to lists, matched by id or by the path of the recording.

    Lists that have a reference keep it.

    Raises:
        InputError: A list has no reference, and the manifest has no text for it.
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
                f"the manifest has no text for the list {one.id!r}; expected an entry with that id "
                "(for a recording of several windows, an entry for each window)"
            )
        found.append(replace(one, reference=text))
    return found
