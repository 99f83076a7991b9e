"""Hallucinations of a recogniser: words on non-speech, runs of insertions, and repetition.

Counts need only reference and hypothesis, so that transcripts of other systems can be scored too. A
transcriber of this package also counts the audio windows whose text ended in repetition
(`mmdecode.evaluation.speech.samples.Sample.repetitive_windows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mmdecode.asr.decoding.repetition import first_round_end
from mmdecode.evaluation.speech.wer import Step

RUN = 5
"""Smallest number of consecutive inserted words that count as a hallucinated run."""


@dataclass(frozen=True, kw_only=True)
class HallucinationCounts:
    """Counts of hallucinations over a corpus.

    Attributes:
        utterances: Utterances scored.
        empty: Utterances whose reference has no word (non-speech).
        empty_hallucinated: Utterances with an empty reference in which words were recognised.
        empty_words: Words recognised in the utterances with an empty reference.
        runs: Utterances with a run of at least `RUN` insertions, empty references included.
        run_words: Words of all such runs.
        loops: Utterances whose hypothesis ends in repetition, see
            `mmdecode.asr.decoding.repetition`, while the reference does not.
    """

    utterances: int
    empty: int
    empty_hallucinated: int
    empty_words: int
    runs: int
    run_words: int
    loops: int

    @property
    def rate(self) -> float | None:
        """Share of empty references with recognised words; ``None``: no reference is empty."""
        return self.empty_hallucinated / self.empty if self.empty else None

    @property
    def run_rate(self) -> float:
        """Share of utterances with a run of insertions."""
        return self.runs / self.utterances

    @property
    def loop_rate(self) -> float:
        """Share of utterances that end in repetition."""
        return self.loops / self.utterances


def count_hallucinations(alignments: Iterable[Sequence[Step]]) -> HallucinationCounts:
    """Counts hallucinations in aligned utterances.

    Args:
        alignments: Alignment of each utterance, at least one; see
            `mmdecode.evaluation.speech.wer.align`.
    """
    rows = []
    for steps in alignments:
        expected = [word for step in steps for word in step.reference.split()]
        recognised = [word for step in steps for word in step.hypothesis.split()]
        inserted = [
            sum(len(step.hypothesis.split()) for step in group)
            for kind, group in groupby(steps, lambda step: step.kind)
            if kind == "insert"
        ]
        long = [words for words in inserted if words >= RUN]
        row = {
            "utterances": 1,
            "empty": not expected,
            "empty_hallucinated": not expected and bool(recognised),
            "empty_words": 0 if expected else len(recognised),
            "runs": bool(long),
            "run_words": sum(long),
            "loops": first_round_end(recognised) is not None and first_round_end(expected) is None,
        }
        rows.append(row)
    return HallucinationCounts(**{name: sum(row[name] for row in rows) for name in rows[0]})
