"""Paired comparison of two modes of decoding on the same recordings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mmdecode.errors import OptionError
from mmdecode.evaluation.speech.samples import Sample
from mmdecode.evaluation.speech.wer import Step
from mmdecode.evaluation.stats.intervals import (
    LEVEL,
    PairedBootstrap,
    PairedTest,
    interval,
    mapsswe,
    paired_bootstrap,
    paired_test,
    resampled_sums,
    sums_by,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """Samples of one mode with their alignments and error counts.

    Attributes:
        mode: Name of the mode.
        samples: One sample per recording, in order.
        alignments: Alignment of each sample.
        counts: Word and error counts of each recording, ``(recordings, 7)``, see
            `mmdecode.evaluation.speech.wer.count_errors`.
    """

    mode: str
    samples: Sequence[Sample]
    alignments: Sequence[Sequence[Step]]
    counts: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of two modes on the same recordings; differences are first minus second.

    Attributes:
        first, second: Names of the two modes.
        same: Number of recordings whose normalised texts are equal.
        of: Number of recordings compared.
        bootstrap: Paired bootstrap of the difference of the word error rates.
        mapsswe: Matched-pairs sentence-segment word error test.
        utterances: The same test with whole recordings as segments.
        p_holm: P-value of ``mapsswe``, corrected by Holm for all comparisons of the report;
            ``None``: not corrected.
        margin: Increase of the word error rate that is tolerated (non-inferiority margin), as a
            share: 0.001 is 0.1 percentage points.
        within_margin: Whether the 95 % interval shows that the second mode's word error rate is
            higher by less than the margin.
        speedup: Decoding time of the first mode over that of the second; ``None``: not timed.
        speedup_low, speedup_high: 95 % interval of the speedup, by bootstrap over batches;
            ``None``: there was one batch.
    """

    first: str
    second: str
    same: int
    of: int
    bootstrap: PairedBootstrap
    mapsswe: PairedTest
    utterances: PairedTest
    p_holm: float | None
    margin: float
    within_margin: bool
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None

    def __str__(self) -> str:
        found = self.bootstrap
        corrected = "" if self.p_holm is None else f", {self.p_holm:.4f} by Holm"
        lines = [
            f"{self.second} against {self.first}: {self.same} of {self.of} texts are the same",
            f"WER {_signed(-100 * found.difference)} points "
            f"[{_signed(-100 * found.high)}, {_signed(-100 * found.low)}]; "
            f"better in {100 * found.p_second_better:.1f} % of the resamples",
            f"matched pairs: z = {self.mapsswe.z:.3f} over {self.mapsswe.count} segments, "
            f"p = {self.mapsswe.p:.4f}{corrected}",
            f"a loss under {100 * self.margin:g} points is "
            f"{'shown' if self.within_margin else 'not shown'}",
        ]
        if self.speedup is not None:
            spread = ""
            if self.speedup_low is not None:
                spread = f" [{self.speedup_low:.2f}, {self.speedup_high:.2f}]"
            lines.append(f"{self.speedup:.2f} times as fast{spread}")
        return "; ".join(lines)


def verdict_of(first: str, rate: float, comparisons: Sequence[Comparison]) -> str:
    """States in one sentence which modes differ from the first in word errors, and the fastest.

    Args:
        first: Name of the first mode.
        rate: Its word error rate.
        comparisons: Comparisons of the other modes with it, corrected by Holm.
    """
    kinds: dict[str, list[str]] = {"fewer": [], "more": [], "no other number of": []}
    for one in comparisons:
        kind = "no other number of"
        if one.p_holm is not None and one.p_holm < 1 - LEVEL:
            kind = "fewer" if one.bootstrap.difference > 0 else "more"
        kinds[kind].append(one.second)
    than = f"word errors than {first} ({100 * rate:.2f} %)"
    parts = [
        f"{', '.join(names)}: {kind} {than}"
        if kind != "no other number of"
        else f"{', '.join(names)}: no difference from {first} ({100 * rate:.2f} %) is shown"
        for kind, names in kinds.items()
        if names
    ]
    timed = [one for one in comparisons if one.speedup is not None and one.speedup > 1]
    if timed:
        best = max(timed, key=lambda one: one.speedup or 0.0)
        parts.append(f"{best.second} is {best.speedup:.2f} times as fast")
    return "; ".join(parts) + "."


def compared(
    first: Scored,
    second: Scored,
    *,
    groups: Sequence[str] | None,
    margin: float,
    resamples: int,
    seed: int,
) -> Comparison:
    """Compares two modes, without a correction for further comparisons.

    Args:
        first: The baseline.
        second: The mode that is compared with it.
        groups: Bootstrap unit of each recording, such as its speaker; ``None``: the recording.
        margin: See `Comparison`.
        resamples: Resamples of every bootstrap.
        seed: Seed of every bootstrap.

    Raises:
        OptionError: The modes have different recordings or references.
    """
    mine, theirs = ([(s.id, s.text) for s in one.samples] for one in (first, second))
    if mine != theirs:
        raise OptionError(
            "the reports have different recordings or references; compare runs on the same data"
        )
    errors = first.counts[:, 2:5].sum(1), second.counts[:, 2:5].sum(1)
    words = np.stack([first.counts[:, 0], second.counts[:, 0]], 1)
    bootstrap = paired_bootstrap(*errors, words, groups, resamples, seed)
    matched = mapsswe(first.alignments, second.alignments)
    texts = [
        [[step.hypothesis for step in steps if step.hypothesis] for steps in one.alignments]
        for one in (first, second)
    ]
    speedup, low, high = _speedup(first.samples, second.samples, resamples, seed)
    return Comparison(
        first=first.mode,
        second=second.mode,
        same=sum(a == b for a, b in zip(*texts, strict=True)),
        of=len(first.samples),
        bootstrap=bootstrap,
        mapsswe=matched,
        utterances=paired_test(errors[0] - errors[1]),
        p_holm=None,
        margin=margin,
        within_margin=-bootstrap.low < margin,
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
    )


def _speedup(
    first: Sequence[Sample], second: Sequence[Sample], resamples: int, seed: int
) -> tuple[float | None, float | None, float | None]:
    """Time of the first mode over time of the second, and the 95 % interval over batches."""
    timed = [(a, b) for a, b in zip(first, second, strict=True) if a.time and b.time]
    if not timed:
        return None, None, None
    table = np.array([(a.time, b.time) for a, b in timed], dtype=float)
    batches = [str(a.batch["number"]) if a.batch else a.id for a, _ in timed]
    before, after = table.sum(0)
    if len(set(batches)) == 1:
        return float(before / after), None, None
    sums = resampled_sums(sums_by(table, batches), resamples, seed)
    return (float(before / after), *interval(sums[:, 0] / sums[:, 1]))


def _signed(value: float) -> str:
    return f"{value + 0.0:+.2f}"
