"""``mmdecode transcribe``: audio files in, text and subtitles out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.text import Text

import mmdecode
from mmdecode.cli import flags
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.errors import OptionError
from mmdecode.runs.console import console, out, print_line, warnings_shown
from mmdecode.runs.distributed import local_device
from mmdecode.runs.engines import TIME_LIMIT_S
from mmdecode.runs.files import explained, refuse_foreign, write_file
from mmdecode.runs.tables import read_rows
from mmdecode.runs.work import run

if TYPE_CHECKING:
    from mmdecode.asr.options import TranscribeOptions
    from mmdecode.asr.output.jobs import TranscriptTally
    from mmdecode.asr.output.manifest import Entry
    from mmdecode.asr.results import Transcript

PANELS = {
    "Options": "model out_dir formats draft language task word_timestamps batch_size resume device",
    "Several processes": "engine workers shard time_limit_s gpus cpus",
    "Input": "files_from data limit allow_truncated",
    "Output": "keep_tree report max_line_width max_line_count max_reading_speed overwrite json",
    "Decoding": "guide accept dtype quantize timestamps temperature beams n_best n_best_method "
    "max_new_tokens mode overlap_s window_s padding seed trust_remote_code",
    "Words and their correction": "word_method correct prompt prompt_condition_type hotwords",
    "Silence, loops and failed windows": "fallback compression_ratio_threshold logprob_threshold "
    "no_speech_threshold condition_on_prev_tokens loop_guard hallucination_silence_threshold "
    "vad vad_method vad_threshold vad_min_speech_s vad_min_silence_s vad_pad_s",
}
"""Parameters by section of the help; the first section has the options that most users need."""
SUBTITLES = ("max_line_width", "max_line_count", "max_reading_speed")


def command(
    context: typer.Context,
    model: flags.Recogniser,
    paths: Annotated[flags.Texts, typer.Argument(metavar="[PATH...]")] = None,
    files_from: str | None = None,
    data: str | None = None,
    draft: str | None = None,
    guide: str | None = None,
    accept: str = "auto",
    correct: str | None = None,
    report: Path | None = None,
    out_dir: Path | None = None,
    formats: str = "txt,srt,json",
    max_line_width: flags.AtLeast0 = 42,
    max_line_count: flags.AtLeast1 = 2,
    max_reading_speed: Annotated[float, typer.Option(min=0)] = 20.0,
    batch_size: flags.AtLeast1 = 8,
    resume: bool = False,
    overwrite: bool = False,
    keep_tree: bool = False,
    allow_truncated: bool = False,
    language: str | None = None,
    task: str | None = None,
    timestamps: bool = True,
    fallback: bool = False,
    temperature: list[float] | None = None,
    compression_ratio_threshold: float | None = None,
    logprob_threshold: float | None = None,
    no_speech_threshold: float | None = None,
    beams: flags.AtLeast1 = 1,
    condition_on_prev_tokens: bool = False,
    prompt: str | None = None,
    prompt_condition_type: str = "first-segment",
    hotwords: str | None = None,
    loop_guard: str = "isolate",
    hallucination_silence_threshold: float | None = None,
    vad: bool = False,
    vad_method: str | None = None,
    vad_threshold: float | None = None,
    vad_min_speech_s: float | None = None,
    vad_min_silence_s: float | None = None,
    vad_pad_s: float | None = None,
    n_best: int = 0,
    n_best_method: str = "beam",
    mode: str = "sequential",
    overlap_s: float | None = None,
    window_s: float | None = None,
    max_new_tokens: flags.Limit = None,
    word_timestamps: bool = False,
    word_method: str | None = None,
    padding: str = "auto",
    engine: flags.EngineName = "local",
    workers: flags.Workers = None,
    shard: flags.Share = None,
    time_limit_s: flags.Seconds = TIME_LIMIT_S,
    gpus: flags.GPUs = None,
    cpus: flags.CPUs = 1,
    device: str = "auto",
    dtype: str = "auto",
    quantize: flags.Rounding = None,
    seed: int = 0,
    limit: flags.Limit = None,
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

    Options:
        paths: Audio files, folders to search for them, or - for a recording on stdin.
        files_from: A file with one path per line; - for stdin.
        data: A table of recordings: .jsonl, .json, .csv or .tsv.
        draft: Drafter, as name or name:key=value,...; see 'mmdecode methods draft'. For a zoo
            model, medusa alone loads the heads shipped with it.
        accept: Acceptance rule; auto takes one that keeps the undrafted text.
        correct: Corrector of the text, such as uadf:model=zoo:lm-synth; see 'mmdecode methods
            correct'.
        report: HTML page to write, which colours the words of the corrected text by the model that
            decided them, next to the reference texts of --data. Needs --correct.
        out_dir (--out): Folder for the results; without it the text is printed.
        formats (--format): Formats of the files per recording: any of
            txt,srt,vtt,tsv,json,jsonl,whisper-json (JSON as openai-whisper writes it), or all.
            Needs --out.
        max_line_width: Most characters in a line of subtitles; 0: no limit.
        max_line_count: Most lines of a subtitle.
        max_reading_speed: Most characters per second in subtitles; 0: no limit.
        batch_size: Windows decoded at once; the text does not depend on it.
        keep_tree: Keep the sub-folders of the input. Needs --out.
        allow_truncated: Transcribe the readable part of a truncated file, and mark it as truncated.
        fallback (--fallback/--no-fallback): Decode windows that fail Whisper's thresholds again at
            rising temperatures, and skip silence; the threshold options below change single values.
        temperature: Sampling temperature; 0 is greedy. Repeat it, rising, for a fallback.
        compression_ratio_threshold: Decode again above this compression ratio of the tokens.
        logprob_threshold: Decode again below this mean log-probability per token.
        no_speech_threshold: With --logprob-threshold: skip above this no-speech prob.
        beams: Beams of beam search, without draft or guide; 1: greedy.
        condition_on_prev_tokens: Prompt with the previous text.
        prompt: Text in the decoder prompt that sets names and style.
        prompt_condition_type: Windows with --prompt: first-segment or all-segments.
        hotwords: Words to expect, in the decoder prompt of every window.
        loop_guard: Treatment of windows that end in a repetition loop: report, isolate (not used as
            previous text either) or cut (the loop is also cut to its first repetition).
        hallucination_silence_threshold: With --word-timestamps: skip probable hallucinations next
            to silences longer than this, in seconds.
        n_best: Length of each window's N-best list, in json; 0: no lists.
        n_best_method: beam (search) or sample.
        mode: sequential, or chunked: decodes a recording's windows in parallel; less accurate.
        overlap_s: Overlap of chunked windows (s); default: half a window.
        window_s: Longest window in seconds, for models whose windows are cut at pauses; shorter
            windows make shorter segments.
        word_timestamps: Add words with times and confidences; without --out prints one word per
            line.
        word_method: How words are timed: attention, ctc or ctc:model=NAME; implies
            --word-timestamps. Default: ctc if the checkpoint has a CTC head, else attention.
        padding: Padding of the last window: auto, silence or zeros.
    """
    given = dict(locals())

    from mmdecode.asr.options import FALLBACK, TranscribeOptions
    from mmdecode.asr.output.formats import parse_formats
    from mmdecode.asr.output.inputs import STDIN, gathered
    from mmdecode.asr.output.jobs import ResultFolder
    from mmdecode.asr.output.subtitles import Layout
    from mmdecode.asr.transcriber import Transcriber

    formats_asked = parse_formats(formats)
    asked = flags.fields_of(TranscribeOptions, given) | {
        "temperatures": tuple(temperature) if temperature else None,
        "word_timestamps": word_method or word_timestamps,
        "vad": vad_method or vad,
        "scores": out_dir is not None and "whisper-json" in formats_asked,
    }
    options: dict[str, Any] = dict(FALLBACK) if fallback else {}
    options |= {name: value for name, value in asked.items() if value is not None}
    flags.refuse_without("--correct", ["report"], context, correct is not None)
    if report is not None and report.is_dir():
        raise OptionError(f"--report {report} is a folder; expected the path of a page, as x.html")
    flags.refuse_without(flags.VAD, flags.VAD_SETTINGS, context, vad or vad_method)
    flags.refuse_without("--n-best", ["n_best_method"], context, n_best)
    flags.refuse_without("--out", ["formats", "resume", "keep_tree", *SUBTITLES], context, out_dir)
    flags.refuse_without("--out or --json", ["n_best"], context, out_dir or json)
    timed = {"srt", "vtt"} & set(formats_asked)
    flags.refuse_without("--format srt or vtt", SUBTITLES, context, timed)
    checked = TranscribeOptions(**options)
    _warn_of_thresholds(checked)
    # what may change a file; a transcript does not depend on the batch
    settings = dataclasses.asdict(checked)
    settings |= {f"vad_{name}": value for name, value in vars(checked.voice_activity).items()}
    del settings["batch_size"]
    names = "model draft guide accept dtype seed keep_tree"
    settings |= flags.picked(given, names, later="quantize correct")
    if report is not None:
        refuse_foreign([report], overwrite)  # before anything is computed
    uses_stdin = STDIN in (*(paths or ()), files_from)
    if resume and STDIN in (paths or ()):
        raise OptionError(
            "--resume does not work with '-', since standard input may be another recording than "
            "in the earlier run; give a file"
        )
    how = flags.work_of(given, uses_stdin)
    layout = Layout(
        max_line_width=max_line_width or None,
        max_line_count=max_line_count,
        max_reading_speed=max_reading_speed or None,
    )
    kept = out_dir is not None
    files = {"formats": formats_asked, "subtitles": dataclasses.asdict(layout)} if kept else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings_shown("default"))  # of skipped links, and of options
        entries = stack.enter_context(gathered(paths or (), files_from, data, limit, keep_tree))
        load = functools.partial(
            Transcriber.from_pretrained,
            *(model, draft, guide, accept, local_device(device), dtype, quantize, seed, correct),
            **options,
        )
        target = out_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = ResultFolder(
            *(target, settings | files, entries, formats_asked if kept else (), layout),
            **flags.picked(given, "batch_size resume overwrite"),
            command=sys.argv[1:],
        )
        done = run(folder, load, keep=not kept, temporary=not kept, **how)
        tally = cast("TranscriptTally", done)
        if report is not None:
            page = _page(entries, folder.path, settings)
            with explained(report):
                # names of files need not be UTF-8
                write_file(report, page.encode("utf-8", "backslashreplace"), overwrite)
    _report(tally, out_dir, settings, several=len(entries) > 1, as_json=json)
    if not tally.fine:
        raise typer.Exit(1)


