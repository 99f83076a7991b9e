"""Tasks on recordings; task ``wer``: word error rates of a model, or of given transcripts."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.errors import InputError, OptionError
from mmdecode.evaluation.task import ENGINE, RUNNING, Run, Task, one_of, settings_in
from mmdecode.runs.console import console, print_line

if TYPE_CHECKING:
    from mmdecode.asr.output.manifest import Entry
    from mmdecode.evaluation.report.report import Report
    from mmdecode.evaluation.speech.samples import Sample

Way = tuple[str | None, str | None, Mapping[str, Any]]
"""Drafter, guide, and options of its own of a way of decoding."""
PLAIN = "plain"
"""Name of the mode without a draft or guide."""
DECODING: dict[str, Any] = {
    "model": None,
    "batch_size": 8,
    "language": None,
    "max_new_tokens": None,
    "output": None,
    "resume": False,
    "overwrite": False,
    "rescore": None,
    "resamples": 10_000,
    "limit": None,
    "device": "auto",
    "dtype": "auto",
    "quantize": None,
    "seed": 0,
    **ENGINE,
}
"""Options of every task on recordings."""


def refuse_twice(flag: str, specs: Sequence[str]) -> None:
    """Refuses a list of specifications in which one occurs twice.

    Raises:
        OptionError: One does.
    """
    if len(set(specs)) < len(specs):
        kind = flag.removeprefix("--")
        raise OptionError(f"{flag} is given twice: {', '.join(specs)}; give each {kind} once")


@dataclass(frozen=True, kw_only=True)
class RecordingTask(Task):
    """Base class of tasks on recordings, whose rows are samples."""

    rows: str = "samples.jsonl"

    @abc.abstractmethod
    def report(
        self, samples: list[Sample], conditions: dict[str, Any], given: Mapping[str, Any]
    ) -> Report:
        """Makes the report of samples.

        Args:
            samples: Samples of all modes.
            conditions: Settings and conditions of the run.
            given: All options of the command, by name.
        """

    def read(self, folder: Path, given: Mapping[str, Any]) -> Run:
        """Reads an earlier run; see `Task.read`."""
        from mmdecode.evaluation.speech.runs import read_samples

        samples = read_samples(folder)
        settings = settings_in(folder)
        return Run(report=lambda rows: self.report(rows, settings, given), rows=samples)

    def transcribed(
        self,
        given: Mapping[str, Any],
        ways: Mapping[str, Way],
        entries: Sequence[Entry],
        settings: Mapping[str, Any],
        left_out: Sequence[str],
        begin: Callable[[], None] = lambda: None,
        *,
        group: str | None = None,
        warmup: int = 1,
    ) -> Run:
        """Loads one model, and makes a run that transcribes recordings in several ways.

        Args:
            given: All options of the command, by name.
            ways: Drafter, guide, and options of its own of each way of decoding, by name.
            entries: Recordings.
            settings: Settings that may change a transcript; ``options`` are those of
                `mmdecode.asr.transcriber.TranscribeOptions` that all ways have.
            left_out: Messages on rows of the data that cannot be used.
            begin: Called before the first recording is read.
            group: See `mmdecode.evaluation.speech.runs.record`.
            warmup: See `mmdecode.evaluation.speech.runs.record`.
        """
        from mmdecode import registry
        from mmdecode.asr.transcriber import Transcriber, load, make_options
        from mmdecode.decoder import Decoder
        from mmdecode.evaluation.speech.runs import data_hash, read_samples, record
        from mmdecode.evaluation.speech.samples import sample_of
        from mmdecode.runs.conditions import conditions_of
        from mmdecode.runs.rows import RowJournal

        shared = make_options(settings["options"])  # refused before a model is loaded
        named = given["model"], given["device"], given["dtype"], given["quantize"]
        network, processor = load(*named)
        at_hand = registry.context_of(network, processor, given["model"])
        transcribers = {}
        for name, (draft, guide, own) in ways.items():
            drafter = registry.create("draft", draft, **at_hand) if draft else None
            guiding = registry.create("guide", guide, **at_hand) if guide else None
            decoder = Decoder(drafter, guiding, seed=given["seed"])
            chosen = make_options(settings["options"] | own) if own else shared
            transcribers[name] = Transcriber(network, processor, decoder, chosen)
        conditions = {**conditions_of(transcribers), **settings, "data_hash": data_hash(entries)}
        if left_out:
            conditions["rows_left_out"] = len(left_out)
        fixed = {name: value for name, value in conditions.items() if name != "load_average"}
        audio = {entry.id: entry.audio for entry in entries}

        def recorded(
            journal: Any,
            progress: Callable[[Any], None],
            items: Sequence[Entry] = entries,
            **noted: Any,
        ) -> list[Sample]:
            how = {"group": group, "warmup": warmup, "progress": progress, **noted}
            return record(transcribers, items, journal, **how)

        return Run(
            report=lambda samples: self.report(samples, conditions, given),
            record=recorded,
            begin=begin,
            items=entries,
            failed=lambda entry, error: [
                sample_of(entry, mode, group, error=error) for mode in transcribers
            ],
            journal=lambda folder, resume, overwrite: RowJournal(
                folder / self.rows,
                lambda path: read_samples(path.parent),
                lambda sample: (sample.mode, sample.id),
                fixed,
                resume,
                overwrite,
                lambda sample: audio.get(sample.id),
            ),
            total=len(entries) * len(transcribers),
            doing="transcribing",
            left_out=left_out,
        )


@dataclass(frozen=True, kw_only=True)
class WERTask(RecordingTask):
    """Word error rates of a model's modes, of transcripts made elsewhere, or of an earlier run."""

    def refuse(self, given: Mapping[str, Any]) -> None:
        """Refuses options that do not go together; see `Task.refuse`."""
        from mmdecode.evaluation.speech.normalisers import normaliser_of
        from mmdecode.evaluation.speech.pier import refuse_points
        from mmdecode.evaluation.speech.wer import default_scorer

        one_of(given, "model", "hypotheses", "rescore")
        if given["draft"] and not given["model"]:
            raise OptionError("--draft needs a model; give --model too")
        if given["rescore"] and any(given[name] for name in ("data", "group", "limit")):
            raise OptionError(
                "--rescore scores the texts of an earlier run; leave --data, --group and --limit "
                "out"
            )
        normaliser_of(given["normalizer"])
        if given["points"]:
            refuse_points(given["points"], given["scorer"] or default_scorer(given["normalizer"]))

    def decodes(self, given: Mapping[str, Any]) -> bool:
        """Whether a model transcribes; see `Task.decodes`."""
        return bool(given["model"])

    def needs(self, given: Mapping[str, Any]) -> dict[str, Collection[str]]:
        """Options that do nothing with transcripts, or without data; see `Task.needs`."""
        if not given["hypotheses"]:
            return super().needs(given)
        reading = {"data", "group", "limit", "hypotheses", "model", *RUNNING, *self.scoring}
        needed: dict[str, Collection[str]] = {"--model": set(self.options) - reading}
        return needed if given["data"] else needed | {"--data": ["group"]}

    def open(self, given: Mapping[str, Any]) -> Run:
        """Reads the data, and loads the model or reads transcripts; see `Task.open`."""
        if given["hypotheses"]:
            return self._foreign(given)
        from mmdecode.asr.options import FALLBACK

        drafts: list[str] = given["draft"] or []
        left_out: list[str] = []
        data = _manifest(given) or shipped_for(given["model"])
        refuse_twice("--draft", drafts)
        entries, cut = self._entries(data, given, left_out)
        names = ("model", "dtype", "seed", "group", "warmup", "batch_size")
        options = {name: given[name] for name in ("task", "timestamps")}
        options |= FALLBACK if given["fallback"] else {}
        options |= {name: given[name] for name in ("language", "max_new_tokens", "batch_size")}
        settings = {
            **{name: given[name] for name in names},
            "limit": given["limit"] if cut else None,
            "data": str(data),
            "drafts": drafts,
            "options": options,
        }
        ways: dict[str, Way] = {PLAIN: (None, None, {})}
        ways |= {spec: (spec, None, {}) for spec in drafts}
        how = {name: given[name] for name in ("group", "warmup")}
        return self.transcribed(given, ways, entries, settings, left_out, **how)

    def report(
        self, samples: list[Sample], conditions: dict[str, Any], given: Mapping[str, Any]
    ) -> Report:
        """Makes a `WERReport`; see `RecordingTask.report`."""
        from mmdecode.evaluation.speech.word_report import WERReport

        scoring = {name: given[name] for name in self.scoring}
        scoring["margin"] /= 100
        normaliser = scoring.pop("normalizer")
        return WERReport(samples, normaliser=normaliser, conditions=conditions, **scoring)

    def _entries(
        self, manifest: Path, given: Mapping[str, Any], left_out: list[str]
    ) -> tuple[list[Entry], bool]:
        """Reads recordings with texts; with a filter, only those that would be scored.

        The second value is whether ``--limit`` left some out. Error messages of unusable rows are
        added to ``left_out``.
        """
        from mmdecode.asr.output.manifest import holds_more, read_manifest
        from mmdecode.evaluation.speech.normalisers import is_scored, normaliser_of
        from mmdecode.evaluation.speech.pier import untagged

        limit, filtered = given["limit"], given["only_scored"]
        if filtered is None:
            filtered = given["normalizer"] == "leaderboard"
        if not filtered:
            entries = read_manifest(manifest, limit, text=True, left_out=left_out)
            return entries, holds_more(manifest, limit)
        normalise = normaliser_of(given["normalizer"])
        entries = read_manifest(manifest, text=True, left_out=left_out)
        entries = [e for e in entries if is_scored(untagged(e.text or ""), normalise)]
        if not entries:
            raise InputError(f"no reference of {manifest} has words; give --all-references")
        return entries[:limit], len(entries) > len(entries[:limit])

    def _foreign(self, given: Mapping[str, Any]) -> Run:
        """Reads transcripts made elsewhere; each file is a mode."""
        from mmdecode.asr.output.manifest import holds_more, read_manifest
        from mmdecode.evaluation.speech.samples import match, read_results

        sources: dict[str, Path] = {}
        for text in given["hypotheses"]:
            name, equals, path = text.partition("=")
            if not equals or Path(text).exists():
                name, path = Path(text).name, text
            if name in sources:
                raise OptionError(f"two --hypotheses are called {name!r}; name them: NAME=FILE")
            sources[name] = Path(path)
        manifest, limit, group = _manifest(given), given["limit"], given["group"]
        left_out: list[str] = []
        samples: list[Sample] = []
        if manifest:
            entries = read_manifest(manifest, limit, audio=False, text=True, left_out=left_out)
            cut = holds_more(manifest, limit)
            for name, source in sources.items():
                samples += match(entries, source, name, group)
        else:
            found = [read_results(source, name) for name, source in sources.items()]
            samples = [sample for one in found for sample in one[:limit]]
            cut = len(samples) < sum(map(len, found))
        conditions: dict[str, Any] = {
            "hypotheses": {name: str(path) for name, path in sources.items()},
            "data": str(manifest or next(iter(sources))),
            "group": group,
            "limit": limit if cut else None,
        }
        if left_out:
            conditions["rows_left_out"] = len(left_out)
        return Run(
            report=lambda rows: self.report(rows, conditions, given),
            rows=samples,
            left_out=left_out,
        )


