"""`SilenceReport`: hallucinations on recordings without speech, and word error rates on speech.

Each mode of decoding transcribes the same clips without speech and the same speech. On non-speech
the report counts recognised words per minute and audio windows whose text ends in repetition. On
speech it computes the word error rate, and compares it with the first mode's.

A mode passes the bar for a kind and level of non-speech if it has at least 80 % fewer words than
the first mode, or if the first mode has fewer than five words per minute and the mode at most one.
It passes on a set of speech if its word error rate is not significantly worse: the rate does not
exceed the upper end of the first mode's interval, and the interval of the paired difference
contains zero or lies on the better side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.errors import OptionError
from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.examples import Examples
from mmdecode.evaluation.report.layout import Rows, between, percent
from mmdecode.evaluation.report.report import Report
from mmdecode.evaluation.speech.normalisers import normaliser_of
from mmdecode.evaluation.speech.samples import Sample, with_alignment
from mmdecode.evaluation.speech.scripts import units
from mmdecode.evaluation.speech.word_report import WERReport
from mmdecode.evaluation.stats.intervals import RESAMPLES, ratio_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NON_SPEECH, SPEECH = "non-speech", "speech"
"""Prefixes of sample ids: ``non-speech/CLASS/NAME``, ``speech/SET/NAME``."""
DOWN, FEW, MOST = 0.8, 5.0, 1.0
"""The bar: a mode must remove at least the share ``DOWN`` of the first mode's words; if the first
mode has fewer than ``FEW`` words per minute, at most ``MOST`` words per minute pass too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonSpeechScore:
    """Words that one mode recognises in one class (kind and level) of non-speech.

    Attributes:
        clips: Number of clips that could be read.
        with_words: Number of clips in which words were recognised.
        minutes: Total length of the clips.
        words: Number of recognised words, all of them hallucinated.
        low, high: 95 % interval of the words per minute, by bootstrap over clips.
        windows: Number of decoded windows.
        loops: Number of windows that ended in repetition.
        down: Share of the first mode's words per minute that this mode removes; ``None``: this is
            the first mode, or the first mode has no words.
        passes: Whether the mode passes the bar; always false for the first mode.
    """

    clips: int
    with_words: int
    minutes: float
    words: int
    low: float
    high: float
    windows: int
    loops: int
    down: float | None = None
    passes: bool = False

    @property
    def rate(self) -> float:
        """Words per minute."""
        return self.words / self.minutes

    @property
    def loop_rate(self) -> float | None:
        """Share of windows that ended in repetition; ``None``: not known."""
        return self.loops / self.windows if self.windows else None