def _warn_of_thresholds(options: TranscribeOptions) -> None:
    """Warns of thresholds whose failed windows are neither decoded again nor skipped."""
    idle = ["--compression-ratio-threshold"] * (options.compression_ratio_threshold is not None)
    if options.no_speech_threshold is None and options.logprob_threshold is not None:
        idle.append("--logprob-threshold")
    if idle and len(options.temperatures) == 1:
        text = (
            f"no effect of {' and '.join(idle)}: no window is decoded again, since there is only "
            "one temperature; give --temperature twice or more, or --fallback"
        )
        print_line(text, console, "yellow")


def _page(entries: list[Entry], results: Path, settings: Mapping[str, Any]) -> str:
    """Returns the page of corrected words, for all results of a folder."""
    from mmdecode.evaluation.speech.correction_page import CorrectedText, CorrectedTexts

    found = {row["source"]: row for _, row in read_rows(results) if "error" not in row}
    texts = []
    for entry in entries:
        if entry.id in found:
            whole = entry.audio is not None and entry.offset_s is None
            audio = Path(entry.audio or "") if whole else None
            texts.append(CorrectedText.of_transcript(found[entry.id], entry.text, audio))
    english = {row["language"] for row in found.values()} <= {None, "en"}
    names = "model", "correct", "dtype", "quantize"
    shown = {name: settings[name] for name in names if name in settings}
    return CorrectedTexts(texts, normaliser="whisper" if english else "basic").page(
        shown | {"mmdecode": mmdecode.__version__}
    )


