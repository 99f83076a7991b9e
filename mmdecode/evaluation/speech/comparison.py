"""Paired comparison of two modes of decoding on the same recordings."""

from __future__ import annotations

import dataclasses

from mmdecode.evaluation.stats.intervals import PairedBootstrap, PairedTest


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
    p_holm: float | None = None
    margin: float
    within_margin: bool
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None

    @property
    def points(self) -> tuple[str, str, str]:
        """Change of the word error rate in points, second minus first, and its interval."""
        found = self.bootstrap
        change, low, high = (-100 * v + 0.0 for v in (found.difference, found.high, found.low))
        return f"{change:+.2f}", f"{low:+.2f}", f"{high:+.2f}"

    def __str__(self) -> str:
        corrected = "" if self.p_holm is None else f", {self.p_holm:.4f} by Holm"
        change, low, high = self.points
        lines = [
            f"{self.second} against {self.first}: {self.same} of {self.of} texts are the same",
            f"WER {change} points [{low}, {high}]; "
            f"better in {100 * self.bootstrap.p_second_better:.1f} % of the resamples",
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
