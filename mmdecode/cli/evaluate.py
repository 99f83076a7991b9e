"""``mmdecode evaluate TASK``: scores of models, or of transcripts made elsewhere."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdecode.cli import evaluate_images, evaluate_n_best, evaluate_silence, evaluate_vlm
from mmdecode.cli.flags import (
    Device,
    Dtype,
    Language,
    MaxNewTokens,
    Overwrite,
    Quantize,
    Resume,
    Task,
    Timestamps,
    model_help,
    refuse_without,
)
from mmdecode.cli.output import JsonFlag, emit_json, show_tables
from mmdecode.cli.progress import recorded
from mmdecode.cli.shared import Group, shipped_for
from mmdecode.runs.console import console, only_our_output, out, print_line

if TYPE_CHECKING:
    from mmdecode.asr.output.manifest import Entry
    from mmdecode.asr.transcriber import Transcriber
    from mmdecode.evaluation.speech.samples import Sample

ABOUT = "Score models on speech or images, or transcripts made elsewhere."
app = typer.Typer(cls=Group, help=ABOUT, add_completion=False)
PLAIN = "plain"
"""Name of the mode without a draft."""
SHOWN = 5  # failures listed one by one
MODEL_OPTIONS = tuple(
    "batch_size warmup language task timestamps fallback max_new_tokens "
    "device dtype quantize".split()
)


@app.callback()
def _tasks() -> None:
    """Score models on speech or images, or transcripts made elsewhere."""


@app.command()
def wer(
    context: typer.Context,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Recordings with reference texts: .jsonl, .json, .csv, .tsv or .trn, or "
            "zoo:NAME. With --model the default is zoo:real-clips, and zoo:speech-test for a "
            "model of the zoo."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help=model_help("A Whisper model", "openai/whisper-small")),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="A drafter, as name or name:key=value,...; it is compared with decoding without a "
            "draft. Repeat it for more."
        ),
    ] = None,
    hypotheses: Annotated[
        list[str] | None,
        typer.Option(
            help="Score these transcripts instead of a model: [NAME=]FILE, as .jsonl, .csv, .tsv "
            "or .trn, or a folder of .txt. Without --data, FILE must be a result file of the Open "
            "ASR leaderboard, which contains references. Repeat it for more."
        ),
    ] = None,
    rescore: Annotated[
        Path | None, typer.Option(help="Folder of an earlier run: score its texts again.")
    ] = None,
    normalizer: Annotated[
        str,
        typer.Option(help="Text normaliser: none, basic, whisper (English) or leaderboard."),
    ] = "whisper",
    scorer: Annotated[
        str | None,
        typer.Option(
            help="How words are aligned: plain, merge (compounds match their parts) or sclite; "
            "default: merge with the leaderboard's normaliser, else plain."
        ),
    ] = None,
    only_scored: Annotated[
        bool | None,
        typer.Option(
            "--only-scored/--all-references",
            help="Leave out recordings without words in the reference, as the leaderboard does; "
            "default with its normaliser.",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="Manifest column that is the unit of the bootstrap; default: speaker, if known."
        ),
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, help="Tolerated loss (non-inferiority margin), in WER points.")
    ] = 0.1,
    points: Annotated[
        str | None,
        typer.Option(
            help="Also compute PIER, the error rate of chosen words: tags (<tag ...> spans in "
            "references) or a script, such as latin; default: tags, if references have any."
        ),
    ] = None,
    split_hyphens: Annotated[
        bool, typer.Option("--split-hyphens", help="For PIER, split words at hyphens.")
    ] = False,
    segmented: Annotated[
        bool,
        typer.Option(
            "--segmented",
            help="Texts in Japanese, Chinese, Thai and the like are split into words by spaces "
            "already. Without this option their characters are scored.",
        ),
    ] = False,
    hallucinations: Annotated[
        bool,
        typer.Option(
            "--hallucinations",
            help="Also count hallucinations: words on non-speech, runs of insertions, repetition.",
        ),
    ] = False,
    punctuation: Annotated[
        bool,
        typer.Option("--punctuation", help="Also score case, and , . ? ! after aligned words."),
    ] = False,
    resamples: Annotated[int, typer.Option(min=1, help="Number of bootstrap samples.")] = 10_000,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder for texts, tables, figures and HTML page.")
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Recordings decoded at once.")] = 8,
    warmup: Annotated[
        int, typer.Option(min=0, help="Untimed runs of the first batch (leaderboard: 10).")
    ] = 1,
    language: Language = None,
    task: Task = None,
    timestamps: Timestamps = True,
    fallback: Annotated[
        bool,
        typer.Option(
            "--fallback/--no-fallback",
            help="Decode low-confidence windows again at higher temperatures, as Whisper does.",
        ),
    ] = False,
    max_new_tokens: MaxNewTokens = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Annotated[int, typer.Option(help="Seed of every bootstrap and of sampling.")] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only this many recordings, for a smoke test.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Word error rate with intervals, speed, and paired comparisons of modes; PIER and more.

    Raw texts are appended to samples.jsonl in --out during the run, so that scoring can be repeated
    without the model. If a recording fails, its words count as missed and the exit code is 1.

    For example:

      mmdecode evaluate wer --data test.jsonl --model openai/whisper-small --draft lookup --out run

      mmdecode evaluate wer --model openai/whisper-small

      mmdecode evaluate wer --rescore run --normalizer leaderboard

      mmdecode evaluate wer --data test.jsonl --hypotheses theirs.jsonl --normalizer leaderboard

      mmdecode evaluate wer --rescore run --points latin --hallucinations --punctuation
    """
    from mmdecode.errors import OptionError
    from mmdecode.evaluation.speech.normalisers import normaliser_of
    from mmdecode.evaluation.speech.pier import refuse_points
    from mmdecode.evaluation.speech.runs import SAMPLES
    from mmdecode.evaluation.speech.wer import default_scorer
    from mmdecode.evaluation.speech.word_report import WERReport
    from mmdecode.runs.files import claimed
    from mmdecode.runs.journal import refuse_taken

    given = {"--model": model, "--hypotheses": hypotheses, "--rescore": rescore}
    if sum(bool(value) for value in given.values()) != 1:
        named = ", ".join(name for name, value in given.items() if value) or "none of them"
        raise OptionError(f"expected one of --model, --hypotheses and --rescore, and got {named}")
    if draft and not model:
        raise OptionError("--draft needs a model; give --model too")
    if rescore and (data or group or limit):
        raise OptionError(
            "--rescore scores the texts of an earlier run; leave --data, --group and --limit out"
        )
    if resume and (out_dir is None or not model):
        raise OptionError("--resume continues a run of --model in --out; give both options")
    if not model:
        refuse_without("--model", MODEL_OPTIONS, context)
    if data is None and not model:
        refuse_without("--data", ["group"], context)
    normalise = normaliser_of(normalizer)
    if points:
        refuse_points(points, scorer or default_scorer(normalizer))
    filtered = normalizer == "leaderboard" if only_scored is None else only_scored
    samples: list[Sample] = []
    conditions: dict[str, Any] = {}
    left_out: list[str] = []
    if rescore:
        samples, conditions = _recorded(rescore)
    folder = out_dir or rescore
    with claimed(folder) if folder else contextlib.nullcontext():
        own = rescore and folder and folder.resolve() == rescore.resolve()
        if folder:
            refuse_taken(folder, SAMPLES, resume or bool(own), overwrite, resumable=bool(model))
        if model:
            data = data or shipped_for(model)
            entries = _entries(data, limit, normalise if filtered else None, left_out)
            options = {
                "language": language,
                "task": task,
                "timestamps": timestamps,
                "max_new_tokens": max_new_tokens,
                "batch_size": batch_size,
            }
            if fallback:
                from mmdecode.asr.options import FALLBACK

                options |= FALLBACK
            transcribers = _transcribers(model, draft or [], device, dtype, quantize, seed, options)
            samples, conditions = _run(
                transcribers,
                entries,
                {
                    "model": model,
                    "data": str(data),
                    "dtype": dtype,
                    "seed": seed,
                    "options": options,
                }
                | {"drafts": draft or [], "group": group, "limit": limit, "warmup": warmup}
                | ({"rows_left_out": len(left_out)} if left_out else {}),
                out_dir,
                resume,
                overwrite,
            )
        elif hypotheses:
            samples, conditions = _foreign(hypotheses, data, limit, group, left_out)
        report = WERReport(
            samples,
            normaliser=normalizer,
            scorer=scorer,
            only_scored=filtered,
            margin=margin / 100,
            resamples=resamples,
            seed=seed,
            points=points,
            segmented=segmented,
            split_hyphens=split_hyphens,
            hallucinations=hallucinations,
            punctuation=punctuation,
            conditions=conditions,
        )
        if folder and own and (folder / "summary.json").exists():
            console.print(f"replacing the report in {folder}; its samples stay", highlight=False)
        files = report.save(folder, overwrite) if folder else []
    failures = [sample for sample in report.samples if sample.error is not None]
    if json:
        emit_json(
            report.summary
            | {
                "failures": [
                    *({"id": s.id, "mode": s.mode, "error": s.error} for s in failures),
                    *({"error": problem} for problem in left_out),
                ],
                "files": files,
            }
        )
    else:
        _show(report)
    if limit:
        console.print(
            f"--limit {limit}: a smoke test, not a result to report",
            style="yellow",
            highlight=False,
        )
    for path in files[:4]:
        console.print(str(path), style="bold", markup=False, highlight=False, soft_wrap=True)
    for sample in failures[:SHOWN]:
        console.print(
            f"failed ({sample.mode}): {sample.id}: {sample.error}",
            style="red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if failures:
        console.print(f"{len(failures)} failed; their words count as missed", highlight=False)
    for problem in left_out[:SHOWN]:
        print_line(f"left out: {problem}", console, "red")
    if failures or left_out:
        raise typer.Exit(1)


for _command in (
    *evaluate_silence.COMMANDS,
    *evaluate_n_best.COMMANDS,
    *evaluate_vlm.COMMANDS,
    *evaluate_images.COMMANDS,
):
    app.command()(_command)


def _entries(manifest: Path, limit: int | None, normalise: Any, left_out: list[str]) -> list[Entry]:
    """Reads recordings with texts; with a normaliser, only those that the leaderboard would score.

    Error messages of unusable rows are added to ``left_out``.
    """
    from mmdecode.asr.output.manifest import read_manifest
    from mmdecode.errors import InputError
    from mmdecode.evaluation.speech.normalisers import is_scored
    from mmdecode.evaluation.speech.pier import untagged

    entries = read_manifest(manifest, None if normalise else limit, text=True, left_out=left_out)
    if normalise:
        entries = [e for e in entries if is_scored(untagged(e.text or ""), normalise)][:limit]
        if not entries:
            raise InputError(f"no reference of {manifest} has words; give --all-references")
    return entries


def _transcribers(
    model: str,
    drafts: list[str],
    device: str | None,
    dtype: str,
    quantize: str | None,
    seed: int,
    options: dict[str, Any],
) -> dict[str, Transcriber]:
    """Loads one model, and makes a transcriber without a draft and one for each drafter."""
    from mmdecode import registry
    from mmdecode.asr.transcriber import Transcriber, load, make_options
    from mmdecode.decoder import Decoder
    from mmdecode.errors import OptionError

    settings = make_options(options)
    if len(set(drafts)) < len(drafts):
        raise OptionError(f"--draft is given twice: {', '.join(drafts)}; give each drafter once")
    only_our_output()
    network, processor = load(model, device, dtype, quantize)
    found = {PLAIN: Transcriber(network, processor, Decoder(seed=seed), settings)}
    for spec in drafts:
        drafter = registry.create("draft", spec, **registry.context_of(network, processor, model))
        found[spec] = Transcriber(network, processor, Decoder(draft=drafter, seed=seed), settings)
    return found


def _run(
    transcribers: dict[str, Transcriber],
    entries: list[Entry],
    settings: dict[str, Any],
    out_dir: Path | None,
    resume: bool,
    overwrite: bool,
) -> tuple[list[Sample], dict[str, Any]]:
    """Transcribes in all modes; returns the samples and the settings of the run."""
    from mmdecode.evaluation.speech.runs import data_hash
    from mmdecode.runs.conditions import conditions_of

    conditions = conditions_of(transcribers) | settings
    conditions["batch_size"] = settings["options"]["batch_size"]
    conditions["data_hash"] = data_hash(entries)
    samples = recorded(
        "transcribing",
        transcribers,
        entries,
        conditions,
        out_dir,
        resume,
        overwrite,
        group=settings["group"],
        warmup=settings["warmup"],
    )
    return samples, conditions


def _recorded(folder: Path) -> tuple[list[Sample], dict[str, Any]]:
    import json as json_module

    from mmdecode.errors import InputError
    from mmdecode.evaluation.speech.runs import read_samples

    samples = read_samples(folder)
    try:
        run = json_module.loads((folder / "run.json").read_text(encoding="utf-8"))
        return samples, dict(run["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / 'run.json'} cannot be read; expected the folder of an earlier run"
        ) from error


def _foreign(
    hypotheses: list[str],
    manifest: Path | None,
    limit: int | None,
    group: str | None,
    left_out: list[str],
) -> tuple[list[Sample], dict[str, Any]]:
    """Reads transcripts made elsewhere; each file is a mode."""
    from mmdecode.asr.output.manifest import read_manifest
    from mmdecode.errors import OptionError
    from mmdecode.evaluation.speech.samples import match, read_results

    sources: dict[str, Path] = {}
    for text in hypotheses:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = Path(text).name, text
        if name in sources:
            raise OptionError(f"two --hypotheses are called {name!r}; name them: NAME=FILE")
        sources[name] = Path(path)
    samples = []
    entries: list[Entry] = []
    if manifest:
        entries = read_manifest(manifest, limit, audio=False, text=True, left_out=left_out)
    for name, source in sources.items():
        if manifest:
            samples += match(entries, source, name, group)
        else:
            samples += read_results(source, name)[:limit]
    files = {name: str(path) for name, path in sources.items()}
    data = str(manifest or next(iter(sources)))
    conditions = {"hypotheses": files, "data": data, "group": group, "limit": limit}
    return samples, conditions | ({"rows_left_out": len(left_out)} if left_out else {})


def _show(report: Any) -> None:
    from rich.table import Table

    rows = report.rows()
    names, *columns = rows[0]
    table = Table("", *(row[names] for row in rows))
    for column in columns:
        table.add_row(column, *(row[column] for row in rows))
    out.print(table)
    if marks := report.mark_rows():
        show_tables([marks])
    out.print(report.about(), markup=False, highlight=False)
    for found in report.comparisons:
        out.print(str(found), markup=False, highlight=False)
