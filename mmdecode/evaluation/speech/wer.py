"""Word error rate: errors over words of the whole corpus, with normaliser and alignment named.

A pair of texts is normalised, split at spaces and aligned by one of `SCORERS`:

* ``plain``: minimal edit distance, each error costs one (jiwer).
* ``merge``: the same, but neighbouring words of one side may stand for one word of the other when
  their letters are equal: "white paper" is "whitepaper" (kaldialign; the leaderboard's). The number
  of reference words stays as it was.
* ``sclite``: insertions and deletions cost 3, substitutions 4 (kaldialign); upper and lower case
  are the same, and of alternatives in the reference, ``{ a / b }`` with ``@`` for nothing, the best
  one counts, as in NIST's sclite.

Rates are those of jiwer: WER = (S + D + I) / N, MER = (S + D + I) / (H + S + D + I) and WIL =
1 - (H / N) (H / M) for H hits, N reference words and M recognised words (Morris et al., 2004), with
sums over the corpus. Where no reference has a word, WER is the number of insertions.

A reference that holds characters of a script without spaces (Chinese, Japanese, Thai and others) is
aligned by them: each is a word of its own, words of other scripts next to them stay words, and the
rate is the character error rate, of mixed texts the mixed one. Its character errors leave spaces
out.
"""

from __future__ import annotations

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
from mmdecode.evaluation.stats.intervals import LEVEL, RESAMPLES, interval, resampled_sums, sums_by

SCORERS = ("plain", "merge", "sclite")
COLUMNS = (
    "words",
    "heard_words",
    "substitutions",
    "deletions",
    "insertions",
    "characters",
    "character_errors",
)
"""What `count_errors` counts, in order."""
Kind = Literal["equal", "substitute", "insert", "delete"]
_MOST_READINGS = 10_000


@dataclass(frozen=True)
class Step:
    """One step of an alignment.

    Attributes:
        kind: ``equal``, ``substitute``, ``insert`` or ``delete``.
        said: Word of the reference, empty for an insertion; several where words were merged.
        heard: Word of the hypothesis, empty for a deletion; several where words were merged.
    """

    kind: Kind
    said: str
    heard: str


@dataclass(frozen=True, kw_only=True)
class WER:
    """One corpus score.

    Attributes:
        low, high: 95 % interval of the word error rate, bootstrap over utterances or groups.
        words, heard_words: Words of the references and of the hypotheses.
        substitutions, deletions, insertions: The errors.
        characters, character_errors: Of the references, spaces included.
        utterances: Pairs scored.
        normaliser: Its name.
        scorer: How words were aligned.
    """

    low: float
    high: float
    words: int
    heard_words: int
    substitutions: int
    deletions: int
    insertions: int
    characters: int
    character_errors: int
    utterances: int
    normaliser: str
    scorer: str

    @property
    def errors(self) -> int:
        """Substitutions, deletions and insertions."""
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
        """Word information lost."""
        if not self.words or not self.heard_words:
            return float(self.words != self.heard_words)
        kept = (self.words - self.substitutions - self.deletions) / self.words
        right = (self.heard_words - self.substitutions - self.insertions) / self.heard_words
        return 1 - kept * right

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
    """Scores a corpus.

    Args:
        references: What was said.
        hypotheses: What was recognised, in the same order.
        normaliser: Of `NORMALISERS`, applied to both sides.
        scorer: Of `SCORERS`; ``None``: ``merge`` for the leaderboard's normaliser, else ``plain``.
        segmented: Whether spaces separate words in scripts without spaces too, on both sides; else
            each of their characters is a unit.
        groups: Speaker or recording of each pair, which the bootstrap then draws; ``None``: it
            draws pairs.
        resamples: Bootstrap draws of the interval.
        seed: Of the bootstrap.

    Raises:
        OptionError: The two sides differ in length or are empty, or the scorer does not exist.
        MissingExtraError: jiwer or kaldialign is not installed.
    """
    scorer = scorer or default_scorer(normaliser)
    counts = count_errors(
        references, hypotheses, normaliser=normaliser, scorer=scorer, segmented=segmented
    )
    return summed(counts, normaliser, scorer, groups, resamples, seed)


