"""``mmdecode evaluate pope|chair|mme|amber|spatial``: scores of vision-language decoding.

``mmdecode evaluate published`` checks published tables of POPE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdecode.cli.flags import (
    Device,
    DeviceMap,
    Dtype,
    NoiseBy,
    Overwrite,
    PromptCacheBytes,
    Quantize,
    refuse_without,
)
from mmdecode.cli.output import JsonFlag, emit_json, show_tables
from mmdecode.cli.progress import answered, progress_bar, resumable, tell_changed
from mmdecode.cli.vision_flags import (
    BatchSize,
    Controls,
    Data,
    Guides,
    Images,
    Limit,
    MaxNewTokens,
    Model,
    Output,
    Parser,
    Part,
    Redraw,
    Resamples,
    Rescore,
    Resume,
    Sample,
    Seed,
    Seeds,
    Suffix,
    Warmup,
)
from mmdecode.runs.console import console, only_our_output, print_line, warnings_shown

if TYPE_CHECKING:
    from mmdecode.evaluation.report.item_report import ItemReport
    from mmdecode.evaluation.vision.data import Questions
    from mmdecode.evaluation.vision.items import Item
    from mmdecode.evaluation.vision.modes import Mode
    from mmdecode.evaluation.vision.runs import Recorder
    from mmdecode.vlm.images import ImageSource

READING = ".reading"  # the image that is being read, see mmdecode.runs.crashes
SHOWN = 5  # failures listed one by one
RUN_OPTIONS = tuple(
    "data part images split prefix prompt synonyms guide sample seeds controls suffix redraw limit "
    "batch_size prompt_cache noise_by max_new_tokens warmup resume device device_map dtype "
    "quantize".split()
)
"""Parameters of a run; with --rescore they are taken from the earlier run."""


def pope(
    context: typer.Context,
    data: Data = None,
    model: Model = None,
    guide: Guides = None,
    images: Images = None,
    part: Part = "test",
    split: Annotated[
        list[str] | None,
        typer.Option(help="POPE's random, popular or adversarial; default: all. Repeat for more."),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="First characters of the files' names, if --data is a folder.")
    ] = "",
    sample: Sample = None,
    seeds: Seeds = 5,
    controls: Controls = True,
    suffix: Suffix = "none",
    parser: Parser = "leading",
    redraw: Redraw = True,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    prompt_cache: PromptCacheBytes = 2**30,
    noise_by: NoiseBy = "request",
    max_new_tokens: MaxNewTokens = 32,
    warmup: Warmup = 1,
    output: Output = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    rescore: Rescore = None,
    resamples: Resamples = 10_000,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Seed = 0,
    json: JsonFlag = False,
) -> None:
    """POPE: is there an object in the image? Accuracy, share of yes, and margins, by split.

    --data is 'zoo', a folder with a file per split, or files (repeat it): JSON lines, csv or tsv
    with the columns image, text and label. Images are next to the files, or in --images. Answers
    go to items.jsonl in --out. A question that fails counts as wrong; the exit code is then 1.

    For example:

      mmdecode evaluate pope --model zoo:llava-scenes --guide vcd --data zoo --out run

      mmdecode evaluate pope --model llava-hf/llava-1.5-7b-hf --guide vcd --guide ritual:alpha=3
      --data coco/ --images val2014/ --suffix one-word --out run

      mmdecode evaluate pope --rescore run --parser vcd
    """
    _evaluate("pope", **locals())


def chair(
    context: typer.Context,
    data: Data = None,
    model: Model = None,
    guide: Guides = None,
    images: Images = None,
    part: Part = "test",
    prompt: Annotated[
        str | None, typer.Option(help="The instruction for the model; default: the data's own.")
    ] = None,
    synonyms: Annotated[
        Path | None,
        typer.Option(help="File with a line 'NAME, SYNONYM, ...' per object; default: COCO's."),
    ] = None,
    sample: Sample = None,
    seeds: Seeds = 5,
    controls: Controls = True,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    prompt_cache: PromptCacheBytes = 2**30,
    noise_by: NoiseBy = "request",
    max_new_tokens: MaxNewTokens = 128,
    warmup: Warmup = 1,
    output: Output = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    rescore: Rescore = None,
    resamples: Resamples = 10_000,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Seed = 0,
    json: JsonFlag = False,
) -> None:
    """CHAIR: hallucinated objects in captions, with recall and length, also at equal length.

    --data is 'zoo', or JSON lines with image (or COCO's image_id) and objects, the names of the
    objects in the image. If a caption fails, it counts as empty and the exit code is 1.

    For example:

      mmdecode evaluate chair --model zoo:llava-scenes --guide vcd --greedy --data zoo --out run
    """
    _evaluate("chair", **locals())


def mme(
    context: typer.Context,
    data: Data = None,
    model: Model = None,
    guide: Guides = None,
    images: Images = None,
    part: Part = "test",
    sample: Sample = None,
    seeds: Seeds = 5,
    controls: Controls = True,
    suffix: Suffix = "none",
    parser: Parser = "mme",
    redraw: Redraw = True,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    prompt_cache: PromptCacheBytes = 2**30,
    noise_by: NoiseBy = "request",
    max_new_tokens: MaxNewTokens = 32,
    warmup: Warmup = 1,
    output: Output = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    rescore: Rescore = None,
    resamples: Resamples = 10_000,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Seed = 0,
    json: JsonFlag = False,
) -> None:
    """MME: a yes- and a no-question about each image; with the scores of MME's own tool.

    --data is 'zoo', MME's folder (which may contain the images), or JSON lines with category,
    image, question and answer.

    For example:

      mmdecode evaluate mme --model zoo:llava-scenes --guide vcd --data zoo --out run
    """
    _evaluate("mme", **locals())


def amber(
    context: typer.Context,
    data: Data = None,
    model: Model = None,
    guide: Guides = None,
    images: Images = None,
    sample: Sample = None,
    seeds: Seeds = 5,
    controls: Controls = True,
    suffix: Suffix = "none",
    parser: Parser = "leading",
    redraw: Redraw = True,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    prompt_cache: PromptCacheBytes = 2**30,
    noise_by: NoiseBy = "request",
    max_new_tokens: MaxNewTokens = 32,
    warmup: Warmup = 1,
    output: Output = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    rescore: Rescore = None,
    resamples: Resamples = 10_000,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Seed = 0,
    json: JsonFlag = False,
) -> None:
    """AMBER: questions on existence, attributes and relations; with the scores of its own tool.

    --data is a folder with query_discriminative.json and annotations.json; the images are in its
    folder image, or in --images.

    For example:

      mmdecode evaluate amber --model llava-hf/llava-1.5-7b-hf --guide vcd --data AMBER/data
      --images AMBER/image --out run
    """
    _evaluate("amber", **locals())


def spatial(
    context: typer.Context,
    data: Data = None,
    model: Model = None,
    guide: Guides = None,
    images: Images = None,
    part: Part = "test",
    sample: Sample = None,
    seeds: Seeds = 5,
    controls: Controls = True,
    suffix: Suffix = "none",
    parser: Parser = "leading",
    redraw: Redraw = True,
    limit: Limit = None,
    batch_size: BatchSize = 8,
    prompt_cache: PromptCacheBytes = 2**30,
    noise_by: NoiseBy = "request",
    max_new_tokens: MaxNewTokens = 32,
    warmup: Warmup = 1,
    output: Output = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    rescore: Rescore = None,
    resamples: Resamples = 10_000,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    seed: Seed = 0,
    json: JsonFlag = False,
) -> None:
    """Spatial relations (What's Up): single questions, pairs and sets; or VSR's statements.

    --data is 'zoo', What's Up's JSON file, VSR's JSON lines, or JSON lines with image, question,
    options, answer and group; images are next to the file, or in --images. --parser and --redraw
    are for VSR, whose questions are answered yes or no.

    For example:

      mmdecode evaluate spatial --model zoo:llava-scenes --guide adaptvis --data zoo --out run
    """
    _evaluate("spatial", **locals())


def published(
    table: Annotated[
        Path,
        typer.Argument(
            help="A .csv, .tsv or .jsonl with two or more of the columns accuracy, precision, "
            "recall, f1 and yes_ratio, in percent; optional are method, split and averaged."
        ),
    ],
    json: JsonFlag = False,
) -> None:
    """Check a published table of POPE for rows that no answers can have produced.

    On 1,500 yes- and 1,500 no-questions, accuracy, precision, recall, F1 and the share of yes
    depend on one another, and without sampling the three splits have the same recall. A row that
    contradicts this comes from other files, is an average (mark it with yes in the column
    averaged), or is an error. If there is such a row, the exit code is 1.

    For example:

      mmdecode evaluate published table.csv
    """
    from mmdecode.evaluation.vision.table_lint import check_table

    problems = check_table(table)
    if json:
        emit_json({"problems": problems})
    else:
        for problem in problems:
            print_line(problem)
        print_line(f"{len(problems)} problems" if problems else "no contradiction was found")
    if problems:
        raise typer.Exit(1)


COMMANDS = (pope, chair, mme, amber, spatial, published)


def _evaluate(
    task: str,
    *,
    context: typer.Context,
    model: str | None,
    output: Path | None,
    resume: bool,
    overwrite: bool,
    rescore: Path | None,
    resamples: int,
    seed: int,
    json: bool,
    parser: str | None = None,
    synonyms: Path | None = None,
    **asked: Any,
) -> None:
    """Runs the model or reads an earlier run, then writes the report and prints it."""
    from mmdecode.errors import OptionError
    from mmdecode.evaluation.report.plots import drawable
    from mmdecode.evaluation.vision.answers import parser_of
    from mmdecode.evaluation.vision.items import ITEMS
    from mmdecode.runs.files import claimed
    from mmdecode.runs.journal import refuse_taken

    if (model is None) == (rescore is None):
        raise OptionError(
            "no model; give --model, as llava-hf/llava-1.5-7b-hf, or --rescore for an earlier run"
            if model is None
            else "expected either --model, for a new run, or --rescore, for an earlier run"
        )
    if rescore is not None:
        refuse_without("--model", RUN_OPTIONS, context)
    if resume and output is None:
        raise OptionError("--resume continues the run in --out; give its folder with --out")
    if parser is not None:
        parser_of(parser)
    folder = output or rescore
    if folder is not None:
        drawable()
    with warnings_shown("default"), claimed(folder) if folder else contextlib.nullcontext():
        own = rescore is not None and folder is not None and folder.resolve() == rescore.resolve()
        if folder:
            refuse_taken(folder, ITEMS, resume or own, overwrite, resumable=bool(model))
        if rescore is not None:
            run = _recorded(rescore, task)
        else:
            assert model is not None
            run = _run(task, model, output, resume, overwrite, seed, synonyms=synonyms, **asked)
        report = _report(run, parser, {"resamples": resamples, "seed": seed})
        if own and folder and (folder / "summary.json").exists():
            console.print(f"replacing the report in {folder}; its rows stay", highlight=False)
        files = report.save(folder, overwrite) if folder else []
    failures = [item for item in report.recorded if item.error is not None]
    if json:
        failed = [{"id": i.id, "mode": i.mode, "seed": i.seed, "error": i.error} for i in failures]
        failed += [{"error": problem} for problem in run.left_out]
        emit_json(report.summary | {"failures": failed, "files": files})
    else:
        _show(report, files)
    _tell(run, failures, files)
    if failures or run.left_out:
        raise typer.Exit(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """Rows of a run, with its settings."""

    rows: list[Any]
    modes: list[Mode]
    settings: dict[str, Any]
    conditions: dict[str, Any]
    images: Any
    left_out: Sequence[str] = ()


def _run(
    task: str,
    model: str,
    output: Path | None,
    resume: bool,
    overwrite: bool,
    seed: int,
    *,
    data: list[str] | None,
    guide: list[str] | None,
    images: Path | None,
    sample: bool | None,
    seeds: int,
    controls: bool,
    limit: int | None,
    batch_size: int,
    prompt_cache: int,
    noise_by: str,
    max_new_tokens: int,
    warmup: int,
    device: str | None,
    device_map: str | None,
    dtype: str,
    quantize: str | None = None,
    part: str = "test",
    split: list[str] | None = None,
    prefix: str = "",
    prompt: str | None = None,
    synonyms: Path | None = None,
    suffix: str = "none",
    redraw: bool = True,
) -> _Run:
    """Decodes the questions in all modes."""
    from mmdecode.errors import OptionError
    from mmdecode.evaluation.vision.data import read_questions
    from mmdecode.evaluation.vision.items import YesNoItem
    from mmdecode.evaluation.vision.modes import modes_of
    from mmdecode.evaluation.vision.runs import Recorder
    from mmdecode.evaluation.vision.tasks.pope import SUFFIXES
    from mmdecode.runs.conditions import surroundings
    from mmdecode.vlm.loading import load

    if not data:
        raise OptionError("nothing to ask; give --data with 'zoo', a folder or a file")
    questions = read_questions(
        task,
        data,
        part=part,  # type: ignore[arg-type]
        images=images,
        splits=split or (),
        prefix=prefix,
        synonyms=None if synonyms is None else str(synonyms),
    ).limited(limit)
    if prompt is not None:
        asked = [dataclasses.replace(item, question=prompt) for item in questions.items]
        questions = dataclasses.replace(questions, items=asked)
    questions.check_images()
    modes = modes_of(
        guide or [],
        greedy=sample is not True,
        seeds=[] if sample is False else range(seed, seed + seeds),
        controls=controls,
        yes_no=isinstance(questions.items[0], YesNoItem),
    )
    if suffix not in SUFFIXES and not suffix[:1].isspace():
        suffix = f" {suffix}"
    options: dict[str, Any] = {
        "suffix": SUFFIXES.get(suffix, suffix),
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "redraw": redraw,
        "warmup": warmup,
    }
    if noise_by != "request":  # as before there was a choice
        options["noise_by"] = noise_by
    only_our_output()
    network, processor = load(model, device, dtype, device_map, quantize)
    recorder = Recorder(
        network,
        processor,
        questions.items,
        modes,
        questions.image,
        **options,
        prompt_cache=prompt_cache,
    )
    settings = {
        "task": questions.task,
        **surroundings(network),
        "model": model,
        "data": data,
        "part": part if questions.folder is None else None,
        "split": split or None,
        "files": questions.hashes,
        "images": None if questions.folder is None else str(questions.folder),
        "synonyms": questions.synonyms,
        "controls": controls,
        "prompt": recorder.prompt,
        **options,
        "limit": limit,
        "modes": [dataclasses.asdict(mode) for mode in modes],
        "notes": list(questions.warnings),
    }
    if questions.left_out:
        settings["rows_left_out"] = len(questions.left_out)
        settings["notes"].append(
            f"{len(questions.left_out)} rows of the data cannot be used and are left out"
        )
    load_average = settings.pop("load_average")
    rows = _decoded(recorder, questions, output, settings, resume, overwrite)
    return _Run(
        rows=rows,
        modes=modes,
        settings=settings,
        conditions={**settings, "load_average": load_average} | recorder.prompt_tokens,
        images=questions.report_images,
        left_out=questions.left_out,
    )


def _decoded(
    recorder: Recorder[Any],
    questions: Questions,
    output: Path | None,
    settings: dict[str, Any],
    resume: bool,
    overwrite: bool,
) -> list[Any]:
    """Decodes all modes; rows are appended to the output during the run."""
    from mmdecode.evaluation.vision.runs import journal_of
    from mmdecode.runs.crashes import InFlight, suspects_in
    from mmdecode.vlm.crashes import watched

    def noted(name: str, source: ImageSource) -> ImageSource:
        def read() -> Any:
            if journal and questions.folder is not None:
                journal.reading(str(questions.folder / name))
            return source.read()

        return dataclasses.replace(source, read=read)

    kind = type(questions.items[0])
    given = settings, resume, overwrite, questions.folder
    journal = journal_of(output, kind, *given) if output else None
    stopping = resumable(output, recorder.total, answered(journal))
    with stopping, progress_bar() as bar, contextlib.ExitStack() as stack:
        task = bar.add_task("asking", total=recorder.total)
        if journal and output:
            stack.callback(journal.close)
            reading = InFlight(output / READING, suspects_in([output / READING]))
            stack.enter_context(contextlib.closing(reading))
            recorder.image = lambda name: noted(name, watched(questions.image(name), reading))
            tell_changed(journal)
            bar.advance(task, answered(journal)())
        return recorder.run(journal, lambda row: bar.advance(task))


def _recorded(folder: Path, task: str) -> _Run:
    """Reads the rows of an earlier run.

    Raises:
        InputError: The run cannot be read.
        OptionError: The run is of another task.
    """
    from mmdecode.errors import InputError, OptionError
    from mmdecode.evaluation.vision.data import zoo_image
    from mmdecode.evaluation.vision.items import CaptionItem, ChoiceItem, YesNoItem, read_items
    from mmdecode.evaluation.vision.modes import Mode
    from mmdecode.runs.files import RUN

    try:
        settings = json_module.loads((folder / RUN).read_text(encoding="utf-8"))["settings"]
        modes = [
            Mode(**known | {name: tuple(known[name]) for name in ("seeds", "against")})
            for known in settings["modes"]
        ]
        own = settings["task"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / RUN} cannot be read; expected the folder of an earlier run"
        ) from error
    if own != task and (own, task) != ("vsr", "spatial"):
        raise OptionError(f"{folder} holds a run of {own}; rescore it with 'evaluate {own}'")
    kinds: dict[str, type[Item]] = {"chair": CaptionItem, "spatial": ChoiceItem}
    rows = read_items(folder, kinds.get(own, YesNoItem))
    order = {mode.name: number for number, mode in enumerate(modes)}
    rows = sorted((row for row in rows if row.mode in order), key=lambda row: order[row.mode])
    images = settings["images"] or zoo_image
    return _Run(rows=rows, modes=modes, settings=settings, conditions=settings, images=images)


def _report(run: _Run, parser: str | None, basis: dict[str, Any]) -> ItemReport[Any]:
    """Makes the report of the run's task."""
    from mmdecode.evaluation import CaptionReport, ChoiceReport, YesNoReport
    from mmdecode.evaluation.vision.data import vocabulary_of
    from mmdecode.evaluation.vision.modes import NONE, comparisons_of

    task = run.settings["task"]
    basis |= {
        "controls": [mode.name for mode in run.modes if mode.control or mode.guide == NONE],
        "conditions": run.conditions,
        "against": comparisons_of(run.modes),
        "images": run.images,
    }
    if task == "spatial":
        return ChoiceReport(run.rows, **basis)
    basis["baseline_controls"] = run.settings["controls"]
    if task == "chair":
        return CaptionReport(run.rows, vocabulary=vocabulary_of(run.settings["synonyms"]), **basis)
    return YesNoReport(run.rows, task=task, parser=parser or "leading", **basis)


def _show(report: ItemReport[Any], files: list[Path]) -> None:
    """Prints the verdict, the short table with its explanation, and the path of the full one."""
    for line in report.verdict():
        print_line(line)
    show_tables([report.brief()])
    print_line(report.about())
    where = f"in {files[1]}" if files else "printed with --json, and written with --out"
    compared = len(report.comparisons)
    print_line(f"all columns{f' and {compared} comparisons' if compared else ''} are {where}")


def _tell(run: _Run, failures: list[Any], files: list[Path]) -> None:
    """Prints files, notes, failures and limits on the use of the numbers."""
    for path in files[:4]:
        print_line(str(path), console, "bold")
    for note in run.settings["notes"]:
        print_line(note, console, "yellow")
    for item in failures[:SHOWN]:
        print_line(f"failed ({item.mode}): {item.id}: {item.error}", console, "red")
    if failures:
        console.print(f"{len(failures)} failed; they count as wrong", highlight=False)
    for problem in run.left_out[:SHOWN]:
        print_line(f"left out: {problem}", console, "red")
    if run.settings["limit"]:
        console.print(
            f"ONLY A PART WAS RUN (--limit {run.settings['limit']}): A SMOKE TEST, NOT A RESULT TO "
            "REPORT",
            style="bold yellow",
            highlight=False,
        )