def _report(
    tally: TranscriptTally,
    folder: Path | None,
    settings: Mapping[str, Any],
    several: bool,
    as_json: bool,
) -> None:
    results = list(tally.results.values())
    if as_json:
        emit_json(
            {
                "model": settings["model"],
                "transcribed": tally.done,
                "resumed": tally.done_before,
                "changed": tally.changed,
                "failed": len(tally.failures),
                "audio_s": round(tally.audio_s, 3),
                "wall_s": round(tally.wall_s, 3),
                "rtfx": round(tally.rtfx, 3) if tally.rtfx else None,
                "windows": tally.windows,
                "looped": tally.repetitive,
                "truncated": len(tally.truncated),
                "stats": tally.stats,
                "out": folder,
                "results": None if folder else results,
                "failures": list(tally.failures.values()),
            }
        )
    elif not folder:
        for result in results:
            # names of files need not be UTF-8
            name = result.source.encode("utf-8", "backslashreplace").decode()
            if settings["word_timestamps"]:
                for line in [f"{name}:"] * several + [*_timed_lines(result)]:
                    print_line(line)
                continue
            prefix = f"{name}: " if several else ""
            out.print(Text(prefix) + coloured(result), highlight=False, soft_wrap=True)
    line = tally.counted("transcribed")
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
    print_line(line, console)
    for what in tally.truncated.values():
        text = what.encode("utf-8", "backslashreplace").decode()
        print_line(f"transcribed as far as it goes: {text}", console, "yellow")
    for failure in tally.failures.values():
        print_line(f"failed: {failure.error}", console, "red")


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
