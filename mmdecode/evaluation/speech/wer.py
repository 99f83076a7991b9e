"""Word error rate of a corpus, with a choice of normaliser and alignment.

A pair of texts is normalised, split at spaces and aligned by one of `SCORERS`:

* ``plain``: minimal edit distance, each error costs one (jiwer).
* ``merge``: the same, but neighbouring words of one text may match one word of the other text if
  their letters are equal: "white paper" matches "whitepaper" (kaldialign; used by the Open ASR
  leaderboard). Reference words are counted before merging.
* ``sclite``: insertions and deletions cost 3, substitutions 4 (kaldialign). Case is ignored. The
  reference may hold alternatives, ``{ a / b }`` with ``@`` for nothing; the alternative with the
  lowest cost counts, as in NIST's sclite.

Rates are defined as in jiwer: WER = (S + D + I) / N, MER = (S + D + I) / (H + S + D + I) and WIL =
1 - (H / N) (H / M) for H hits, S substitutions, D deletions, I insertions, N reference words and M
recognised words, each summed over the corpus (Morris et al. 2004). If the references have no words,
WER is the number of insertions.

A reference in a script without spaces (Chinese, Japanese, Thai and others) is aligned by
characters; words of other scripts in it remain words. The word error rate is then the character
error rate, or the mixed error rate. Spaces do not count in the character errors of such a
reference.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal

import numpy as np

from mmdecode.errors import InputError, MissingExtraError, OptionError, UnknownNameError
from mmdecode.evaluation.speech.normalisers import Normaliser, normaliser_of
from mmdecode.evaluation.speech.scripts import is_spaceless, units
from mmdecode.evaluation.stats.intervals import RESAMPLES, ratio_interval

SCORERS = ("plain", "merge", "sclite")
ERRORS = ("substitutions", "deletions", "insertions")
COLUMNS = ("words", "heard_words", *ERRORS, "characters", "character_errors")
"""Columns of `count_errors`, in order; ``heard_words`` are the words of the hypotheses."""
Kind = Literal["equal", "substitute", "insert", "delete"]
_MOST_READINGS = 10_000


@dataclass(frozen=True)
class Step:
    """One step of an alignment.

    Attributes:
        kind: ``equal``, ``substitute``, ``insert`` or ``delete``.
        reference: Word of the reference, or several merged words; empty for an insertion.
        hypothesis: Word of the hypothesis, or several merged words; empty for a deletion.
    """

    kind: Kind
    reference: str
    hypothesis: str


@dataclass(frozen=True, kw_only=True)
class WER:
    """Word error rate of a corpus, with its counts.

    Attributes:
        low, high: 95 % interval of the word error rate, by bootstrap over utterances or groups.
        words, hypothesis_words: Number of words of the references and of the hypotheses.
        substitutions, deletions, insertions: Number of word errors.
        characters: Number of characters of the references, spaces included.
        character_errors: Edit distance of references and hypotheses in characters.
        utterances: Number of pairs of texts.
        normaliser: Name of the normaliser.
        scorer: Name of the scorer that aligned the words.
    """

    low: float
    high: float
    words: int
    hypothesis_words: int
    substitutions: int
    deletions: int
    insertions: int
    characters: int
    character_errors: int
    utterances: int
    normaliser: str
    scorer: str

    @property
    def counts(self) -> dict[str, int]:
        """Counts of words and errors by name; ``heard_words`` are words of the hypotheses."""
        words = {"words": self.words, "heard_words": self.hypothesis_words}
        return words | {name: getattr(self, name) for name in ERRORS}

    @property
    def errors(self) -> int:
        """Number of substitutions, deletions and insertions."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def value(self) -> float:
        """Errors over reference words: the word error rate."""
        return self.errors / max(self.words, 1)

    @property
    def cer(self) -> float:
        """Character errors over reference characters."""
        return self.character_errors / max(self.characters, 1)

    @property
    def mer(self) -> float:
        """Match error rate: errors over steps of the alignment."""
        return self.errors / max(self.words + self.insertions, 1)

    @property
    def wil(self) -> float:
        """Word information lost: 1 - (H / N) (H / M), see the module."""
        if not self.words or not self.hypothesis_words:
            return float(self.words != self.hypothesis_words)
        kept = (self.words - self.substitutions - self.deletions) / self.words
        hits = self.hypothesis_words - self.substitutions - self.insertions
        return 1 - kept * (hits / self.hypothesis_words)

    def __str__(self) -> str:
        merged = "" if self.scorer == "plain" else f", {self.scorer}"
        return (
            f"{100 * self.value:.2f} % [{100 * self.low:.2f}, {100 * self.high:.2f}] "
            f"({self.words} words, {self.normaliser}{merged})"
        )


