"""``mmdecode transcribe``: audio files in, text and subtitles out."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mmdecode.cli.output import JsonFlag, console, emit_json, out
from mmdecode.errors import InputError


def command(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Audio files, and folders to search for them."),
    ],
    model: Annotated[
        str, typer.Option(help="A Whisper model: a folder, a Hub id or zoo:NAME.")
    ] = "zoo:whisper-synth",
    draft: Annotated[
        str | None,
        typer.Option(
            help="Who drafts, as name or name:key=value,...; see 'mmdecode methods draft'. "
            "On a zoo model plain medusa means its own heads."
        ),
    ] = None,
    guide: Annotated[
        str | None, typer.Option(help="The law the tokens follow; see 'mmdecode methods guide'.")
    ] = None,
    accept: Annotated[
        str, typer.Option(help="The acceptance rule; auto keeps the text as without a draft.")
    ] = "auto",
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the results; without it the text is printed."),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            "--format", help="Files per recording: any of txt,srt,vtt,tsv,json,jsonl. Needs --out."
        ),
    ] = "txt,srt,json",
    batch_size: Annotated[
        int, typer.Option(min=1, help="Recordings decoded at once; the text does not depend on it.")
    ] = 8,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in --out; same settings only.")
    ] = False,
    language: Annotated[
        str | None, typer.Option(help="For example en; else the model's own, else detected.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="transcribe or translate.")] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps/--no-timestamps", help="Let the model predict times.")
    ] = True,
    fallback: Annotated[
        bool,
        typer.Option(
            "--fallback/--no-fallback",
            help="Redo doubtful windows at rising temperatures and skip silence, with Whisper's "
            "thresholds; the options below change them one by one.",
        ),
    ] = False,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="0 is greedy. Repeat it for the temperatures of the fallback, rising."),
    ] = None,
    compression_ratio_threshold: Annotated[
        float | None, typer.Option(help="Redo windows whose tokens compress better than this.")
    ] = None,
    logprob_threshold: Annotated[
        float | None, typer.Option(help="Redo windows with a lower mean log-probability.")
    ] = None,
    no_speech_threshold: Annotated[
        float | None, typer.Option(help="Skip such windows where silence is more likely than this.")
    ] = None,
    condition_on_prev_tokens: Annotated[
        bool, typer.Option("--condition-on-prev-tokens", help="Show each window the text before.")
    ] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens per window.")
    ] = None,
    padding: Annotated[
        str, typer.Option(help="How a last window is filled up: auto, silence or zeros.")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; else cuda if any.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the noise that sampling uses.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Transcribe only the first so many recordings.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Transcribe audio files of any length, rate and format.

    Prints the text, or writes it to --out: one file per recording and format, and results.jsonl,
    which gets a line as each recording ends. Recordings that cannot be read are listed at the end,
    and make the exit code 1.

    For example:

      mmdecode transcribe talk.mp3

      mmdecode transcribe recordings/ --out texts --format txt,srt --draft medusa

      mmdecode transcribe recordings/ --out texts --format txt,srt --draft medusa --resume
    """
    from mmdecode.asr.formats import parse_formats
    from mmdecode.asr.jobs import ResultFolder
    from mmdecode.asr.options import FALLBACK
    from mmdecode.asr.transcriber import Failure, Transcriber, make_options
    from mmdecode.errors import OptionError
    from mmdecode.registry import parse

    if resume and out_dir is None:
        raise OptionError("--resume continues what --out holds; give --out too")
    if draft is not None and parse("draft", draft)[0][0] == "source":
        raise OptionError(
            "--draft source copies from a text, and no option here gives one; give the text in "
            "Python, Transcriber.from_pretrained(..., draft=Source(ids=...)), or another --draft"
        )
    kinds = parse_formats(formats)
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
        "condition_on_prev_tokens": condition_on_prev_tokens,
        "max_new_tokens": max_new_tokens,
        "padding": padding,
    }
    checked = make_options(options)
    files = find_audio(paths)[:limit]
    settings = dataclasses.asdict(checked) | {
        "model": model,
        "draft": draft,
        "guide": guide,
        "accept": accept,
        "dtype": dtype,
        "seed": seed,
    }
    del settings["batch_size"]  # a transcript does not depend on it
    folder = ResultFolder(out_dir, kinds, settings, resume) if out_dir else None
    done_before = [f for f in files if folder and f in folder.done]
    todo = [f for f in files if not (folder and f in folder.done)]
    if folder:
        for name in todo:  # in the order of the input, not that of the ends
            folder.name_of(name)
    failures: list[Failure] = []
    results: list[Any] = []
    seconds, started, stats = 0.0, time.perf_counter(), {}
    try:
        if todo:
            transcriber = Transcriber.from_pretrained(
                model, draft, guide, accept, device, dtype, seed, **options
            )
            started = time.perf_counter()
            with _progress() as bar:
                meter = _Meter(bar, len(todo))
                for result in transcriber.stream(todo, meter):
                    meter.file_done()
                    if folder:
                        folder.add(result)
                    if isinstance(result, Failure):
                        failures.append(result)
                    else:
                        seconds += result.duration_s
                        results.append(result)
            stats = transcriber.stats.as_dict()
    finally:
        if folder:
            folder.close()
    wall = time.perf_counter() - started
    results.sort(key=lambda result: result.index)
    if json:
        emit_json(
            {
                "transcribed": len(results),
                "resumed": len(done_before),
                "failed": len(failures),
                "audio_s": round(seconds, 3),
                "wall_s": round(wall, 3),
                "audio_s_per_s": round(seconds / wall, 3) if wall and seconds else None,
                "stats": stats,
                "out": out_dir,
                "results": None if folder else results,
                "failures": failures,
            }
        )
    elif not folder:
        for result in results:
            prefix = f"{result.source}: " if len(files) > 1 else ""
            out.print(f"{prefix}{result.text}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{len(results)} transcribed, {len(done_before)} done before, {len(failures)} failed; "
        f"{seconds:.1f} s of audio in {wall:.1f} s",
        highlight=False,
    )
    for failure in sorted(failures, key=lambda failure: failure.index):
        console.print(
            f"failed: {failure.error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
    if failures:
        raise typer.Exit(1)


def find_audio(paths: list[str]) -> list[str]:
    """Named files as they are, folders searched; each file once.

    Raises:
        InputError: A folder holds no audio.
    """
    from mmdecode.asr.audio import SUFFIXES

    found: dict[str, None] = {}
    for path in paths:
        if not os.path.isdir(path):
            found[path] = None
            continue
        inside = [
            str(file)
            for file in sorted(Path(path).rglob("*"))
            if file.suffix.lower() in SUFFIXES and file.is_file() and file.name[0] != "."
        ]
        if not inside:
            raise InputError(
                f"the folder {path} holds no audio files; expected {', '.join(sorted(SUFFIXES))}"
            )
        found.update(dict.fromkeys(inside))
    return list(found)


class _Meter:
    """Moves the bar: files that ended, and seconds of audio per second of work."""

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


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