def _manifest(given: Mapping[str, Any]) -> Path | None:
    data = given["data"] or []
    if len(data) > 1:
        raise OptionError(f"--data names {len(data)} manifests; give one")
    return Path(data[0]) if data else None


def shipped_for(model: str) -> Path:
    """Returns the default data: synthetic speech for zoo recognisers, else real recordings."""
    known = model.startswith("zoo:")
    data = "zoo:speech-test" if known else "zoo:real-clips"
    why = "synthetic speech, as in training" if known else "11 clips, too few for a claim"
    print_line(f"data: {data} ({why}); give your own with --data", console)
    return Path(data)


WER = WERTask(
    name="wer",
    about="""Word error rate with intervals, speed, and paired comparisons of modes; PIER and more.

    Raw texts are appended to samples.jsonl in --out during the run, so that scoring can be repeated
    without the model. If a recording fails, its words count as missed and the exit code is 1.

    For example:

      mmdecode evaluate wer --data test.jsonl --model openai/whisper-small --draft lookup --out run

      mmdecode evaluate wer --model openai/whisper-small

      mmdecode evaluate wer --rescore run --normalizer leaderboard

      mmdecode evaluate wer --data test.jsonl --hypotheses theirs.jsonl --normalizer leaderboard

      mmdecode evaluate wer --rescore run --points latin --hallucinations --punctuation
    """,
    options={
        "data": None,
        "model": None,
        "draft": None,
        "hypotheses": None,
        "rescore": None,
        "normalizer": "whisper",
        "scorer": None,
        "only_scored": None,
        "group": None,
        "margin": 0.1,
        "points": None,
        "split_hyphens": False,
        "segmented": False,
        "hallucinations": False,
        "punctuation": False,
        **DECODING,
        "warmup": 1,
        "task": None,
        "timestamps": True,
        "fallback": False,
    },
    scoring=(
        *("resamples", "seed", "normalizer", "scorer", "only_scored", "margin", "points"),
        *("split_hyphens", "segmented", "hallucinations", "punctuation"),
    ),
    failed="their words count as missed",
)