def summed(
    counts: np.ndarray,
    normaliser: str,
    scorer: str,
    groups: Sequence[str] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> WER:
    """The score of counted pairs; arguments as of `wer`.

    Args:
        counts: ``(pairs, 7)``, of `count_errors`.
        normaliser: With which it was counted.
        scorer: With which it was counted.
        groups: See `wer`.
        resamples: See `wer`.
        seed: See `wer`.
    """
    table = np.stack([counts[:, 2:5].sum(1), counts[:, 0]], 1)
    drawn = resampled_sums(sums_by(table, groups), resamples, seed)
    low, high = interval(drawn[:, 0] / np.maximum(drawn[:, 1], 1), LEVEL)
    return WER(
        **{name: int(total) for name, total in zip(COLUMNS, counts.sum(0), strict=True)},
        low=low,
        high=high,
        utterances=len(counts),
        normaliser=normaliser,
        scorer=scorer,
    )


def default_scorer(normaliser: str) -> str:
    """How the leaderboard aligns, for its normaliser; else ``plain``."""
    return "merge" if normaliser == "leaderboard" else "plain"


def count_errors(
    references: Sequence[str],
    hypotheses: Sequence[str],
    *,
    normaliser: str = "whisper",
    scorer: str = "plain",
    segmented: bool = False,
) -> np.ndarray:
    """Counts of each pair.

    Args:
        references: What was said.
        hypotheses: What was recognised, in the same order.
        normaliser: Of `NORMALISERS`.
        scorer: Of `SCORERS`.
        segmented: See `wer`.

    Returns:
        ``(pairs, 7)`` integers; the columns are `COLUMNS`.

    Raises:
        OptionError: The two sides differ in length or are empty, or the scorer does not exist.
    """
    if len(references) != len(hypotheses):
        raise OptionError(
            f"{len(references)} references and {len(hypotheses)} hypotheses; expected pairs"
        )
    if not len(references):
        raise OptionError("there is nothing to score; expected at least one pair of texts")
    pairs = zip(references, hypotheses, strict=True)
    return count_steps([align(*pair, normaliser, scorer, segmented) for pair in pairs])


def count_steps(alignments: Iterable[Sequence[Step]]) -> np.ndarray:
    """Counts of aligned pairs, see `count_errors`."""
    jiwer = _scoring("jiwer", "asr")
    rows = []
    for steps in alignments:
        kinds = [step.kind for step in steps]
        said = " ".join(step.said for step in steps if step.said)
        heard = " ".join(step.heard for step in steps if step.heard)
        words = len(said.split()), len(heard.split())
        if is_spaceless(said):
            said, heard = said.replace(" ", ""), heard.replace(" ", "")
        letters = jiwer.process_characters(said, heard)
        rows.append(
            (
                *words,
                kinds.count("substitute"),
                kinds.count("delete"),
                kinds.count("insert"),
                len(said),
                letters.substitutions + letters.deletions + letters.insertions,
            )
        )
    return np.array(rows, dtype=np.int64)


def align(
    reference: str,
    hypothesis: str,
    normaliser: str = "whisper",
    scorer: str = "plain",
    segmented: bool = False,
) -> list[Step]:
    """Aligns the normalised words of two texts as the error rate counts them.

    Args:
        reference: What was said.
        hypothesis: What was recognised.
        normaliser: Of `NORMALISERS`.
        scorer: Of `SCORERS`.
        segmented: See `wer`.

    Raises:
        InputError: The alternatives of a reference have too many combinations.
        OptionError: The scorer does not exist.
    """
    normalise = normaliser_of(normaliser)
    if scorer != "sclite":
        said, heard = normalise(reference), normalise(hypothesis)
        return align_units(*paired_units(said, heard, segmented), scorer)
    heard = normalise(hypothesis.lower())
    found = [
        align_units(*paired_units(normalise(reading), heard, segmented), scorer)
        for reading in readings(reference.lower())
    ]
    return min(found, key=_sclite_cost)


def align_units(said: Sequence[str], heard: Sequence[str], scorer: str = "plain") -> list[Step]:
    """Aligns words, or other units without spaces in them, that are normalised already.

    Args:
        said: Of the reference; for ``sclite`` of one reading of it, in lower case.
        heard: Of the hypothesis.
        scorer: Of `SCORERS`.

    Raises:
        OptionError: The scorer does not exist.
    """
    if scorer == "plain":
        return _plain(said, heard)
    if scorer not in SCORERS:
        raise UnknownNameError.of("scorer", scorer, SCORERS)
    mode = {"merge": "merge_compounds", "sclite": "sclite_mode"}[scorer]
    return _kaldi(said, heard, **{mode: True})


def align_as_written(
    reference: str,
    hypothesis: str,
    normaliser: str = "whisper",
    scorer: str = "plain",
    segmented: bool = False,
) -> list[Step]:
    """Like `align`, but shows words as they were written where the normaliser kept them apart."""
    normalise = normaliser_of(normaliser)
    steps = align(reference, hypothesis, normaliser, scorer, segmented)
    said = iter(_written(reference, [w for s in steps for w in s.said.split()], normalise))
    heard = iter(_written(hypothesis, [w for s in steps for w in s.heard.split()], normalise))

    def shown(words: str, source: Any) -> str:
        return " ".join(itertools.islice(source, len(words.split())))

    return [Step(step.kind, shown(step.said, said), shown(step.heard, heard)) for step in steps]


def readings(reference: str) -> list[str]:
    """All texts that a reference with alternatives allows: ``{ a / b }``, ``@`` for nothing.

    Raises:
        InputError: There are more than 10,000.
    """
    parts = re.split(r"\{([^{}]*)\}", reference)
    choices = [[part] if n % 2 == 0 else part.split("/") for n, part in enumerate(parts)]
    count = int(np.prod([len(choice) for choice in choices], dtype=float))
    if count > _MOST_READINGS:
        raise InputError(
            f"a reference has {count} readings; expected at most {_MOST_READINGS}: cut it into "
            f"shorter utterances: {reference[:60]!r}"
        )
    texts = (" ".join(reading).split() for reading in itertools.product(*choices))
    return [" ".join(word for word in words if word != "@") for words in texts]


def best_of(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Counts of the best hypothesis of each utterance: the N-best oracle.

    Args:
        tables: Of `count_errors`, one per rank; of equals the first counts.

    Returns:
        ``(pairs, 7)`` integers.
    """
    stacked = np.stack(list(tables))  # (ranks, pairs, 7)
    best = stacked[:, :, 2:5].sum(2).argmin(0)
    return stacked[best, np.arange(stacked.shape[1])]


def paired_units(said: str, heard: str, segmented: bool = False) -> tuple[list[str], list[str]]:
    """Words of both texts, by characters where the reference is of a script without spaces.

    Args:
        said: The reference.
        heard: The hypothesis.
        segmented: See `wer`.
    """
    cut = units if is_spaceless(said) and not segmented else str.split
    return cut(said), cut(heard)


def _plain(said: Sequence[str], heard: Sequence[str]) -> list[Step]:
    jiwer = _scoring("jiwer", "asr")
    if not said:
        return [Step("insert", "", word) for word in heard]
    steps = []
    for chunk in jiwer.process_words(" ".join(said), " ".join(heard)).alignments[0]:
        left = said[chunk.ref_start_idx : chunk.ref_end_idx]
        right = heard[chunk.hyp_start_idx : chunk.hyp_end_idx]
        pairs = itertools.zip_longest(left, right, fillvalue="")
        steps += [Step(chunk.type, a, b) for a, b in pairs]
    return steps


def _kaldi(said: Sequence[str], heard: Sequence[str], **mode: bool) -> list[Step]:
    kaldialign = _scoring("kaldialign", "eval")
    steps = []
    for left, right in kaldialign.align(list(said), list(heard), "", **mode):
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
    """The scored words, as written where one written word became one scored word."""
    single = [(normalise(word).split(), word) for word in text.split()]
    written = [(parts[0], word) for parts, word in single if len(parts) == 1]
    shown = list(scored)
    matcher = SequenceMatcher(None, scored, [word for word, _ in written], autojunk=False)
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            shown[block.a + offset] = written[block.b + offset][1]
    return shown


def _scoring(module: str, extra: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"scoring word errors needs {module}", extra=extra) from error
