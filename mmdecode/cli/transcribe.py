"""``mmdecode transcribe``: audio files in, text and subtitles out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress, TextColumn
from rich.text import Text

from mmdecode.cli.flags import (
    Device,
    Dtype,
    Language,
    MaxNewTokens,
    Overwrite,
    Quantize,
    Recogniser,
    Resume,
    Task,
    Timestamps,
    refuse_without,
)
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.cli.progress import progress_bar, resumable, tell_batch_size
from mmdecode.runs.console import console, out, print_line, warnings_shown, without_other_bars
from mmdecode.runs.journal import Prepared, Unit

if TYPE_CHECKING:
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.asr.output.jobs import ResultFolder
    from mmdecode.asr.output.manifest import Entry
    from mmdecode.asr.output.subtitles import Layout
    from mmdecode.asr.results import Failure, Transcript
    from mmdecode.asr.transcriber import Transcriber
    from mmdecode.runs.distributed import Team

PANELS = {
    "Options": "model out_dir formats draft language task word_timestamps batch_size resume device",
    "Input": "files_from data limit allow_truncated",
    "Output": "keep_tree report max_line_width max_line_count max_reading_speed overwrite json",
    "Decoding": "guide accept dtype quantize timestamps temperature beams n_best n_best_method "
    "max_new_tokens mode overlap_s window_s padding seed trust_remote_code",
    "Words and their correction": "word_method correct prompt prompt_condition_type hotwords",
    "Silence, loops and failed windows": "fallback compression_ratio_threshold logprob_threshold "
    "no_speech_threshold condition_on_prev_tokens loop_guard hallucination_silence_threshold "
    "vad vad_threshold vad_min_speech_s vad_min_silence_s vad_pad_s",
}
"""Parameters by section of the help; the first section has the options that most users need."""
VAD = ("vad_threshold", "vad_min_speech_s", "vad_min_silence_s", "vad_pad_s")
SUBTITLES = ("max_line_width", "max_line_count", "max_reading_speed")


def command(
    context: typer.Context,
    model: Recogniser,
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH...]",
            help="Audio files, folders to search for them, or - for a recording on stdin.",
        ),
    ] = None,
    files_from: Annotated[
        str | None, typer.Option(help="A file with one path per line; - for stdin.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A table of recordings: .jsonl, .json, .csv or .tsv.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Drafter, as name or name:key=value,...; see 'mmdecode methods draft'. "
            "For a zoo model, medusa alone loads the heads shipped with it."
        ),
    ] = None,
    guide: Annotated[
        str | None,
        typer.Option(help="Guide, which changes the distribution; see 'mmdecode methods guide'."),
    ] = None,
    accept: Annotated[
        str, typer.Option(help="Acceptance rule; auto takes one that keeps the undrafted text.")
    ] = "auto",
    correct: Annotated[
        str | None,
        typer.Option(
            help="Corrector of the text, such as uadf:model=zoo:lm-synth; see 'mmdecode methods "
            "correct'."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="HTML page to write, which colours the words of the corrected text by the model "
            "that decided them, next to the reference texts of --data. Needs --correct."
        ),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the results; without it the text is printed."),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            "--format",
            help="Formats of the files per recording: any of txt,srt,vtt,tsv,json,jsonl,"
            "whisper-json (JSON as openai-whisper writes it), or all. Needs --out.",
        ),
    ] = "txt,srt,json",
    max_line_width: Annotated[
        int, typer.Option(min=0, help="Most characters in a line of subtitles; 0: no limit.")
    ] = 42,
    max_line_count: Annotated[int, typer.Option(min=1, help="Most lines of a subtitle.")] = 2,
    max_reading_speed: Annotated[
        float,
        typer.Option(min=0, help="Most characters per second in subtitles; 0: no limit."),
    ] = 20.0,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Windows decoded at once; the text does not depend on it.")
    ] = 8,
    resume: Resume = False,
    overwrite: Overwrite = False,
    keep_tree: Annotated[
        bool,
        typer.Option("--keep-tree", help="Keep the sub-folders of the input. Needs --out."),
    ] = False,
    allow_truncated: Annotated[
        bool,
        typer.Option(
            "--allow-truncated",
            help="Transcribe the readable part of a truncated file, and mark it as truncated.",
        ),
    ] = False,
    language: Language = None,
    task: Task = None,
    timestamps: Timestamps = True,
    fallback: Annotated[
        bool,
        typer.Option(
            "--fallback/--no-fallback",
            help="Decode windows that fail Whisper's thresholds again at rising temperatures, and "
            "skip silence; the threshold options below change single values.",
        ),
    ] = False,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Sampling temperature; 0 is greedy. Repeat it, rising, for a fallback."),
    ] = None,
    compression_ratio_threshold: Annotated[
        float | None, typer.Option(help="Decode again above this compression ratio of the tokens.")
    ] = None,
    logprob_threshold: Annotated[
        float | None, typer.Option(help="Decode again below this mean log-probability per token.")
    ] = None,
    no_speech_threshold: Annotated[
        float | None, typer.Option(help="With --logprob-threshold: skip above this no-speech prob.")
    ] = None,
    beams: Annotated[
        int, typer.Option(min=1, help="Beams of beam search, without draft or guide; 1: greedy.")
    ] = 1,
    condition_on_prev_tokens: Annotated[
        bool, typer.Option("--condition-on-prev-tokens", help="Prompt with the previous text.")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option(help="Text in the decoder prompt that sets names and style.")
    ] = None,
    prompt_condition_type: Annotated[
        str, typer.Option(help="Windows with --prompt: first-segment or all-segments.")
    ] = "first-segment",
    hotwords: Annotated[
        str | None, typer.Option(help="Words to expect, in the decoder prompt of every window.")
    ] = None,
    loop_guard: Annotated[
        str,
        typer.Option(
            help="Treatment of windows that end in a repetition loop: report, isolate (not used "
            "as previous text either) or cut (the loop is also cut to its first repetition)."
        ),
    ] = "isolate",
    hallucination_silence_threshold: Annotated[
        float | None,
        typer.Option(
            help="With --word-timestamps: skip probable hallucinations next to silences longer "
            "than this, in seconds."
        ),
    ] = None,
    vad: Annotated[
        bool, typer.Option("--vad", help="Skip audio without speech; needs the extra vad.")
    ] = False,
    vad_threshold: Annotated[
        float, typer.Option(help="Probability from which a frame of audio counts as speech.")
    ] = 0.5,
    vad_min_speech_s: Annotated[
        float, typer.Option(help="Ignore speech that is shorter, in seconds.")
    ] = 0.25,
    vad_min_silence_s: Annotated[float, typer.Option(help="Keep shorter silences (s).")] = 2.0,
    vad_pad_s: Annotated[float, typer.Option(help="Audio kept around speech (s).")] = 0.4,
    n_best: Annotated[
        int, typer.Option(help="Length of each window's N-best list, in json; 0: no lists.")
    ] = 0,
    n_best_method: Annotated[str, typer.Option(help="beam (search) or sample.")] = "beam",
    mode: Annotated[
        str,
        typer.Option(
            help="sequential, or chunked: decodes a recording's windows in parallel; less accurate."
        ),
    ] = "sequential",
    overlap_s: Annotated[
        float | None, typer.Option(help="Overlap of chunked windows (s); default: half a window.")
    ] = None,
    window_s: Annotated[
        float | None,
        typer.Option(
            help="Longest window in seconds, for models whose windows are cut at pauses; shorter "
            "windows make shorter segments."
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    word_timestamps: Annotated[
        bool,
        typer.Option(
            "--word-timestamps",
            help="Add words with times and confidences; without --out prints one word per line.",
        ),
    ] = False,
    word_method: Annotated[
        str | None,
        typer.Option(
            help="How words are timed: attention, ctc or ctc:model=NAME; implies "
            "--word-timestamps. Default: ctc if the checkpoint has a CTC head, else attention."
        ),
    ] = None,
    padding: Annotated[
        str, typer.Option(help="Padding of the last window: auto, silence or zeros.")
    ] = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Annotated[int, typer.Option(help="Seed of the noise that sampling uses.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Transcribe only this many recordings.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Transcribe audio files of any length, rate and format.

    Prints the text, or writes it to --out: one file per recording and format, and results.jsonl,
    with a line per finished recording, which --data of other commands reads. Recordings that cannot
    be read are listed at the end, and the exit code is then 1. --resume continues a run that was
    stopped, and gives the same files as a run that was not stopped.

    For example:

      mmdecode transcribe talk.mp3

      mmdecode transcribe talk.mp3 --model openai/whisper-small

      ffmpeg -i talk.mkv -f wav - | mmdecode transcribe - --model small

      mmdecode transcribe recordings/ --model large-v3 --out texts --format txt,srt

      mmdecode transcribe recordings/ --model large-v3 --out texts --format txt,srt --resume

      accelerate launch -m mmdecode transcribe recordings/ --model small --out texts

      mmdecode transcribe talk.mp3 --model small --correct llm:model=my-corrector --report talk.html
    """
    from mmdecode.asr.options import FALLBACK
    from mmdecode.asr.output.formats import parse_formats
    from mmdecode.asr.output.inputs import STDIN, gathered
    from mmdecode.asr.output.subtitles import Layout
    from mmdecode.asr.transcriber import Transcriber, make_options
    from mmdecode.errors import OptionError
    from mmdecode.runs.distributed import Team
    from mmdecode.runs.files import refuse_foreign

    given = {
        "temperatures": tuple(temperature) if temperature else None,
        "compression_ratio_threshold": compression_ratio_threshold,
        "logprob_threshold": logprob_threshold,
        "no_speech_threshold": no_speech_threshold,
    }
    options: dict[str, Any] = dict(FALLBACK) if fallback else {}
    options |= {name: value for name, value in given.items() if value is not None}
    options |= {
        "batch_size": batch_size,
        "timestamps": timestamps,
        "language": language,
        "task": task,
        "beams": beams,
        "condition_on_prev_tokens": condition_on_prev_tokens,
        "prompt": prompt,
        "prompt_condition_type": prompt_condition_type,
        "hotwords": hotwords,
        "loop_guard": loop_guard,
        "hallucination_silence_threshold": hallucination_silence_threshold,
        "vad": vad,
        "vad_threshold": vad_threshold,
        "vad_min_speech_s": vad_min_speech_s,
        "vad_min_silence_s": vad_min_silence_s,
        "vad_pad_s": vad_pad_s,
        "n_best": n_best,
        "n_best_method": n_best_method,
        "mode": mode,
        "overlap_s": overlap_s,
        "window_s": window_s,
        "max_new_tokens": max_new_tokens,
        "allow_truncated": allow_truncated,
        "padding": padding,
        "word_timestamps": word_method or word_timestamps,
    }
    formats_asked = parse_formats(formats)
    options["scores"] = out_dir is not None and "whisper-json" in formats_asked
    if correct is None:
        refuse_without("--correct", ["report"], context)
    if report is not None and report.is_dir():
        raise OptionError(f"--report {report} is a folder; expected the path of a page, as x.html")
    if not vad:
        refuse_without("--vad", VAD, context)
    if not n_best:
        refuse_without("--n-best", ["n_best_method"], context)
    if out_dir is None:
        refuse_without("--out", ["formats", "resume", "keep_tree", *SUBTITLES], context)
        if not json:
            refuse_without("--out or --json", ["n_best"], context)
    if not {"srt", "vtt"} & set(formats_asked):
        refuse_without("--format srt or vtt", SUBTITLES, context)
    checked = make_options(options)
    _warn_of_thresholds(checked)
    # what may change a file; a transcript does not depend on the batch
    settings = dataclasses.asdict(checked) | {
        **{"model": model, "draft": draft, "guide": guide, "accept": accept},
        **{"dtype": dtype, "seed": seed, "keep_tree": keep_tree},
    }
    del settings["batch_size"]
    if quantize is not None:  # as before there was a choice
        settings["quantize"] = quantize
    if correct is not None:
        settings["correct"] = correct
    layout = Layout(
        max_line_width=max_line_width or None,
        max_line_count=max_line_count,
        max_reading_speed=max_reading_speed or None,
    )
    output = _Output(out_dir, formats_asked, layout, settings, resume, overwrite, batch_size)
    if report is not None:
        refuse_foreign([report], overwrite)  # before anything is computed
    uses_stdin = STDIN in (*(paths or ()), files_from)
    if resume and STDIN in (paths or ()):
        raise OptionError(
            "--resume does not work with '-', since standard input may be another recording than "
            "in the earlier run; give a file"
        )
    team = Team(device)
    if team.size > 1 and (out_dir is None or uses_stdin):
        raise OptionError(
            f"{team.size} processes share the work, so they can neither read standard input nor "
            "print the text; give --out, and files instead of '-'"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings_shown("default"))  # of skipped links, and of options
        entries = stack.enter_context(gathered(paths or (), files_from, data, limit, keep_tree))
        load = functools.partial(
            Transcriber.from_pretrained,
            *(model, draft, guide, accept, team.device, dtype, quantize, seed, correct),
            **options,
        )
        tally = _transcribe(entries, load, output, team)
        if report is not None and team.leads:
            _write_page(report, entries, tally, output)
    if team.leads:
        _report(tally, output, several=len(entries) > 1, as_json=json)
    team.leave()
    if team.leads and tally.failures:
        raise typer.Exit(1)