class SilenceReport(Report):
    """Scores of samples of non-speech and speech.

    Args:
        samples: Samples of the same recordings in each mode; ids begin with `NON_SPEECH` or
            `SPEECH`.
        normaliser: Name in `mmdecode.evaluation.speech.normalisers.NORMALISERS`.
        resamples: Resamples of every bootstrap.
        seed: Seed of every bootstrap.
        conditions: Settings of the run by name; kept in the summary and shown on the page.

    Attributes:
        modes: Names of the modes, the baseline first.
        classes: Classes of non-speech (kind and level), in order.
        left_out: Classes that are not scored, since some mode failed on all their recordings.
        speech: Word error report of each set of speech, by its name.

    Raises:
        OptionError: There is no sample of non-speech, or every class is in ``left_out``.
    """

    title = "Words where nobody speaks"

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        normaliser: str = "whisper",
        resamples: int = RESAMPLES,
        seed: int = 0,
        conditions: Mapping[str, Any] | None = None,
    ) -> None:
        self.samples, self.normaliser = list(samples), normaliser
        self.resampling: dict[str, Any] = {"resamples": resamples, "seed": seed}
        self.conditions = dict(conditions or {})
        self.modes = list(dict.fromkeys(sample.mode for sample in samples))
        self._of: dict[str, dict[str, list[Sample]]] = {}  # clips that could be read
        spoken: dict[str, list[Sample]] = {}
        for sample in samples:
            what, name, _ = sample.id.split("/", 2)
            if what == SPEECH:
                spoken.setdefault(name, []).append(sample)
                continue
            clips = self._of.setdefault(name, {mode: [] for mode in self.modes})
            if sample.error is None:
                clips[sample.mode].append(sample)
        if not self._of:
            raise OptionError("there is no recording without speech; expected at least one")
        self.left_out = [name for name, found in self._of.items() if not all(found.values())]
        self.classes = [name for name in self._of if name not in self.left_out]
        if not self.classes:
            raise OptionError(
                f"in each class of recordings without speech ({', '.join(self._of)}), some mode "
                "failed on all recordings; see the errors of the samples"
            )
        self.speech = {
            name: WERReport(found, normaliser=normaliser, only_scored=True, **self.resampling)
            for name, found in spoken.items()
        }

    @cached_property
    def non_speech(self) -> dict[str, dict[str, NonSpeechScore]]:
        """Scores on non-speech, by class and mode."""
        found = {}
        for name in self.classes:
            before, *others = (self._score(self._of[name][mode]) for mode in self.modes)
            scores = [before]
            for one in others:
                down = 1 - one.rate / before.rate if before.words else None
                passes = (down is not None and down >= DOWN) or (
                    before.rate < FEW and one.rate <= MOST
                )
                scores.append(dataclasses.replace(one, down=down, passes=passes))
            found[name] = dict(zip(self.modes, scores, strict=True))
        return found

    def _score(self, clips: Sequence[Sample]) -> NonSpeechScore:
        normalise = normaliser_of(self.normaliser)
        words = [len(units(normalise(clip.pred_text))) for clip in clips]
        minutes = [(clip.duration or 0.0) / 60 for clip in clips]
        low, high = ratio_interval(np.array([words, minutes]).T, **self.resampling)
        return NonSpeechScore(
            clips=len(clips),
            with_words=sum(map(bool, words)),
            minutes=sum(minutes),
            words=sum(words),
            low=low,
            high=high,
            windows=sum(clip.windows or 0 for clip in clips),
            loops=sum(clip.repetitive_windows or 0 for clip in clips),
        )

    def speech_holds(self, mode: str, name: str) -> bool:
        """Whether a mode passes the bar on a set of speech, see the module."""
        report = self.speech[name]
        found, first = (report.summary["modes"][m] for m in (mode, self.modes[0]))
        [test] = (one for one in report.comparisons if one.second == mode)
        return found["wer"] <= first["wer_high"] and test.bootstrap.high >= 0  # first minus second

    @cached_property
    def verdicts(self) -> dict[str, dict[str, Any]]:
        """For each mode but the first: classes and speech sets below the bar, and the verdict."""
        found = {}
        for mode in self.modes[1:]:
            missed = [name for name in self.classes if not self.non_speech[name][mode].passes]
            worse = [name for name in self.speech if not self.speech_holds(mode, name)]
            found[mode] = {
                "missed": missed,
                "worse_speech": worse,
                "passes": not missed and not worse,
            }
        return found

    @property
    def summary(self) -> dict[str, Any]:
        """All numbers and settings of the report."""
        return {
            "task": "silence",
            "normaliser": self.normaliser,
            **self.resampling,
            "bar": {"down": DOWN, "few_per_minute": FEW, "most_per_minute": MOST},
            "modes": self.modes,
            "non_speech": {
                name: {
                    mode: dataclasses.asdict(one) | {"rate": one.rate, "loop_rate": one.loop_rate}
                    for mode, one in found.items()
                }
                for name, found in self.non_speech.items()
            },
            "speech": {
                name: {key: report.summary[key] for key in ("modes", "comparisons")}
                for name, report in self.speech.items()
            },
            "verdicts": self.verdicts,
            "left_out": self.left_out,
            "conditions": self.conditions,
        }

    def rows(self) -> list[dict[str, str]]:
        """Table of all scores on non-speech, with a row per class and mode."""
        return [
            {
                "non-speech": name,
                "mode": mode,
                "words/min": f"{one.rate:.2f}",
                "95 %": f"{one.low:.2f} to {one.high:.2f}",
                "down %": percent(one.down, ".1f"),
                "clips with words": f"{one.with_words} of {one.clips}",
                "repeating windows %": percent(one.loop_rate),
                "bar": "" if mode == self.modes[0] else "above" if one.passes else "missed",
            }
            for name, found in self.non_speech.items()
            for mode, one in found.items()
        ]

    def rate_rows(self) -> list[dict[str, str]]:
        """Table of words per minute, with a row per class and a column per mode."""
        return [
            {"words per minute": name}
            | {mode: f"{one.rate:.2f}{' +' * one.passes}" for mode, one in found.items()}
            for name, found in self.non_speech.items()
        ]

    def speech_rows(self) -> list[dict[str, str]]:
        """Table of word error rates, with a row per set of speech and mode."""
        rows = []
        for name, report in self.speech.items():
            changes = {one.second: "{} [{}, {}]".format(*one.points) for one in report.comparisons}
            for mode, found in report.summary["modes"].items():
                row = {
                    "speech": name,
                    "mode": mode,
                    "WER %": percent(found["wer"]),
                    "95 %": between(found["wer_low"], found["wer_high"]),
                    "change": changes.get(mode, ""),
                    "repeating windows %": percent(found["loop_rate"]),
                    "bar": "",
                }
                if mode in changes:
                    row["bar"] = "holds" if self.speech_holds(mode, name) else "worse"
                rows.append(row)
        return rows

    def about(self) -> str:
        """Explains the numbers in a few sentences."""
        first = next(iter(self.non_speech.values()))[self.modes[0]]
        parts = [
            f"{first.minutes:.1f} minutes of each kind and level; 95 % intervals by bootstrap over "
            f"clips and recordings; bar: words down by {100 * DOWN:.0f} % against "
            f"{self.modes[0]!r} (+), or at most {MOST:g} a minute where it has fewer than {FEW:g}, "
            "and a word error rate on speech that is not significantly worse"
        ]
        if self.conditions.get("rows_left_out"):
            rows = self.conditions["rows_left_out"]
            parts.append(f"{rows} rows of the data could not be used and were left out")
        if self.left_out:
            parts.append(f"left out, since no recording could be read: {', '.join(self.left_out)}")
        if self.conditions.get("limit"):
            parts.append("only a part of the set was scored: not a result to report")
        return ".\n".join(parts) + "."

    def brief(self) -> list[Rows]:
        """Words per minute of each class, and word error rates of each set of speech."""
        return [rows for rows in (self.rate_rows(), self.speech_rows()) if rows]

    def tables(self) -> list[Rows]:
        """All scores on non-speech, then the short tables."""
        return [self.rows(), *self.brief()]

    def verdict(self) -> list[str]:
        """States which modes pass the bar, and what the others miss."""
        passed = [mode for mode, found in self.verdicts.items() if found["passes"]]
        names = ", ".join(passed) if passed else "none"
        lines = [f"Of {len(self.modes) - 1} modes against {self.modes[0]}, {names} pass the bar."]
        for mode, found in self.verdicts.items():
            missed = ", ".join(found["missed"]) or "nothing"
            worse = f"; worse on {', '.join(found['worse_speech'])}" * bool(found["worse_speech"])
            lines.append(f"{mode}: misses {missed}{worse}.")
        return lines

    def worst(self, mode: str, count: int = 5) -> Examples:
        """Clips in which a mode hallucinated the most words, with audio players."""
        found = [s for name in self.classes for s in self._of[name][mode] if s.pred_text]
        found.sort(key=lambda sample: -len(sample.pred_text.split()))
        return Examples(
            with_alignment(sample, len(sample.pred_text.split()), self.normaliser)
            for sample in found[:count]
        )

    def examples(self) -> dict[str, Examples]:
        """The clips with the most words of each mode."""
        return {f"Most words, {mode}": self.worst(mode) for mode in self.modes}

    def records(self) -> list[dict[str, Any]]:
        """Every sample."""
        return [sample.as_dict() for sample in self.samples]

    def figures(self) -> dict[str, Figure | bytes]:
        """Words per minute of each class and mode."""
        return {"words_per_minute": plots.words_per_minute(self.non_speech)}