def wer(
    references: Sequence[str],
    hypotheses: Sequence[str],
    *,
    normaliser: str = "whisper",
    scorer: str | None = None,
    segmented: bool = False,
    groups: Sequence[str] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> WER:
    """Computes the word error rate of a corpus.

    Args:
        references: Reference texts.
        hypotheses: Recognised texts, in the same order.
        normaliser: Name in `mmdecode.evaluation.speech.normalisers.NORMALISERS`; applied to
            references and hypotheses.
        scorer: One of `SCORERS`; ``None``: ``merge`` for the leaderboard's normaliser, else
            ``plain``.
        segmented: Whether texts in scripts without spaces are already split into words by spaces;
            if not, each of their characters counts as a word.
        groups: Speaker or recording of each pair, which the bootstrap then resamples; ``None``: it
            resamples pairs.
        resamples: Number of bootstrap samples for the interval.
        seed: Seed of the bootstrap.

    Raises:
        OptionError: References and hypotheses differ in number or are empty, or the scorer does not
            exist.
        MissingExtraError: jiwer or kaldialign is not installed.
    """
    scorer = scorer or default_scorer(normaliser)
    counts = count_errors(
        references, hypotheses, normaliser=normaliser, scorer=scorer, segmented=segmented
    )
    return summed(counts, normaliser, scorer, groups, resamples=resamples, seed=seed)


def summed(
    counts: np.ndarray,
    normaliser: str,
    scorer: str,
    groups: Sequence[str] | None = None,
    **resampling: int,
) -> WER:
    """Computes the score of a corpus from the counts of its pairs of texts.

    Args:
        counts: Counts of each pair, ``(pairs, 7)``, from `count_errors`.
        normaliser: Name of the normaliser that was applied.
        scorer: Name of the scorer that aligned the pairs.
        groups: See `wer`.
        **resampling: Resamples and seed of the bootstrap.
    """
    table = np.stack([counts[:, 2:5].sum(1), counts[:, 0]], 1)
    low, high = ratio_interval(table, groups, **resampling)
    totals = {name: int(total) for name, total in zip(COLUMNS, counts.sum(0), strict=True)}
    return WER(
        hypothesis_words=totals.pop("heard_words"),
        **totals,
        low=low,
        high=high,
        utterances=len(counts),
        normaliser=normaliser,
        scorer=scorer,
    )


def default_scorer(normaliser: str) -> str:
    """Returns the default scorer: ``merge`` for the leaderboard's normaliser, else ``plain``."""
    return "merge" if normaliser == "leaderboard" else "plain"


def count_errors(
    references: Sequence[str], hypotheses: Sequence[str], **scoring: Any
) -> np.ndarray:
    """Counts words and errors of each pair of texts.

    Args:
        references: Reference texts.
        hypotheses: Recognised texts, in the same order.
        **scoring: Normaliser, scorer and segmentation, see `align`.

    Returns:
        ``(pairs, 7)`` integers; the columns are `COLUMNS`.

    Raises:
        OptionError: References and hypotheses differ in number or are empty, or the scorer does not
            exist.
    """
    if len(references) != len(hypotheses):
        raise OptionError(
            f"{len(references)} references and {len(hypotheses)} hypotheses; expected pairs"
        )
    if not len(references):
        raise OptionError("there is nothing to score; expected at least one pair of texts")
    pairs = zip(references, hypotheses, strict=True)
    return count_steps([align(*pair, **scoring) for pair in pairs])


def count_steps(alignments: Iterable[Sequence[Step]]) -> np.ndarray:
    """Counts words and errors of aligned pairs, see `count_errors`."""
    jiwer = _scoring("jiwer", "asr")
    rows = []
    for steps in alignments:
        kinds = [step.kind for step in steps]
        reference = " ".join(step.reference for step in steps if step.reference)
        hypothesis = " ".join(step.hypothesis for step in steps if step.hypothesis)
        row = [len(reference.split()), len(hypothesis.split())]
        row += [kinds.count(kind) for kind in ("substitute", "delete", "insert")]
        if is_spaceless(reference):
            reference, hypothesis = reference.replace(" ", ""), hypothesis.replace(" ", "")
        edits = jiwer.process_characters(reference, hypothesis)
        errors = edits.substitutions + edits.deletions + edits.insertions
        rows.append([*row, len(reference), errors])
    return np.array(rows, dtype=np.int64)


def align(
    reference: str,
    hypothesis: str,
    normaliser: str = "whisper",
    scorer: str = "plain",
    segmented: bool = False,
) -> list[Step]:
    """Aligns the normalised words of two texts; the error rate counts the steps of this alignment.

    Args:
        reference: Reference text.
        hypothesis: Recognised text.
        normaliser: Name in `mmdecode.evaluation.speech.normalisers.NORMALISERS`.
        scorer: One of `SCORERS`.
        segmented: See `wer`.

    Raises:
        InputError: The alternatives of a reference have too many combinations.
        OptionError: The scorer does not exist.
    """
    normalise = normaliser_of(normaliser)
    texts = [reference]
    if scorer == "sclite":
        texts, hypothesis = readings(reference.lower()), hypothesis.lower()
    recognised = normalise(hypothesis)
    pairs = (paired_units(normalise(text), recognised, segmented) for text in texts)
    return min((align_units(*pair, scorer) for pair in pairs), key=_sclite_cost)


def align_units(
    reference: Sequence[str], hypothesis: Sequence[str], scorer: str = "plain"
) -> list[Step]:
    """Aligns lists of normalised words or characters.

    Args:
        reference: Words of the reference; for ``sclite``, words of one of its `readings` in lower
            case.
        hypothesis: Words of the hypothesis.
        scorer: One of `SCORERS`.

    Raises:
        OptionError: The scorer does not exist.
    """
    if scorer == "plain":
        return _plain(reference, hypothesis)
    if scorer not in SCORERS:
        raise UnknownNameError.of("scorer", scorer, SCORERS)
    mode = {"merge": "merge_compounds", "sclite": "sclite_mode"}[scorer]
    return _kaldi(reference, hypothesis, **{mode: True})


def align_as_written(
    reference: str, hypothesis: str, normaliser: str = "whisper", **scoring: Any
) -> list[Step]:
    """Like `align`, but shows words as they were before normalisation, where that is possible.

    A word that the normaliser joined, split or dropped is shown in its normalised form.
    """
    normalise = normaliser_of(normaliser)
    steps = align(reference, hypothesis, normaliser, **scoring)
    left = iter(_written(reference, [w for s in steps for w in s.reference.split()], normalise))
    right = iter(_written(hypothesis, [w for s in steps for w in s.hypothesis.split()], normalise))

    def shown(words: str, source: Any) -> str:
        return " ".join(itertools.islice(source, len(words.split())))

    return [
        Step(step.kind, shown(step.reference, left), shown(step.hypothesis, right))
        for step in steps
    ]


def readings(reference: str) -> list[str]:
    """Lists all texts that a reference with alternatives ``{ a / b }`` allows; ``@`` is no word.

    Raises:
        InputError: There are more than 10,000 such texts.
    """
    parts = re.split(r"\{([^{}]*)\}", reference)
    choices = [[part] if n % 2 == 0 else part.split("/") for n, part in enumerate(parts)]
    count = int(np.prod([len(choice) for choice in choices], dtype=float))
    if count > _MOST_READINGS:
        raise InputError(
            f"the alternatives of a reference allow {count} texts; expected at most "
            f"{_MOST_READINGS}: split it into shorter utterances: {reference[:60]!r}"
        )
    texts = (" ".join(reading).split() for reading in itertools.product(*choices))
    return [" ".join(word for word in words if word != "@") for words in texts]


def paired_units(
    reference: str, hypothesis: str, segmented: bool = False
) -> tuple[list[str], list[str]]:
    """Splits two texts into units: words, or characters for a script without spaces.

    Args:
        reference: Normalised text of the reference.
        hypothesis: Normalised text of the hypothesis.
        segmented: See `wer`.
    """
    cut = units if is_spaceless(reference) and not segmented else str.split
    return cut(reference), cut(hypothesis)


def _plain(reference: Sequence[str], hypothesis: Sequence[str]) -> list[Step]:
    jiwer = _scoring("jiwer", "asr")
    if not reference:
        return [Step("insert", "", word) for word in hypothesis]
    steps = []
    for chunk in jiwer.process_words(" ".join(reference), " ".join(hypothesis)).alignments[0]:
        left = reference[chunk.ref_start_idx : chunk.ref_end_idx]
        right = hypothesis[chunk.hyp_start_idx : chunk.hyp_end_idx]
        pairs = itertools.zip_longest(left, right, fillvalue="")
        steps += [Step(chunk.type, a, b) for a, b in pairs]
    return steps


def _kaldi(reference: Sequence[str], hypothesis: Sequence[str], **mode: bool) -> list[Step]:
    kaldialign = _scoring("kaldialign", "eval")
    steps = []
    for left, right in kaldialign.align(list(reference), list(hypothesis), "", **mode):
        kind: Kind = "substitute"
        if not left or not right:
            kind = "delete" if left else "insert"
        elif left.replace(" ", "") == right.replace(" ", ""):
            kind = "equal"
        steps.append(Step(kind, left, right))
    return steps


def _sclite_cost(steps: Sequence[Step]) -> int:
    costs = {"equal": 0, "substitute": 4, "insert": 3, "delete": 3}
    return sum(costs[step.kind] for step in steps)


def _written(text: str, scored: list[str], normalise: Normaliser) -> list[str]:
    """The scored words; a word that normalisation kept as one word is given as it was written."""
    single = [(normalise(word).split(), word) for word in text.split()]
    written = [(parts[0], word) for parts, word in single if len(parts) == 1]
    shown = list(scored)
    matcher = SequenceMatcher(None, scored, [word for word, _ in written], autojunk=False)
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            shown[block.a + offset] = written[block.b + offset][1]
    return shown


def _scoring(module: str, extra: str) -> Any:
    with MissingExtraError.instead(f"scoring word errors needs {module}", extra=extra):
        return importlib.import_module(module)