def _warn_of_thresholds(options: TranscribeOptions) -> None:
    """Warns of thresholds whose failed windows are neither decoded again nor skipped."""
    idle = ["--compression-ratio-threshold"] * (options.compression_ratio_threshold is not None)
    if options.no_speech_threshold is None and options.logprob_threshold is not None:
        idle.append("--logprob-threshold")
    if idle and len(options.temperatures) == 1:
        console.print(
            f"no effect of {' and '.join(idle)}: no window is decoded again, since there is only "
            "one temperature; give --temperature twice or more, or --fallback",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


@dataclass(frozen=True)
class _Output:
    """Settings of the output; without a folder results are printed."""

    folder: Path | None
    formats: list[str]
    layout: Layout
    settings: dict[str, Any]
    resume: bool
    overwrite: bool = False
    batch_size: int = 8

    @property
    def language(self) -> str | None:
        """Language of all recordings, if set."""
        return self.settings["language"]


@dataclass
class _Tally:
    """Counts and results of a run, of one process or of all processes together."""

    done_before: int = 0
    changed: int = 0
    transcribed: int = 0
    audio_s: float = 0.0
    wall_s: float = 0.0
    windows: int = 0
    repetitive: int = 0
    stats: dict[str, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    results: list[Transcript] = field(default_factory=list)
    truncated: dict[str, str] = field(default_factory=dict)

    @property
    def rtfx(self) -> float | None:
        """Seconds of audio transcribed per second of wall-clock time."""
        return self.audio_s / self.wall_s if self.audio_s and self.wall_s else None


def _transcribe(
    entries: list[Entry], load: Callable[[], Transcriber], output: _Output, team: Team
) -> _Tally:
    """Transcribes this process's share; the leading process returns the tally of all."""
    from mmdecode.asr.output.inputs import sizes
    from mmdecode.asr.output.jobs import ResultFolder
    from mmdecode.runs.files import claimed

    if output.folder is None:
        return _work([Unit(entries, output.batch_size)], load, None, output.language)
    target = output.folder
    subtitles = dataclasses.asdict(output.layout)
    settings = output.settings | {"formats": output.formats, "subtitles": subtitles}
    with contextlib.ExitStack() as stack:
        how = {name: getattr(output, name) for name in ("batch_size", "resume", "overwrite")}
        given = target, settings, entries, output.formats, output.layout
        folder = ResultFolder(*given, **how, command=sys.argv[1:])
        done = lambda: sum(entry.id in folder.done for entry in entries)  # noqa: E731
        stack.enter_context(resumable(target if team.size == 1 else None, len(entries), done))

        def begin() -> Prepared:
            stack.enter_context(claimed(target))
            return folder.prepare()

        prepared = team.first(begin)
        folder.open(prepared, team.rank if team.size > 1 else None)
        with contextlib.closing(folder):
            todo = len(entries) - done()
            units = folder.units()
            tell_batch_size(units, output.batch_size, team.leads)
            sized = iter(sizes([entry for unit in units for entry in unit.items]))
            work = [sum(itertools.islice(sized, len(unit.items))) for unit in units]
            share = [units[index] for index in team.share(work)]
            started = time.perf_counter()
            own = _work(share, load, folder, output.language)
        tallies = team.gather(own)  # all have closed the folder
        team.first(folder.finish)
    tally = _together(tallies, len(entries) - todo)
    tally.changed = len(prepared.changed)
    if team.size > 1:
        tally.wall_s = time.perf_counter() - started
    return tally


def _work(
    units: Sequence[Unit[Entry]],
    load: Callable[[], Transcriber],
    folder: ResultFolder | None,
    language: str | None,
) -> _Tally:
    """Transcribes units; the tally holds the results only if there is no results folder."""
    from mmdecode.asr.output.manifest import opened
    from mmdecode.asr.results import Failure
    from mmdecode.runs.items import Watch

    tally = _Tally()
    total = sum(len(unit.items) for unit in units)
    if not total:
        return tally
    without_other_bars()
    transcriber = load()
    started = time.perf_counter()
    with progress_bar(TextColumn("{task.fields[speed]}")) as bar:
        meter = _Meter(bar, total)
        watch = folder.watch if folder else Watch()
        for unit in units:
            sources = [
                folder.source(entry, language) if folder else opened(entry, language)
                for entry in unit.items
            ]
            for result in transcriber.stream(
                sources, meter, watch=watch, batch_size=unit.batch_size
            ):
                meter.file_done()
                if folder:
                    if result.source in folder.done:
                        continue  # of a unit that was interrupted
                    result = folder.add(result)
                if isinstance(result, Failure):
                    tally.failures.append(result)
                    continue
                tally.transcribed += 1
                tally.audio_s += result.duration_s
                tally.windows += result.stats["windows"]
                tally.repetitive += result.stats["looped"]
                if result.truncated is not None:
                    tally.truncated[result.source] = result.truncated
                if not folder:
                    tally.results.append(result)
    tally.wall_s = time.perf_counter() - started
    tally.stats = transcriber.stats.as_dict()
    return tally


def _write_page(path: Path, entries: list[Entry], tally: _Tally, output: _Output) -> None:
    """Writes the page of corrected words, for all results of the folder, or else of this run."""
    import mmdecode
    from mmdecode.evaluation.speech.correction_page import CorrectedText, CorrectedTexts
    from mmdecode.runs.files import explained, write_file
    from mmdecode.runs.journal import RESULTS
    from mmdecode.runs.tables import read_rows

    if output.folder is None:
        rows = [dataclasses.asdict(result) for result in tally.results]
    else:
        rows = [row for _, row in read_rows(output.folder / RESULTS)]
    found = {row["source"]: row for row in rows if "error" not in row}
    texts = []
    for entry in entries:
        if entry.id in found:
            whole = entry.audio is not None and entry.offset_s is None
            audio = Path(entry.audio or "") if whole else None
            texts.append(CorrectedText.of_transcript(found[entry.id], entry.text, audio))
    english = {row["language"] for row in found.values()} <= {None, "en"}
    names = "model", "correct", "dtype", "quantize"
    shown = {name: output.settings[name] for name in names if name in output.settings}
    page = CorrectedTexts(texts, normaliser="whisper" if english else "basic").page(
        shown | {"mmdecode": mmdecode.__version__}
    )
    with explained(path):
        # names of files need not be UTF-8
        write_file(path, page.encode("utf-8", "backslashreplace"), output.overwrite)


def _together(tallies: list[_Tally], done_before: int) -> _Tally:
    """Sums the tallies of all processes."""
    return _Tally(
        done_before=done_before,
        transcribed=sum(tally.transcribed for tally in tallies),
        audio_s=sum(tally.audio_s for tally in tallies),
        wall_s=max(tally.wall_s for tally in tallies),
        windows=sum(tally.windows for tally in tallies),
        repetitive=sum(tally.repetitive for tally in tallies),
        stats=summed([tally.stats for tally in tallies]),
        failures=[failure for tally in tallies for failure in tally.failures],
        truncated={name: what for tally in tallies for name, what in tally.truncated.items()},
    )


def summed(stats: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums the counters of several decoders, see `mmdecode.engine.stats`."""
    stats = [one for one in stats if one]  # a process without work has none
    if len(stats) < 2:
        return stats[0] if stats else {}
    counters = "calls", "tokens", "passes", "row_passes", "drafted", "accepted"
    total: dict[str, Any] = {name: sum(one[name] for one in stats) for name in counters}
    kept = sum(one["acceptance_length"] * one["row_passes"] for one in stats)
    total["acceptance_length"] = round(kept / max(total["row_passes"], 1), 4)
    total["acceptance_rate"] = round(total["accepted"] / max(total["drafted"], 1), 4)
    histograms = (one["accepted_histogram"] for one in stats)
    total["accepted_histogram"] = [
        sum(counts) for counts in itertools.zip_longest(*histograms, fillvalue=0)
    ]
    return total


def _report(tally: _Tally, output: _Output, several: bool, as_json: bool) -> None:
    failures = sorted(tally.failures, key=lambda failure: failure.index)
    results = sorted(tally.results, key=lambda result: result.index)
    if as_json:
        emit_json(
            {
                "model": output.settings["model"],
                "transcribed": tally.transcribed,
                "resumed": tally.done_before,
                "changed": tally.changed,
                "failed": len(failures),
                "audio_s": round(tally.audio_s, 3),
                "wall_s": round(tally.wall_s, 3),
                "rtfx": round(tally.rtfx, 3) if tally.rtfx else None,
                "windows": tally.windows,
                "looped": tally.repetitive,
                "truncated": len(tally.truncated),
                "stats": tally.stats,
                "out": output.folder,
                "results": None if output.folder else results,
                "failures": failures,
            }
        )
    elif not output.folder:
        for result in results:
            # names of files need not be UTF-8
            name = result.source.encode("utf-8", "backslashreplace").decode()
            if output.settings["word_timestamps"]:
                for line in [f"{name}:"] * several + [*_timed_lines(result)]:
                    print_line(line)
                continue
            prefix = f"{name}: " if several else ""
            out.print(Text(prefix) + coloured(result), highlight=False, soft_wrap=True)
    line = (
        f"{tally.transcribed} transcribed, {tally.done_before} done before, {len(failures)} failed"
    )
    if tally.changed:
        line += f", {tally.changed} changed since and done again"
    if tally.rtfx:
        line += f"; {tally.audio_s:.1f} s of audio in {tally.wall_s:.1f} s, RTFx {tally.rtfx:.1f}"
        if tally.stats["row_passes"]:  # beams are searched elsewhere
            line += f", {tally.stats['acceptance_length']:.2f} tokens per pass"
    if tally.repetitive:
        line += f"; {tally.repetitive} of {tally.windows} windows looped"
    if out.is_terminal and any(result.uncorrected is not None for result in results):
        line += "; words in blue are the audio's, in yellow the language model's"
    if tally.truncated:
        line += f"; {len(tally.truncated)} truncated"
    console.print(line, highlight=False, soft_wrap=True)
    for what in tally.truncated.values():
        text = what.encode("utf-8", "backslashreplace").decode()
        print_line(f"transcribed as far as it goes: {text}", console, "yellow")
    for failure in failures:
        console.print(
            f"failed: {failure.error}", style="red", markup=False, highlight=False, soft_wrap=True
        )


def _timed_lines(result: Transcript) -> Iterator[str]:
    """Yields lines with each segment and its times, then its words with their times."""
    from mmdecode.asr.output.subtitles import clean

    for segment in result.segments:
        if text := clean(segment.text):
            yield f"[{segment.start_s:.2f} -> {segment.end_s:.2f}] {text}"
        for word in segment.words or ():
            yield f"  [{word.start_s:.2f} -> {word.end_s:.2f}] {clean(word.text)}"


_COLOURS = {"both": "", "audio": "blue", "language model": "yellow"}


def coloured(result: Transcript) -> Text:
    """Returns the text; words of a corrected text are coloured by the model that decided them."""
    if result.uncorrected is None:
        return Text(result.text)
    parts = []
    for segment in result.segments:
        if segment.decided is None:
            parts.append(Text(segment.text))
        else:
            parts += (Text(word.text, _COLOURS[word.by]) for word in segment.decided)
    return Text(" ").join(part for part in parts if part)


class _Meter:
    """Updates the progress bar: finished files, and seconds of audio per second of work."""

    def __init__(self, bar: Progress, files: int) -> None:
        self.bar, self.seconds, self.started = bar, 0.0, time.perf_counter()
        self.task = bar.add_task("transcribing", total=files, speed="")

    def __call__(self, seconds: float) -> None:
        self.seconds += seconds
        rate = self.seconds / max(time.perf_counter() - self.started, 1e-9)
        shown = f"{self.seconds:.0f} s of audio, {rate:.1f} s/s"
        self.bar.update(self.task, speed=shown)

    def file_done(self) -> None:
        self.bar.advance(self.task)
