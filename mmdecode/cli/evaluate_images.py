"""``mmdecode evaluate images``: compares ways to sample images by distribution, cost and pixels."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdecode.cli.flags import Device, Dtype, Overwrite, Quantize, model_help
from mmdecode.cli.output import JsonFlag, emit_json, show_tables
from mmdecode.cli.progress import progress_bar
from mmdecode.runs.console import console, only_our_output, print_line, warnings_shown

if TYPE_CHECKING:
    from mmdecode.evaluation.images.report import ImageReport
    from mmdecode.evaluation.images.runs import ImageRow, Recorder
    from mmdecode.image_ar.loading import RasterModel
    from mmdecode.models.image_classifier import Classifier

AUTO, NOTHING = "auto", "none"
SHOWN = 5  # failures listed one by one
MIN_REAL, MAX_REAL = 400, 4000  # reference images


def images(
    model: Annotated[
        str,
        typer.Option(
            help=model_help(
                "A model of image tokens in raster order", "deepseek-community/Janus-Pro-1B"
            )
        ),
    ],
    n: Annotated[int, typer.Option("--count", "-n", min=2, help="Images of each mode.")] = 200,
    modes: Annotated[
        str,
        typer.Option(
            help="Ways to sample, separated by commas: ar (or plain), exact, fast, relaxed. Plain "
            "decoding is always included, twice: with --seed, and with another seed."
        ),
    ] = "exact,fast,relaxed",
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="Another mode, as 'DRAFTER + ACCEPTANCE RULE', for example 'jacobi:window=16 + "
            "lantern:delta=0.1'. Repeat it for more."
        ),
    ] = None,
    class_id: Annotated[
        list[int] | None,
        typer.Option(help="A class to generate; default: all, in turn. Repeat it for more."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="For text-to-image models: a file with one prompt per line."),
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(help="Scale s of classifier-free guidance; 1: off; default: the model's."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; default: the model's.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Top-k filter; 0: off; default: the model's.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Top-p filter; 1: off; default: the model's.")
    ] = None,
    classifier: Annotated[
        str,
        typer.Option(
            help="Classifier of the images: a folder in timm's format, zoo:NAME, none, or auto: "
            "zoo:scene-classifier for zoo:llamagen-scenes, else none."
        ),
    ] = AUTO,
    real: Annotated[
        str,
        typer.Option(
            help="Images that the model was not trained on: a folder, scenes (rendered), none, or "
            "auto: scenes for zoo:llamagen-scenes, else none."
        ),
    ] = AUTO,
    training: Annotated[
        Path | None,
        typer.Option(help="Folder of the model's training images, to detect memorised samples."),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(min=0, help="Equivalence margin of the likelihood, in percent."),
    ] = 1.0,
    permutations: Annotated[
        int, typer.Option(min=99, help="Permutations of images in each two-sample test.")
    ] = 999,
    resamples: Annotated[int, typer.Option(min=20, help="Number of bootstrap samples.")] = 200,
    batch_size: Annotated[int, typer.Option(min=1, help="Images generated at once.")] = 16,
    output: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for images (as codes), tables and HTML page."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue in --out; same settings only.")
    ] = False,
    overwrite: Overwrite = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Annotated[int, typer.Option(help="Seed of the images and of all resampling.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Test whether faster sampling keeps the distribution of images: cost, likelihood, tests.

    All modes (ways to sample) have the same conditions (classes or prompts). Images are appended to
    images.jsonl in --out as codes; --resume continues an interrupted run at the next image. The
    HTML page shows a sheet of images of each mode. An image that fails is left out of the scores,
    and the exit code is then 1.

    For example:

      mmdecode evaluate images --model zoo:llamagen-scenes -n 200 --modes exact,relaxed --out run

      mmdecode evaluate images --model zoo:llamagen-scenes --modes plain --also 'jacobi:window=16 +
      lantern:delta=0.1' --json
    """
    from mmdecode.errors import OptionError
    from mmdecode.evaluation.images.report import ImageReport
    from mmdecode.evaluation.images.runs import ROWS, Recorder, groups_of, modes_of
    from mmdecode.evaluation.report.plots import drawable
    from mmdecode.image_ar.loading import config_of, load
    from mmdecode.runs.conditions import surroundings
    from mmdecode.runs.files import claimed
    from mmdecode.runs.journal import refuse_taken

    if resume and output is None:
        raise OptionError("--resume continues what a run wrote to --out; give that folder")
    if output is not None:
        drawable()
        refuse_taken(output, ROWS, resume, overwrite)
    only_our_output()
    chosen = modes_of([name.strip() for name in modes.split(",") if name.strip()], also or [])
    if config_of(model).model_type == "var":
        raise OptionError(
            f"{model} generates images scale by scale and has no drafters; give a model that "
            "generates in raster order, such as zoo:llamagen-scenes"
        )
    network = load(model, device, dtype, quantize)
    left_out: list[str] = []
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "guidance": guidance}
    recorder = Recorder(
        network,
        chosen,
        _conditions(network, n, class_id, prompts, left_out),
        model_id=model,
        seed=seed,
        batch=batch_size,
        **how,
    )
    judge = _judge(model, classifier)
    scenes = _is_scenes(model)
    source = ("scenes" if scenes else NOTHING) if real == AUTO else real
    settings = {
        "task": "images",
        **surroundings(network.adapter.model),
        "model": model,
        "n": n,
        "modes": [vars(mode) for mode in chosen],
        "classes": class_id,
        "prompts": None if prompts is None else str(prompts),
        "guidance": recorder.settings["guidance"],
        "sampling": recorder.settings["sampling"],
        "batch_size": batch_size,
        "seed": seed,
    } | ({"rows_left_out": len(left_out)} if left_out else {})
    load_average = settings.pop("load_average")
    with warnings_shown("default"), claimed(output) if output else contextlib.nullcontext():
        rows = _generated(recorder, output, settings, resume, overwrite)
        report = ImageReport(
            _scored(network, recorder, rows, judge, batch_size),
            guarantees=recorder.guarantees,
            groups=groups_of(network).numpy(),
            failed=_failures(rows),
            classes=None if judge is None else _known(network, judge, recorder),
            truth=None
            if judge is None or source == NOTHING
            else _truth(network, judge, source, training, n),
            conditions={
                **settings,
                "load_average": load_average,
                "classifier": None if judge is None else judge.name,
                "real": source,
                "training": None if training is None else str(training),
            },
            margin=margin / 100,
            permutations=permutations,
            resamples=resamples,
            seed=seed,
        )
        files = report.save(output, overwrite) if output else []
    failed = [row for row in rows if row.error is not None]
    if json:
        failures = [
            {"mode": r.mode, "condition": r.condition, "ordinal": r.ordinal, "error": r.error}
            for r in failed
        ]
        failures += [{"error": problem} for problem in left_out]
        emit_json(report.summary | {"failures": failures, "files": files})
    else:
        _show(report)
    _tell(failed, files)
    for problem in left_out[:SHOWN]:
        print_line(f"left out: {problem}", console, "red")
    if failed or left_out:
        raise typer.Exit(1)


