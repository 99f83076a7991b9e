"""``mmdecode evaluate silence``: hallucinations on non-speech, and word errors on speech."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mmdecode.cli.flags import (
    Device,
    Dtype,
    Language,
    MaxNewTokens,
    Overwrite,
    Quantize,
    Resume,
    model_help,
)
from mmdecode.cli.output import JsonFlag, emit_json, show_tables
from mmdecode.cli.progress import recorded
from mmdecode.runs.console import console, only_our_output, print_line

if TYPE_CHECKING:
    import numpy as np

    from mmdecode.asr.output.manifest import Entry
    from mmdecode.asr.transcriber import Transcriber

ZOO, NONE = "zoo", "none"
SHOWN = 5  # failures listed one by one
SEEDS = {"development": 1, "test": 3}  # 2 was the test part of an earlier report
PLAIN = "plain"


def silence(
    model: Annotated[
        str,
        typer.Option(help=model_help("A Whisper model", "openai/whisper-small")),
    ] = "zoo:whisper-synth",
    guide: Annotated[
        list[str] | None,
        typer.Option(
            help="A guide to evaluate, as name or name:key=value,...; default: whisper_cd. Repeat "
            "it for more."
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="A drafter for every mode; it does not change the texts.")
    ] = None,
    speech: Annotated[
        list[str] | None,
        typer.Option(
            help="Speech to measure word errors on: a manifest with texts, zoo (shipped clips, "
            "clean and with noise), or none; default: zoo. Repeat it for more sets."
        ),
    ] = None,
    recordings: Annotated[
        Path | None,
        typer.Option(help="Manifest of your own recordings without speech, added to the clips."),
    ] = None,
    clips: Annotated[int, typer.Option(min=2, help="Clips of each kind of sound and level.")] = 12,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each clip, in seconds.")] = 20.0,
    part: Annotated[
        Literal["development", "test"],
        typer.Option(help="Set of synthetic sounds: development to tune on, test to report."),
    ] = "test",
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder for texts, tables and HTML page.")
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Recordings decoded at once.")] = 8,
    language: Language = None,
    max_new_tokens: MaxNewTokens = None,
    padding: Annotated[
        Literal["silence", "zeros", "auto"],
        typer.Option(help="Padding of the last window; openai/whisper pads with silence."),
    ] = "silence",
    resamples: Annotated[int, typer.Option(min=1, help="Number of bootstrap samples.")] = 10_000,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Annotated[int, typer.Option(help="Seed of every bootstrap and of sampling.")] = 0,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Use only this many recordings of each kind, for a smoke test."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Hallucinated words per minute of non-speech, repetition, and word errors on speech.

    Modes are plain Whisper decoding; thresholds (Whisper's thresholds and temperature fallback);
    loop guard (repeated text is cut after its first occurrence); and each --guide. Silence, white,
    pink and babble noise and music are synthesised. Texts are appended to samples.jsonl in --out;
    --resume continues an interrupted run. If a recording fails, the exit code is 1.

    For example:

      mmdecode evaluate silence --model openai/whisper-small --out run

      mmdecode evaluate silence --model openai/whisper-tiny --guide whisper_cd:alpha=0.5 --guide
      whisper_cd:alpha=0,gate=0.1 --speech test.jsonl --recordings office.jsonl --out run
    """
    from mmdecode.errors import OptionError
    from mmdecode.evaluation.report.plots import drawable
    from mmdecode.evaluation.speech.non_speech import write_flac
    from mmdecode.evaluation.speech.runs import SAMPLES, data_hash
    from mmdecode.evaluation.speech.silence import SilenceReport
    from mmdecode.runs.conditions import conditions_of
    from mmdecode.runs.files import claimed
    from mmdecode.runs.journal import refuse_taken

    guides, sets = ["whisper_cd"] if guide is None else guide, speech or [ZOO]
    if resume and out_dir is None:
        raise OptionError("--resume continues what a run wrote to --out; give that folder")
    only_our_output()
    with contextlib.ExitStack() as stack:
        if out_dir is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            drawable()
            folder = out_dir
            stack.enter_context(claimed(folder))
            refuse_taken(folder, SAMPLES, resume, overwrite)
        options = {
            "language": language,
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "padding": padding,
        }
        transcribers = _transcribers(model, guides, draft, device, dtype, quantize, seed, options)
        made: dict[Path, Callable[[], np.ndarray]] = {}
        left_out: list[str] = []
        entries = [
            *_read(sets, recordings, limit, left_out),
            *_sounds(made, folder / "audio", clips, seconds, SEEDS[part], limit),
        ]
        if ZOO in sets:
            entries += _zoo_speech(made, folder / "audio", limit)

        def write() -> None:
            for path, samples in made.items():
                write_flac(path, samples(), overwrite)

        settings = (
            conditions_of(transcribers)
            | {
                "model": model,
                "guides": guides,
                "draft": draft,
                "options": options,
                "speech": sets,
                "recordings": str(recordings) if recordings else None,
                "part": part,
                "clips": clips,
                "seconds": seconds,
                "seed": seed,
                "limit": limit,
                "data_hash": data_hash(entries),
            }
            | ({"rows_left_out": len(left_out)} if left_out else {})
        )
        samples = recorded(
            "listening",
            transcribers,
            entries,
            settings,
            out_dir,
            resume,
            overwrite,
            begin=write,
            warmup=0,
        )
        report = SilenceReport(samples, resamples=resamples, seed=seed, conditions=settings)
        files = report.save(out_dir, overwrite) if out_dir else []
        failures = [sample for sample in samples if sample.error is not None]
        if json:
            failed = [{"id": s.id, "mode": s.mode, "error": s.error} for s in failures]
            failed += [{"error": problem} for problem in left_out]
            emit_json(report.summary | {"failures": failed, "files": files})
        else:
            show_tables(rows for rows in (report.rows(), report.speech_rows()) if rows)
            print_line(report.about())
    if limit:
        print_line(f"--limit {limit}: a smoke test, not a result to report", console, "yellow")
    for path in files:
        print_line(str(path), console, "bold")
    for sample in failures[:SHOWN]:
        print_line(f"failed ({sample.mode}): {sample.id}: {sample.error}", console, "red")
    for problem in left_out[:SHOWN]:
        print_line(f"left out: {problem}", console, "red")
    if failures:
        print_line(f"{len(failures)} failed", console)
    if failures or left_out:
        raise typer.Exit(1)


