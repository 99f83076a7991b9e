"""`WERReport`: word errors, speed and paired comparisons of modes over the same recordings."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.asr.output.manifest import Entry, holds_more, read_manifest
from mmdecode.errors import InputError, OptionError, UnknownNameError
from mmdecode.evaluation.report import plots
from mmdecode.evaluation.report.examples import Examples
from mmdecode.evaluation.report.layout import Rows, between, number, percent, without_empty
from mmdecode.evaluation.report.report import Report
from mmdecode.evaluation.speech import wer, word_measures
from mmdecode.evaluation.speech.comparison import Comparison
from mmdecode.evaluation.speech.normalisers import ORIGINS, is_scored, normaliser_of
from mmdecode.evaluation.speech.pier import TAGS, is_tagged, refuse_points, untagged
from mmdecode.evaluation.speech.runs import data_hash, record
from mmdecode.evaluation.speech.samples import Sample, leaderboard_files, sample_of, with_alignment
from mmdecode.evaluation.speech.scripts import is_spaceless
from mmdecode.evaluation.stats import intervals
from mmdecode.evaluation.stats.intervals import RESAMPLES
from mmdecode.runs.conditions import conditions_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mmdecode.asr.transcriber import Transcriber

LONG = ("CER %", "MER %", "WIL %", "repeating windows %", "p50 s", "p95 s")
"""Columns of the full table alone."""
MARGIN = 0.001


class WERReport(Report):
    """Word error rates of samples, with comparisons, tables and a page; see also `wer_report`.

    Args:
        samples: Samples of one or more modes, each with the same recordings.
        normaliser: Name in `mmdecode.evaluation.speech.normalisers.NORMALISERS`.
        scorer: See `mmdecode.evaluation.speech.wer.wer`.
        only_scored: Whether to leave out recordings without words in the reference, as the Open ASR
            leaderboard does; ``None``: only with the leaderboard's normaliser.
        margin: See `Comparison`.
        resamples: Resamples of every bootstrap.
        seed: Seed of every bootstrap.
        conditions: Settings of the run by name; kept in the summary and shown on the page.
        points: Words that PIER scores, see `mmdecode.evaluation.speech.pier`: ``tags`` or the name
            of a script; ``None``: ``tags`` if a reference has tags, else no PIER is computed.
        segmented: See `mmdecode.evaluation.speech.wer.wer`.
        **measures: Further fields of `mmdecode.evaluation.speech.word_measures.Measures`.

    Attributes:
        modes: Names of the modes, the baseline first.
        left_out: Number of recordings left out by ``only_scored``.
        scoring: Normaliser, scorer and segmentation, as options of `align`.
        resampling: Resamples and seed of every bootstrap, by name.

    Raises:
        OptionError: There are no samples, or modes have different recordings.
    """

    title = "Word errors"

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        normaliser: str = "whisper",
        scorer: str | None = None,
        only_scored: bool | None = None,
        margin: float = MARGIN,
        resamples: int = RESAMPLES,
        seed: int = 0,
        conditions: Mapping[str, Any] | None = None,
        points: str | None = None,
        segmented: bool = False,
        **measures: bool,
    ) -> None:
        self.normaliser, self.scorer = normaliser, scorer or wer.default_scorer(normaliser)
        self.segmented, self.margin = segmented, margin
        self.conditions = dict(conditions or {})
        if points is None and any(is_tagged(sample.text) for sample in samples):
            points = TAGS
        if points is not None:
            refuse_points(points, self.scorer)
        self.measures = word_measures.Measures(points=points, **measures)
        self._tagged: dict[str, str] = {}  # references with their tags
        normalise = normaliser_of(normaliser)
        self.only_scored = normaliser == "leaderboard" if only_scored is None else only_scored
        by_mode: dict[str, dict[str, Sample]] = {}
        left_out = set()
        for sample in samples:
            if points is not None and is_tagged(sample.text):
                self._tagged[sample.id] = sample.text
                sample = dataclasses.replace(sample, text=untagged(sample.text))
            if self.only_scored and not is_scored(sample.text, normalise):
                left_out.add(sample.id)
                continue
            found = by_mode.setdefault(sample.mode, {})
            if sample.id in found:
                raise OptionError(
                    f"{sample.mode!r} has two samples called {sample.id!r}; give each recording a "
                    "unique name"
                )
            found[sample.id] = sample
        self.left_out = len(left_out)
        if not by_mode:
            raise OptionError("no recording has words to score; expected at least one")
        self.modes = list(by_mode)
        self.ids = list(by_mode[self.modes[0]])
        for mode, found in by_mode.items():
            other = set(found).symmetric_difference(self.ids)
            if other:
                raise OptionError(
                    f"{mode!r} and {self.modes[0]!r} have different recordings (only one of them "
                    f"has {min(other)!r}); finish the run with --resume, or score them separately"
                )
        self._of = {mode: [found[name] for name in self.ids] for mode, found in by_mode.items()}
        known = [sample.group for sample in self._of[self.modes[0]]]
        self._groups = [str(group) for group in known] if None not in known else None
        self.scoring: dict[str, Any] = {"normaliser": normaliser, "scorer": self.scorer}
        self.scoring["segmented"] = segmented
        self.resampling: dict[str, Any] = {"resamples": resamples, "seed": seed}

    @property
    def samples(self) -> list[Sample]:
        """All scored samples, mode by mode."""
        return [sample for found in self._of.values() for sample in found]

    @cached_property
    def alignments(self) -> dict[str, list[list[wer.Step]]]:
        """Alignment of each recording, by mode."""
        return {
            mode: [wer.align(one.text, one.pred_text, **self.scoring) for one in samples]
            for mode, samples in self._of.items()
        }

    @cached_property
    def counts(self) -> dict[str, np.ndarray]:
        """Counts of `mmdecode.evaluation.speech.wer.count_errors` by mode, ``(recordings, 7)``."""
        return {mode: wer.count_steps(steps) for mode, steps in self.alignments.items()}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """All numbers and settings of the report."""
        return {
            "task": "wer",
            "normaliser": self.normaliser,
            "normaliser_origin": ORIGINS[self.normaliser],
            "scorer": self.scorer,
            "versions": {name: _version(name) for name in ("jiwer", "kaldialign")},
            "only_scored": self.only_scored,
            "recordings": len(self.ids),
            "left_out": self.left_out,
            "by_characters": self.by_characters,
            "segmented": self.segmented,
            "points": self.measures.points,
            "interval": {
                "unit": "recording" if self._groups is None else "group",
                "units": len(set(self._groups or self.ids)),
                **self.resampling,
            },
            "duration_s": _spread([one.duration for one in self._of[self.modes[0]]]),
            "modes": {mode: self._mode(mode) for mode in self.modes},
            "comparisons": [dataclasses.asdict(found) for found in self.comparisons],
            "conditions": self.conditions,
        }

    @cached_property
    def by_characters(self) -> int:
        """Number of references in scripts without spaces, which are scored by characters."""
        if self.segmented:
            return 0
        return sum(is_spaceless(sample.text) for sample in self._of[self.modes[0]])

    def _mode(self, mode: str) -> dict[str, Any]:
        named = self.normaliser, self.scorer, self._groups
        score = wer.summed(self.counts[mode], *named, **self.resampling)
        samples = self._of[mode]
        timed = [(s.duration, s.time) for s in samples if s.duration and s.time]
        audio, spent = (sum(column) for column in zip(*timed, strict=True)) if timed else (0, 0)
        tokens = [len(s.token_ids) for s in samples if s.token_ids is not None]
        batches = {tuple(sorted(s.batch.items())): s.batch for s in samples if s.batch}.values()
        passes, scored = (sum(b[key] for b in batches) for key in ("row_passes", "scored_tokens"))
        windows = sum(sample.windows or 0 for sample in samples)
        repetitive = sum(sample.repetitive_windows or 0 for sample in samples)
        return {
            "wer": score.value,
            "wer_low": score.low,
            "wer_high": score.high,
            "cer": score.cer,
            "mer": score.mer,
            "wil": score.wil,
            **score.counts,
            "characters": score.characters,
            "character_errors": score.character_errors,
            "failed": sum(sample.error is not None for sample in samples),
            "empty": sum(not s.pred_text.strip() and bool(s.text.strip()) for s in samples),
            "windows": windows or None,
            "loop_rate": repetitive / windows if windows else None,
            "timed": len(timed),
            "audio_s": audio,
            "time_s": spent,
            "rtfx": audio / spent if spent else None,
            "latency_s": _spread([seconds for _, seconds in timed]),
            "tokens": sum(tokens) if tokens else None,
            "mean_tokens": sum(tokens) / len(tokens) if tokens else None,
            "tokens_per_pass": scored / passes if passes else None,
            **self.measures.scores(
                [self._tagged.get(sample.id, sample.text) for sample in samples],
                samples,
                self.alignments[mode],
                groups=self._groups,
                **self.scoring,
                **self.resampling,
            ),
        }

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Comparison of each further mode with the first; p-values are corrected by Holm."""
        found = [self.compare(mode) for mode in self.modes[1:]]
        corrected = intervals.holm([one.mapsswe.p for one in found])
        return [dataclasses.replace(one, p_holm=p) for one, p in zip(found, corrected, strict=True)]

    def compare(
        self, other: WERReport | str, *, mode: str | None = None, other_mode: str | None = None
    ) -> Comparison:
        """Compares two modes of this report, or one with a mode of another report.

        Args:
            other: The second mode of this report, or another report of the same recordings.
            mode: Mode of this report that is the baseline; ``None``: its first mode.
            other_mode: Mode of the other report; ``None``: its first mode.

        Raises:
            OptionError: The reports differ in recordings, references, normaliser or scorer.
            UnknownNameError: There is no such mode.
        """
        report, first = self, self._known(mode or self.modes[0])
        if isinstance(other, str):
            second = self._known(other)
        elif other._scored_by != self._scored_by:
            raise OptionError(
                f"one report is scored with {self._scored_by} and the other with "
                f"{other._scored_by}; score both alike"
            )
        else:
            report, second = other, other._known(other_mode or other.modes[0])
        samples = self._of[first], report._of[second]
        mine, theirs = ([(one.id, one.text) for one in side] for side in samples)
        if mine != theirs:
            raise OptionError(
                "the reports have different recordings or references; compare runs on the same data"
            )
        counts = self.counts[first], report.counts[second]
        errors = [table[:, 2:5].sum(1) for table in counts]
        words = np.stack([table[:, 0] for table in counts], 1)
        bootstrap = intervals.paired_bootstrap(
            errors[0], errors[1], words, self._groups, **self.resampling
        )
        alignments = self.alignments[first], report.alignments[second]
        texts = (
            [[step.hypothesis for step in steps if step.hypothesis] for steps in side]
            for side in alignments
        )
        return Comparison(
            first=first,
            second=second,
            same=sum(a == b for a, b in zip(*texts, strict=True)),
            of=len(self.ids),
            bootstrap=bootstrap,
            mapsswe=intervals.mapsswe(*alignments),
            utterances=intervals.paired_test(errors[0] - errors[1]),
            margin=self.margin,
            within_margin=-bootstrap.low < self.margin,
            **self._speedup(*samples),
        )

    def _speedup(self, first: Sequence[Sample], second: Sequence[Sample]) -> dict[str, float]:
        """Time of the first mode over time of the second, and the 95 % interval over batches."""
        timed = [(a, b) for a, b in zip(first, second, strict=True) if a.time and b.time]
        if not timed:
            return {}
        table = np.array([(a.time, b.time) for a, b in timed], dtype=float)
        batches = [str(a.batch["number"]) if a.batch else a.id for a, _ in timed]
        before, after = table.sum(0)
        found = {"speedup": float(before / after)}
        if len(set(batches)) > 1:
            low, high = intervals.ratio_interval(table, batches, **self.resampling)
            found |= {"speedup_low": low, "speedup_high": high}
        return found

    @property
    def _scored_by(self) -> str:
        """Normaliser, scorer and segmentation in one string."""
        return f"{self.normaliser}, {self.scorer}{', segmented' * self.segmented}"

    def _known(self, mode: str) -> str:
        if mode not in self._of:
            raise UnknownNameError.of("mode", mode, self.modes)
        return mode

    def rows(self) -> list[dict[str, str]]:
        """Table with a row per mode; empty columns are left out."""
        rows = []
        several = self.summary["interval"]["units"] > 1
        for mode, found in self.summary["modes"].items():
            words, spread = max(found["words"], 1), found["latency_s"] or {}
            row = {"mode": mode, "WER %": percent(found["wer"])}
            row["95 %"] = between(found["wer_low"], found["wer_high"]) * several
            row |= {f"{name.upper()} %": percent(found[name]) for name in ("cer", "mer", "wil")}
            for name in wer.ERRORS:
                row[f"{name[0].upper()} %"] = f"{100 * found[name] / words:.2f}"
            row |= {
                "failed": str(found["failed"]),
                "repeating windows %": percent(found["loop_rate"]),
                **word_measures.cells(found),
                "RTFx": number(found["rtfx"]),
                "p50 s": number(spread.get("p50"), ".3f"),
                "p95 s": number(spread.get("p95"), ".3f"),
                "tokens/pass": number(found["tokens_per_pass"]),
            }
            rows.append(row)
        return without_empty(rows)

    def brief(self) -> list[Rows]:
        """Word errors and speed of each mode, and what else was asked for."""
        full, *others = self.tables()
        return [[{name: row[name] for name in row if name not in LONG} for row in full], *others]

    def tables(self) -> list[Rows]:
        """The full table, and the one of punctuation marks, if they are scored."""
        marks = word_measures.mark_rows(self.summary["modes"])
        return [self.rows(), *([marks] if marks else [])]

    def verdict(self) -> list[str]:
        """States which modes differ from the first in word errors, and which is the fastest."""
        name, first = self.modes[0], self.summary["modes"][self.modes[0]]
        if len(self.modes) == 1:
            spread = between(first["wer_low"], first["wer_high"])
            return [f"{name}: {percent(first['wer'])} % word errors, {spread} %."]
        kinds: dict[str, list[str]] = {"fewer": [], "more": [], "": []}
        for one in self.comparisons:
            kind = ""
            if one.p_holm is not None and one.p_holm < 1 - intervals.LEVEL:
                kind = "fewer" if one.bootstrap.difference > 0 else "more"
            kinds[kind].append(one.second)
        against = f"{name} ({percent(first['wer'])} %)"
        parts = [
            f"{', '.join(names)}: {kind} word errors than {against}"
            if kind
            else f"{', '.join(names)}: no difference from {against} is shown"
            for kind, names in kinds.items()
            if names
        ]
        fastest = max(self.comparisons, key=lambda one: one.speedup or 0.0)
        if fastest.speedup is not None and fastest.speedup > 1:
            parts.append(f"{fastest.second} is {fastest.speedup:.2f} times as fast")
        return ["; ".join(parts) + "."]

    def about(self) -> str:
        """Explains the numbers in a sentence or two."""
        found = self.summary
        unit = found["interval"]
        parts = [
            f"{found['recordings']} recordings, {found['modes'][self.modes[0]]['words']} words; "
            f"normaliser {self.normaliser} ({ORIGINS[self.normaliser]}), scorer {self.scorer}; "
            f"95 % interval by bootstrap over {unit['units']} {unit['unit']}s"
        ]
        if self.left_out:
            parts.append(f"{self.left_out} recordings without words to score were left out")
        if self.conditions.get("rows_left_out"):
            rows = self.conditions["rows_left_out"]
            parts.append(f"{rows} rows of the data could not be used and were left out")
        if self.by_characters:
            parts.append(
                f"{self.by_characters} references of scripts without spaces are scored by "
                "characters: their rate is the CER"
            )
        if self.segmented:
            parts.append("words are separated by spaces, in every script")
        parts += self.measures.about(found["modes"][self.modes[0]])
        size = max((int(s.batch["size"]) for s in self.samples if s.batch), default=1)
        if size > 1:
            parts.append(
                f"p50 and p95 are a batch's time over its recordings, up to {size}; for latency "
                "use batch size 1"
            )
        if self.conditions.get("limit"):
            parts.append("only a part of the set was scored: not a result to report")
        return "; ".join(parts)

    def records(self) -> list[dict[str, Any]]:
        """Every sample with its counts."""
        counts = np.concatenate([self.counts[mode] for mode in self.modes])
        return [
            sample.as_dict() | dict(zip(wer.COLUMNS, row, strict=True))
            for sample, row in zip(self.samples, counts.tolist(), strict=True)
        ]

    def worst(self, count: int = 5, mode: str | None = None) -> Examples:
        """Returns the recordings with the most word errors, with audio players.

        Args:
            count: Largest number of recordings; recordings without an error are left out.
            mode: Name of the mode; ``None``: the first.
        """
        name = self._known(mode or self.modes[0])
        errors = self.counts[name][:, 2:5].sum(1)
        order = [int(i) for i in np.argsort(-errors, kind="stable")[:count] if errors[i]]
        return Examples(
            with_alignment(self._of[name][index], int(errors[index]), **self.scoring)
            for index in order
        )

    def examples(self) -> dict[str, Examples]:
        """The recordings with the most errors of each mode."""
        return {f"Most errors, {mode}": self.worst(10, mode) for mode in self.modes}

    def figures(self) -> dict[str, Figure | bytes]:
        """Figures by name; a figure without data is left out."""
        modes = self.summary["modes"]
        durations = [one.duration for one in self._of[self.modes[0]]]
        found = {
            "wer_against_speed": plots.wer_against_speed(modes),
            "wer_by_duration": plots.by_duration(durations, self.counts),
            "error_kinds": plots.error_kinds(modes),
        }
        return {name: figure for name, figure in found.items() if figure is not None}

    def further_files(self) -> dict[str, str | bytes]:
        """Files of the Open ASR leaderboard."""
        model = str(self.conditions.get("model", "unknown"))
        data = Path(str(self.conditions.get("data") or "unknown")).stem
        results = leaderboard_files(model, data, self.samples)
        return {f"leaderboard/{name}": text for name, text in results.items()}