COMMANDS = (images,)


def _is_scenes(model: str) -> bool:
    return model.startswith("zoo:llamagen-scenes")


def _conditions(
    model: RasterModel,
    n: int,
    classes: Sequence[int] | None,
    prompts: Path | None,
    left_out: list[str],
) -> list[Any]:
    """Class or prompt of each of ``n`` images; messages on unusable lines go to ``left_out``.

    Raises:
        OptionError: Prompts are given to a model of classes, or classes to a model of prompts, or
            prompts are missing.
        InputError: The file of prompts cannot be read.
    """
    from mmdecode.errors import InputError, OptionError
    from mmdecode.image_ar.jobs import read_prompts

    given: list[Any]
    if model.classes:
        if prompts is not None:
            raise OptionError(
                "this model draws of classes, not of prompts; give --class-id instead of --prompts"
            )
        given = list(classes or range(model.classes))
    else:
        if classes or prompts is None:
            raise OptionError("this model draws of prompts; give --prompts with a file of them")
        lines = [line for _, line in read_prompts(prompts)]
        given = [line for line in lines if isinstance(line, str)]
        left_out += [str(line) for line in lines if not isinstance(line, str)]
        if not given:
            raise InputError(f"{left_out[0]}; no other line can be used")
    return [given[index % len(given)] for index in range(n)]


def _judge(model: str, name: str) -> Classifier | None:
    from mmdecode.models.image_classifier import ZOO_CLASSIFIER, Classifier

    if name == AUTO:
        name = ZOO_CLASSIFIER if _is_scenes(model) else NOTHING
    return None if name == NOTHING else Classifier.from_pretrained(name)


def _known(model: RasterModel, judge: Classifier, recorder: Recorder) -> dict[Any, int] | None:
    """The classifier's class of each condition, matched by name or, if equally many, by number."""
    conditions: set[Any] = {request.condition for request in recorder.requests}
    names = {name.casefold(): index for index, name in enumerate(judge.classes)}
    labels = {label: name.casefold() for label, name in model.labels.items()}
    if labels and set(labels.values()) <= set(names):
        return {condition: names[labels[condition]] for condition in conditions}
    if model.classes == len(judge.classes):
        return {condition: condition for condition in conditions}
    return None


def _generated(
    recorder: Recorder,
    output: Path | None,
    settings: dict[str, Any],
    resume: bool,
    overwrite: bool,
) -> list[ImageRow]:
    """Generates the images of all modes; rows are appended to the output during the run."""
    from mmdecode.evaluation.images.runs import journal_of

    journal = journal_of(output, settings, resume, overwrite) if output else None
    with progress_bar() as bar, contextlib.ExitStack() as stack:
        task = bar.add_task("drawing", total=recorder.total)
        if journal:
            stack.callback(journal.close)
            bar.advance(task, sum(row.error is None for row in journal.done.values()))
        return recorder.run(journal, lambda row: bar.advance(task))


def _scored(
    model: RasterModel,
    recorder: Recorder,
    rows: Sequence[ImageRow],
    judge: Classifier | None,
    batch: int,
) -> dict[str, Any]:
    from mmdecode.evaluation.images.report import measured

    with console.status("scoring the images") if console.is_terminal else _quiet():
        return measured(model, recorder, rows, judge, batch)


def _truth(
    model: RasterModel, judge: Classifier, source: str, training: Path | None, n: int
) -> Any:
    from mmdecode.evaluation.images.references import truth_of

    count = min(max(2 * n, MIN_REAL), MAX_REAL)
    with console.status("reading reference images") if console.is_terminal else _quiet():
        return truth_of(model, judge, source, training, count)


def _quiet() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _failures(rows: Sequence[ImageRow]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        found[row.mode] = found.get(row.mode, 0) + (row.error is not None)
    return found


def _show(report: ImageReport) -> None:
    """Prints the tables; as Markdown if the output is no terminal."""
    show_tables(report.tables())
    print_line(report.about())


def _tell(failed: Sequence[ImageRow], files: Sequence[Path]) -> None:
    """Prints the paths of the files, and the images that failed."""
    for path in files:
        print_line(str(path), console, "bold")
    for row in failed[:SHOWN]:
        print_line(f"failed ({row.mode}): {row.condition}: {row.error}", console, "red")
    if failed:
        console.print(f"{len(failed)} failed; they are left out of the scores", highlight=False)
