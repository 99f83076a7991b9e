"""Word error rate: errors over words of the whole corpus, with the normaliser named.

Source: the alignment is jiwer's (minimal edit distance); the normaliser ``whisper-english`` is the
one of the Whisper paper as transformers ships it; the interval is a percentile bootstrap over
utterances (evaluation by corpus, not by averaging ratios).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from mmdecode.errors import MissingExtraError, OptionError

SPELLING = Path(__file__).parent / "data" / "whisper_english_spelling.json"


@dataclass(frozen=True, kw_only=True)
class WER:
    """One corpus score.

    Attributes:
        value: Errors over reference words.
        low, high: 95 % interval, bootstrap over utterances.
        words: Reference words.
        substitutions, deletions, insertions: The errors.
        utterances: Pairs scored.
        normaliser: Its name.
    """

    value: float
    low: float
    high: float
    words: int
    substitutions: int
    deletions: int
    insertions: int
    utterances: int
    normaliser: str

    def __str__(self) -> str:
        return (
            f"{100 * self.value:.2f} % [{100 * self.low:.2f}, {100 * self.high:.2f}] "
            f"({self.words} words, {self.normaliser})"
        )


@lru_cache
def whisper_english() -> Callable[[str], str]:
    """Whisper's English normaliser with its spelling table."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    return EnglishTextNormalizer(json.loads(SPELLING.read_text()))


NORMALISERS: dict[str, Callable[[], Callable[[str], str]]] = {
    "whisper-english": whisper_english,
    "none": lambda: str.strip,
}


def wer(
    references: Sequence[str],
    hypotheses: Sequence[str],
    *,
    normaliser: str = "whisper-english",
    resamples: int = 1000,
    seed: int = 0,
) -> WER:
    """Scores a corpus.

    Args:
        references: What was said.
        hypotheses: What was recognised, in the same order.
        normaliser: Of `NORMALISERS`, applied to both sides.
        resamples: Bootstrap draws of the interval.
        seed: Of the bootstrap.

    Raises:
        OptionError: The two sides differ in length, or no reference has a word.
        MissingExtraError: jiwer is not installed.
    """
    try:
        import jiwer
    except ImportError as error:
        raise MissingExtraError("scoring word errors needs jiwer", extra="asr") from error
    if len(references) != len(hypotheses):
        raise OptionError(
            f"{len(references)} references and {len(hypotheses)} hypotheses; expected pairs"
        )
    normalise = NORMALISERS[normaliser]()
    counts = np.zeros(
        (len(references), 4), dtype=int
    )  # words, substitutions, deletions, insertions
    for row, (reference, hypothesis) in enumerate(zip(references, hypotheses, strict=True)):
        said, heard = normalise(reference).split(), normalise(hypothesis).split()
        if not said:  # jiwer refuses an empty reference: every recognised word is an insertion
            counts[row] = 0, 0, 0, len(heard)
            continue
        result = jiwer.process_words(" ".join(said), " ".join(heard))
        counts[row] = len(said), result.substitutions, result.deletions, result.insertions
    total = counts.sum(0)
    if total[0] == 0:
        raise OptionError("no reference holds a word; a rate over zero words is undefined")
    draws = np.random.default_rng(seed).integers(len(counts), size=(resamples, len(counts)))
    sums = counts[draws].sum(1)
    rates = sums[:, 1:].sum(1) / np.maximum(sums[:, 0], 1)
    low, high = np.quantile(rates, [0.025, 0.975])
    return WER(
        value=float(total[1:].sum() / total[0]),
        low=float(low),
        high=float(high),
        words=int(total[0]),
        substitutions=int(total[1]),
        deletions=int(total[2]),
        insertions=int(total[3]),
        utterances=len(references),
        normaliser=normaliser,
    )
