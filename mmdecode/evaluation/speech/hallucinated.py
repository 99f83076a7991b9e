"""What a recogniser made up: words where nothing was said, runs of insertions, and loops.

Told from texts alone, so that it holds of transcripts made elsewhere too. Next to it, a transcriber
counts the windows that ended in a loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mmdecode.asr.decoding.repetition import first_round_end
from mmdecode.evaluation.speech.wer import Step

RUN = 5
"""So many insertions in a row, with no word of the reference between them, are made up."""


@dataclass(frozen=True, kw_only=True)
class MadeUp:
    """Counts over a corpus.

    Attributes:
        utterances: Scored.
        empty: References without a word.
        empty_heard: Of these, the ones in which words were recognised.
        empty_words: Those words.
        runs: Utterances with a run of at least `RUN` insertions, empty references among them.
        run_words: Words of all such runs.
        loops: Utterances whose recognised text ends in a loop, see
            `mmdecode.asr.decoding.repetition`, and the reference does not.
    """

    utterances: int
    empty: int
    empty_heard: int
    empty_words: int
    runs: int
    run_words: int
    loops: int

    @property
    def rate(self) -> float | None:
        """Hallucination rate: of empty references, in how many words were recognised."""
        return self.empty_heard / self.empty if self.empty else None

    @property
    def run_rate(self) -> float:
        """Share of utterances with a run of insertions."""
        return self.runs / self.utterances

    @property
    def loop_rate(self) -> float:
        """Share of utterances that end in a loop."""
        return self.loops / self.utterances


def made_up(alignments: Iterable[Sequence[Step]]) -> MadeUp:
    """Counts what was made up.

    Args:
        alignments: Of at least one utterance, see `mmdecode.evaluation.speech.wer.align`.
    """
    utterances = empty = empty_heard = empty_words = runs = run_words = loops = 0
    for steps in alignments:
        said = [word for step in steps for word in step.said.split()]
        heard = [word for step in steps for word in step.heard.split()]
        inserted = [
            sum(len(step.heard.split()) for step in group)
            for kind, group in groupby(steps, lambda step: step.kind)
            if kind == "insert"
        ]
        long = [words for words in inserted if words >= RUN]
        utterances += 1
        empty += not said
        empty_heard += not said and bool(heard)
        empty_words += 0 if said else len(heard)
        runs += bool(long)
        run_words += sum(long)
        loops += first_round_end(heard) is not None and first_round_end(said) is None
    return MadeUp(
        utterances=utterances,
        empty=empty,
        empty_heard=empty_heard,
        empty_words=empty_words,
        runs=runs,
        run_words=run_words,
        loops=loops,
    )
