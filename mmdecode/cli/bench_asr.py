"""``mmdecode bench asr``: every drafter and precision on a recogniser, and one recommendation."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from mmdecode import registry
from mmdecode.checkpoints import DTYPES, device_of, dtype_of
from mmdecode.cli import flags
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.cli.shared import warn_of_load
from mmdecode.errors import InputError, OptionError, UnsupportedModelError
from mmdecode.evaluation.speech.task import shipped_for
from mmdecode.runs.console import console, only_our_output, out, print_line, progress_bar
from mmdecode.runs.files import explained, marked_json, refuse_foreign, write_file

if TYPE_CHECKING:
    import torch

    from mmdecode.asr.recognizers.base import Recognizer
    from mmdecode.evaluation.speed.recogniser_speed import Measurement, RecogniserSpeed

RESULTS = "results.json"
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".trn")
KEPT = 3
"""Drafters that are measured by default: the quickest ones on the first batch."""
WIDE = 100
"""Columns of a terminal from which on intervals stand next to their values."""


CAPTION = (
    "same: windows with the tokens of undrafted decoding in this precision; as fp32: of undrafted "
    "fp32. RTFx: seconds of audio a second. RTFx and times as fast include the encoder."
)


def asr(
    model: Annotated[
        str, flags.model_option("A speech recogniser", "openai/whisper-small")
    ] = "zoo:whisper-synth",
    data: flags.Texts = None,
    draft: flags.Texts = None,
    dtypes: flags.Texts = None,
    quantize: flags.Rounding = None,
    batch_size: flags.AtLeast1 = 8,
    repeats: flags.AtLeast1 = 3,
    limit: flags.AtLeast1 = 16,
    peers: bool = True,
    language: str | None = None,
    task: str | None = None,
    timestamps: bool = True,
    max_new_tokens: flags.Limit = None,
    out_dir: Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
    json: JsonFlag = False,
) -> None:
    """Find the fastest way to transcribe your recordings with your model on this machine.

    Every drafter decodes the same windows in every precision, in turns, and the last line is the
    command to use. Decoding without a drafter in fp32 is timed twice: the difference between these
    two rows is the noise of the measurement. Close other programs; the system load is reported.
    Ctrl-C stops early and shows what was measured.

    For example:

      mmdecode bench asr --model openai/whisper-small --data recordings/

      mmdecode bench asr --model small --data test.jsonl --draft medusa:path=heads --limit 32

    Options:
        data: Audio files, folders, or a table of recordings as for 'mmdecode transcribe'; with
            texts in the table, word error rates are shown. Repeatable. [default: zoo:real-clips,
            and zoo:speech-test for a model of the zoo]
        draft: Drafter, as name or name:key=value,...; see 'mmdecode methods draft'. Repeatable.
            [default: of all that fit the model, the 3 quickest on one batch]
        dtypes (--dtype): fp32, fp16 or bf16; repeatable. fp32 without a drafter is always measured.
            [default: without --quantize, fp32, bf16 where the processor is faster in it, int8 on a
            CPU]
        batch_size: Windows decoded at once, as in 'mmdecode transcribe'.
        repeats: Number of times that all is timed.
        limit: Maximum number of recordings.
        peers: Also time transformers' own generate.
        out_dir (--out): Folder for results.json.
    """
    from mmdecode.asr.output.inputs import gathered
    from mmdecode.asr.output.manifest import opened
    from mmdecode.evaluation.speed.recogniser_speed import Measurement, ways_of, windows_of
    from mmdecode.evaluation.speed.recommendation import recommend, with_errors
    from mmdecode.evaluation.speed.stopwatch import load, machine

    if out_dir is not None:
        refuse_foreign([out_dir / RESULTS], overwrite)
    only_our_output()
    target = device_of(device)
    asked: dict[str, Any] = {"language": language, "task": task, "timestamps": timestamps}
    asked |= {"max_new_tokens": max_new_tokens, "batch_size": batch_size}
    chosen, left_out = precisions(dtypes or [], quantize, target)
    data = data or [str(shipped_for(model))]
    paths = [name for name in data if not is_table(name)]
    tables = [name for name in data if is_table(name)]
    if len(tables) > 1:
        raise OptionError(
            f"--data names {len(tables)} tables; give one, or audio files and folders"
        )
    with gathered(paths, None, next(iter(tables), None), limit) as entries:
        recognizers = _loaded(model, chosen, device, asked)
        facts = machine(target, ", ".join(chosen))
        warn_of_load(facts["load_at_start"])
        with progress_bar() as bar:
            advance = stage(bar, "reading", len(entries))
            sources = [opened(entry, language) for entry in entries]
            windows, failed = windows_of(recognizers["fp32"], sources, advance)
            if not windows:
                why = next(iter(failed.values()), "they are silent")
                raise InputError(f"none of the recordings can be transcribed: {why}")
            usable = [index for index in range(len(entries)) if index not in failed]
            measured = Measurement(recognizers, windows, batch_size, usable)
            names = draft
            if names is None:
                names, slower = _quickest(measured, recognizers["fp32"], model, bar)
                left_out |= slower
            ways = ways_of(recognizers, names, model, peers)
            advance = stage(bar, "measuring", measured.calls(len(ways), repeats))
            stopped = False
            try:
                measured.run(ways, repeats, advance)
            except KeyboardInterrupt:
                stopped = True
        problem = ways[0].problem or ways[1].problem
        if problem is not None:
            raise UnsupportedModelError(f"{model} cannot be decoded: {problem}")
        if not measured.turns:
            print_line("stopped before all ways had a turn; nothing was measured", console, "red")
            raise typer.Exit(130)
        complete = [entries[index] for index in measured.complete]
        rows, unscored = with_errors(measured.rows(ways), complete, language)
        facts["load_at_end"] = load()
        given = {"draft": draft, **asked, "device": device}
        chosen_way, why = recommend(rows)
        command = command_of(chosen_way, model, data, given)
        results = {
            "machine": facts,
            "model": model,
            "data": data,
            "given": given | {"repeats": repeats, "limit": limit},
            "turns": len(measured.turns),
            "windows": len(windows),
            "stopped": stopped,
            "recordings": [entry.id for entry in complete],
            "left_out": left_out,
            "failures": [{"id": entries[index].id, "error": e} for index, e in failed.items()],
            "rows": [asdict(row) for row in rows],
            "recommendation": {"command": command, "why": why},
        }
    if out_dir is not None:
        with explained(out_dir):
            write_file(out_dir / RESULTS, marked_json(results, None), overwrite)
    if json:
        emit_json(results)
    else:
        title = f"{model}: {len(complete)} recordings, {len(windows)} windows, batches of "
        title += f"{batch_size}, {len(measured.turns)} turns"
        out.print(table_of(rows, title, out.width))
        for text in notes_of(rows, left_out, unscored):
            print_line(text)
        out.print(f"\n{why}\n", markup=False, highlight=False)
        print_line(command)
        if out_dir is not None:
            print_line(str(out_dir / RESULTS), console)
    for index, error in failed.items():
        print_line(f"failed: {entries[index].id}: {error}", console, "red")
    if stopped:
        print_line("stopped early: these are the turns that were complete", console, "red")
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def is_table(name: str) -> bool:
    """Whether a value of ``--data`` names a table of recordings, not audio."""
    return name.startswith("zoo:") or Path(name).suffix.lower() in TABLES


def precisions(
    dtypes: Sequence[str], quantize: str | None, device: torch.device
) -> tuple[dict[str, tuple[str, str | None]], dict[str, str]]:
    """Chooses the precisions to measure; fp32 is always the first.

    Args:
        dtypes: Values of ``--dtype``.
        quantize: Value of ``--quantize``.
        device: Device of the models.

    Returns:
        dtype and rounding of each precision by its name; and the reason for each precision that is
        left out by default.

    Raises:
        OptionError: A dtype does not exist.
    """
    from mmdecode.quantization import products

    names = {full: short for short, full in DTYPES.items()}
    asked = [names[str(dtype_of(one)).removeprefix("torch.")] for one in dtypes]
    left_out: dict[str, str] = {}
    if not dtypes and quantize is None:
        if device.type == "cuda" or (device.type == "cpu" and products.gain("bfloat16") > 1):
            asked.append("bf16")
        else:
            left_out["bf16"] = "not faster than fp32 on this machine, or not measured"
        if device.type == "cpu":
            quantize = "int8"
        else:
            left_out["int8"] = "only on a CPU by default; name it with --quantize"
    found: dict[str, tuple[str, str | None]] = {"fp32": ("fp32", None)}
    found |= {name: (name, None) for name in asked}
    if quantize is not None:
        found[quantize] = ("auto" if device.type == "cuda" else "fp32", quantize)
    return found, left_out


def _loaded(
    model: str,
    chosen: Mapping[str, tuple[str, str | None]],
    device: str,
    options: Mapping[str, Any],
) -> dict[str, Recognizer]:
    """Loads the model in each precision.

    Raises:
        OptionError: The model has been rounded already.
        UnsupportedModelError: No drafter can be used with the model.
    """
    from mmdecode.asr.transcriber import Transcriber
    from mmdecode.quantization.models import format_of, is_quantized

    found: dict[str, Recognizer] = {}
    for name, (dtype, quantize) in chosen.items():
        given = {"device": device, "dtype": dtype, "quantize": quantize, **options}
        one = Transcriber.from_pretrained(model, **given).recognizer
        if quantize is None and is_quantized(one.model):
            raise OptionError(
                f"{model} has {format_of(one.model)} weights; name the float model, which bench "
                "asr rounds itself"
            )
        if not one.capabilities.drafts:
            raise UnsupportedModelError(
                f"bench asr compares drafters, and none fits {one.name}: plain generate decodes "
                "it; name a Whisper or a Moonshine with --model"
            )
        found[name] = one
    return found


def _quickest(
    measured: Measurement, reference: Recognizer, model: str, bar: Any
) -> tuple[list[str], dict[str, str]]:
    """Tries all drafters that fit; returns the quickest, and why the others are left out."""
    from mmdecode.evaluation.speed.recogniser_speed import Way

    tried = [Way.drafted(name, "fp32", reference, model) for name in registry.names("draft")]
    tried = [way for way in tried if way.problem is None]
    advance = stage(bar, "trying drafters", len(tried))
    kept = measured.quickest(tried, KEPT, advance)
    left_out = {}
    for way in tried:
        if way not in kept and way.problem is None and way.decoder is not None:
            accepted = way.decoder.stats.accepted
            left_out[way.name] = "slower on one batch" if accepted else "no draft was accepted"
    return [way.name for way in kept], left_out


def stage(bar: Any, what: str, total: int) -> Callable[[], object]:
    """Adds a line to the progress bar; returns the function that advances it."""
    return partial(bar.advance, bar.add_task(what, total=total))


def command_of(
    row: RecogniserSpeed, model: str, data: Sequence[str], given: Mapping[str, Any]
) -> str:
    """Returns the command that transcribes in the way of a row.

    Args:
        row: The way.
        model: Name of the model.
        data: Values of ``--data``.
        given: Options of the measurement that change the command, by parameter name.
    """
    from mmdecode.evaluation.speed.draft_speed import PLAIN
    from mmdecode.quantization.weight_only import KINDS

    rounded, device = row.precision in KINDS, given["device"]
    kind = row.precision
    if rounded:
        kind = "auto" if device.startswith("cuda") else "fp32"
    changed: dict[str, Any] = {
        "model": model,
        "draft": None if row.draft == PLAIN else row.draft,
        "quantize": row.precision if rounded else None,
        "dtype": None if dtype_of(kind, model, device) == dtype_of("auto", model, device) else kind,
        "device": None if device == str(device_of("auto")) else device,
        "batch_size": None if given["batch_size"] == 8 else given["batch_size"],
        **{name: given[name] for name in ("language", "task", "max_new_tokens")},
    }
    words = ["mmdecode", "transcribe"]
    for name in data:
        words += ["--data", name] if is_table(name) else [name]
    for name, value in changed.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    if not given["timestamps"]:
        words.append("--no-timestamps")
    return shlex.join(words)


def table_of(rows: Sequence[RecogniserSpeed], title: str, width: int) -> Table:
    """Makes the table of all ways.

    Args:
        rows: Measurements.
        title: Title of the table.
        width: Columns of the terminal; in a narrow one intervals stand below their values.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=0)
    table.caption, table.caption_justify = CAPTION, "left"
    table.add_column("draft", overflow="fold")
    scored = any(row.errors is not None for row in rows)
    names = ["in", "tok/\npass", "ms a\ntoken", "enc.\nms", "RTFx", "times\nas fast", "same"]
    for name in [*names, "as\nfp32", *(["WER, %"] * scored), "MB"]:
        table.add_column(name, justify="right", no_wrap=True)
    shown = "{} [{}, {}]" if width >= WIDE else "{}\n{}-{}"
    for row in rows:
        cells = [escape(row.draft), row.precision]
        if row.problem is not None:
            table.add_row(*cells, *["-"] * (len(table.columns) - 2), style="dim")
            continue
        cells.append("" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}")
        cells += [_digits(row.ms_per_token), _digits(row.encoder_ms), _digits(row.rtfx)]
        cells.append(shown.format(*(f"{one:.2f}" for one in row.speedup)))
        cells += [f"{row.same_as_undrafted:.0%}", f"{row.same_as_fp32:.0%}"]
        if row.errors is not None:
            e = row.errors
            cells.append(shown.format(*(f"{100 * one:.1f}" for one in (e.value, e.low, e.high))))
        table.add_row(*cells, _digits(row.megabytes))
    return table


def _digits(value: float) -> str:
    """Writes a number with about three digits."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def notes_of(
    rows: Sequence[RecogniserSpeed], left_out: Mapping[str, str], unscored: str | None
) -> list[str]:
    """Lines below the table: what failed or was left out, and why."""
    from mmdecode.evaluation.speed.recommendation import is_broken, label

    failed: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.problem is not None:
            failed.setdefault((row.draft, row.problem), []).append(row.precision)
    found = [
        f"{draft} in {' and '.join(names)} was not measured: {why}"
        for (draft, why), names in failed.items()
    ]
    found += [
        f"{label(row)} does not keep the tokens of undrafted {row.precision}, as it should: check "
        "it by 'mmdecode audit', and report it"
        for row in rows
        if is_broken(row)
    ]
    reasons: dict[str, list[str]] = {}
    for name, why in left_out.items():
        reasons.setdefault(why, []).append(name)
    found += [f"left out: {', '.join(names)} ({why})" for why, names in reasons.items()]
    if unscored is not None:
        found.append(f"no word errors: {unscored}")
    return found