def wer_report(
    systems: Transcriber | Mapping[str, Transcriber | Sequence[str]],
    data: str | os.PathLike[str] | Sequence[tuple[Any, str]],
    *,
    limit: int | None = None,
    group: str | None = None,
    batch_size: int | None = None,
    warmup: int = 1,
    progress: Callable[[Sample], None] | None = None,
    **scoring: Any,
) -> WERReport:
    """Transcribes recordings with loaded transcribers and scores them.

    For example::

        report = wer_report({"plain": plain, "medusa": drafted}, "test.jsonl", limit=20)
        report.table(), report.worst(3), report.compare("medusa")

    Args:
        systems: A transcriber; or transcribers and lists of transcripts by name, baseline first.
        data: Path of a manifest with reference texts, or pairs of a recording's path and its text.
        limit: Number of recordings to use, from the first on; ``None``: all.
        group: Column of the manifest that is the bootstrap unit; ``None``: its speakers, if any.
        batch_size: Recordings per batch; ``None``: the first transcriber's batch size.
        warmup: Number of untimed runs of the first batch in each mode.
        progress: Called with each sample.
        **scoring: Options of `WERReport`: ``normaliser``, ``scorer``, ``margin``, ``seed``, ...

    Raises:
        OptionError: A list of transcripts is not as long as the data.
        InputError: The manifest cannot be read.
    """
    named = systems if isinstance(systems, Mapping) else {"plain": systems}
    models = {name: s for name, s in named.items() if not isinstance(s, Sequence)}
    conditions: dict[str, Any] = {"data": None}
    if isinstance(data, (str, os.PathLike)):
        entries, cut = read_manifest(data, limit, text=True), holds_more(data, limit)
        conditions["data"] = str(data)
    else:
        entries = _named(list(data)[:limit])
        cut = len(data) > len(entries)
    samples = []
    if models:
        batch_size = batch_size or next(iter(models.values())).options.batch_size
        conditions |= conditions_of(models) | {"batch_size": batch_size, "warmup": warmup}
        samples = record(
            models, entries, group=group, batch_size=batch_size, warmup=warmup, progress=progress
        )
    conditions |= {"data_hash": data_hash(entries), "limit": limit if cut else None}
    for name, texts in named.items():
        if not isinstance(texts, Sequence):
            continue
        if len(texts) != len(entries):
            raise OptionError(
                f"{name!r} has {len(texts)} transcripts for {len(entries)} recordings; expected "
                "one for each, in order"
            )
        pairs = zip(entries, texts, strict=True)
        samples += [sample_of(entry, name, group, pred_text=text) for entry, text in pairs]
    order = list(named)
    samples.sort(key=lambda sample: order.index(sample.mode))
    return WERReport(samples, **{"conditions": conditions} | scoring)


def _named(pairs: Sequence[tuple[Any, str]]) -> list[Entry]:
    """Makes manifest entries of paths and texts; ids are file names if all differ, else paths.

    Raises:
        InputError: A recording is not given as a path.
    """
    for path, _ in pairs:
        if not isinstance(path, (str, os.PathLike)):
            raise InputError(
                f"a recording is given as {type(path).__name__}; expected pairs of a path and a "
                "text: write arrays to files first, with soundfile for instance"
            )
    paths = [os.fspath(path) for path, _ in pairs]
    names = [os.path.basename(path) for path in paths]
    if len(set(names)) < len(names):
        names = paths
    return [
        Entry(id=name, audio=path, text=text)
        for name, path, (_, text) in zip(names, paths, pairs, strict=True)
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    p50, p95 = np.quantile(known, [0.5, 0.95])
    return {"p50": float(p50), "p95": float(p95), "max": max(known)}