def _transcribers(
    model: str,
    guides: list[str],
    draft: str | None,
    device: str | None,
    dtype: str,
    quantize: str | None,
    seed: int,
    options: dict[str, Any],
) -> dict[str, Transcriber]:
    """Loads one model, and makes a transcriber for each mode of `silence`."""
    from mmdecode import registry
    from mmdecode.asr.options import FALLBACK
    from mmdecode.asr.transcriber import Transcriber, load, make_options
    from mmdecode.decoder import Decoder
    from mmdecode.errors import OptionError

    if len(set(guides)) < len(guides):
        raise OptionError(f"--guide is given twice: {', '.join(guides)}; give each guide once")
    network, processor = load(model, device, dtype, quantize)
    at_hand = registry.context_of(network, processor, model)
    ways: dict[str, tuple[str | None, dict[str, Any]]] = {
        PLAIN: (None, {"loop_guard": "report"}),
        "thresholds": (None, FALLBACK | {"loop_guard": "report"}),
        "loop guard": (None, {"loop_guard": "cut"}),
        **{spec: (spec, {"loop_guard": "report"}) for spec in guides},
    }
    found = {}
    for name, (spec, own) in ways.items():
        drafter = registry.create("draft", draft, **at_hand) if draft else None
        guiding = registry.create("guide", spec, **at_hand) if spec else None
        decoder = Decoder(drafter, guiding, seed=seed)
        found[name] = Transcriber(network, processor, decoder, make_options(options | own))
    return found


def _read(
    sets: Sequence[str], recordings: Path | None, limit: int | None, left_out: list[str]
) -> Iterator[Entry]:
    """Reads the user's recordings; error messages of unusable rows are added to ``left_out``."""
    from dataclasses import replace

    from mmdecode.asr.output.manifest import read_manifest
    from mmdecode.evaluation.speech.silence import NON_SPEECH, SPEECH

    for entry in read_manifest(recordings, limit, left_out=left_out) if recordings else ():
        yield replace(entry, id=f"{NON_SPEECH}/recordings/{entry.id}", text="")
    for path in (Path(one) for one in sets if one not in (ZOO, NONE)):
        for entry in read_manifest(path, limit, text=True, left_out=left_out):
            yield replace(entry, id=f"{SPEECH}/{path.stem}/{entry.id}")


def _sounds(
    made: dict[Path, Callable[[], np.ndarray]],
    folder: Path,
    clips: int,
    seconds: float,
    seed: int,
    limit: int | None,
) -> Iterator[Entry]:
    """Synthetic recordings; functions that make their samples are added to ``made``, by path."""
    from dataclasses import replace

    from mmdecode.evaluation.speech.non_speech import sounds
    from mmdecode.evaluation.speech.silence import NON_SPEECH

    for entry, samples in sounds(folder, min(clips, limit or clips), seconds, seed):
        made[Path(entry.audio or "")] = samples
        yield replace(entry, id=f"{NON_SPEECH}/{entry.id}")


def _zoo_speech(
    made: dict[Path, Callable[[], np.ndarray]], folder: Path, limit: int | None
) -> Iterator[Entry]:
    """Shipped speech, clean and noisy; functions that make noisy samples are added to ``made``."""
    from mmdecode.asr.output.manifest import Entry
    from mmdecode.evaluation.speech.silence import SPEECH
    from mmdecode.zoo.speech import speech_test

    clips = speech_test()[:limit]
    for clip in clips:
        yield Entry(id=f"{SPEECH}/clean/{clip.name}", audio=str(clip.path), text=clip.text)
    for clip in clips:
        path = folder / f"noisy_{clip.name}.flac"
        made[path] = partial(clip.samples, "noisy")
        yield Entry(id=f"{SPEECH}/noisy/{clip.name}", audio=str(path), text=clip.text)


COMMANDS = (silence,)
