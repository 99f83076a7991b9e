"""``mmdecode evaluate TASK``: one runner for the tasks of `mmdecode.evaluation.task`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mmdecode.cli import flags
from mmdecode.cli.output import JsonFlag, emit_json, show_tables
from mmdecode.cli.shared import Group, completed
from mmdecode.evaluation.task import TASKS, Run, Task, task_of
from mmdecode.runs.console import console, only_our_output, print_line, progress_bar, warnings_shown
from mmdecode.runs.engines import LOCAL
from mmdecode.runs.work import resumable

if TYPE_CHECKING:
    from mmdecode.evaluation.report.report import Report
    from mmdecode.runs.rows import RowJournal

SHOWN = 5  # failures, and files, listed one by one

KINDS: dict[Any, str] = {
    str: "part prefix suffix parser normalizer modes classifier real device dtype",
    str | None: "model prompt scorer group points language task device_map",
    flags.Texts: "data guide draft split hypotheses speech methods corrector also",
    Path | None: "images synonyms recordings references prompts training output rescore",
    bool: "controls redraw split_hyphens segmented hallucinations punctuation timestamps fallback "
    "resume overwrite",
    bool | None: "sample only_scored",
    int: "seed",
    int | None: "top_k",
    list[int] | None: "class_id",
    float | None: "guidance temperature top_p",
    flags.AtLeast0: "warmup",
    flags.AtLeast1: "seeds batch_size resamples",
    flags.Limit: "limit max_new_tokens",
    flags.Bytes: "prompt_cache",
    flags.NoiseBy: "noise_by",
    flags.Rounding: "quantize",
    Annotated[int, typer.Option(min=2)]: "clips n",
    Annotated[int, typer.Option(min=99)]: "permutations",
    Annotated[float, typer.Option(min=0)]: "margin",
    Annotated[float, typer.Option(min=1)]: "seconds",
    Annotated[float, typer.Option(min=0, max=1)]: "train_share dev_share",
    Literal["silence", "zeros", "auto"]: "padding",
    flags.EngineName: "engine",
    flags.Workers: "workers",
    flags.Seconds: "time_limit_s",
    flags.GPUs: "gpus",
    flags.CPUs: "cpus",
}
"""Options by their type, one vocabulary over all tasks."""

OPTIONS = {name: kind for kind, names in KINDS.items() for name in names.split()}
"""Types of the options, by the name under which a task gets their value."""

HELP = """
    data: The task's data: a file or folder, 'zoo' for shipped questions, or zoo:NAME for
        shipped recordings; see above.
    model: The model, such as llava-hf/llava-1.5-7b-hf or openai/whisper-small: a folder, a Hub
        id, its short name or zoo:NAME.
    guide: A guide, as name or name:key=value,...; 'mmdecode methods guide' lists them. The
        plain model ('none') is always included. Repeat it for more.
    draft: A drafter, as name or name:key=value,...; it is compared with decoding without a
        draft. Repeat it for more.
    images: Folder of the images.
    part: Part of the zoo's sets: development to tune on, test to report.
    split: POPE's random, popular or adversarial; default: all. Repeat for more.
    prefix: First characters of the files' names, if --data is a folder.
    prompt: The instruction for the model; default: the data's own.
    synonyms: File with a line 'NAME, SYNONYM, ...' per object; default: COCO's.
    sample (--sample/--greedy): Only sample, or only decode greedily; default: both.
    seeds: Number of seeds of each sampled mode.
    controls (--controls/--no-controls): Also run controls, which a good guide has to beat:
        plain decoding (greedy and, with sampling, sampled), with sampling a plausibility cut
        alone and a matched temperature; for yes/no questions an instruction to answer yes, the
        flip of answers with a small margin, and a constant shift of the margin.
    suffix: Appended to each question: none, one-word, short, or any other text.
    parser: Rule that parses answers: leading, original, vcd, lmms, vlmevalkit or mme.
    redraw (--redraw/--no-redraw): Sample the yes/no answers of all seeds from the logits of one
        forward pass, unless the guide is random; or decode every seed.
    hypotheses: Score these transcripts instead of a model: [NAME=]FILE, as .jsonl, .csv, .tsv
        or .trn, or a folder of .txt. Without --data, FILE must be a result file of the Open ASR
        leaderboard, which contains references. Repeat it for more.
    normalizer: Text normaliser: none, basic, whisper (English) or leaderboard.
    scorer: How words are aligned: plain, merge (compounds match their parts) or sclite;
        default: merge with the leaderboard's normaliser, else plain.
    only_scored (--only-scored/--all-references): Leave out recordings without words in the
        reference, as the leaderboard does; default with its normaliser.
    group: Manifest column that is the unit of the bootstrap; default: speaker, if known.
    margin: Tolerated loss (non-inferiority margin), in WER points.
    points: Also compute PIER, the error rate of chosen words: tags (<tag ...> spans in
        references) or a script, such as latin; default: tags, if references have any.
    split_hyphens: For PIER, split words at hyphens.
    segmented: Texts in Japanese, Chinese, Thai and the like are split into words by spaces
        already. Without this option their characters are scored.
    hallucinations: Also count hallucinations: words on non-speech, runs of insertions,
        repetition.
    punctuation: Also score case, and , . ? ! after aligned words.
    fallback (--fallback/--no-fallback): Decode low-confidence windows again at higher
        temperatures, as Whisper does.
    speech: Speech to measure word errors on: a manifest with texts, zoo (shipped clips, clean
        and with noise), or none; default: zoo. Repeat it for more sets.
    recordings: Manifest of your own recordings without speech, added to the clips.
    clips: Clips of each kind of sound and level.
    seconds: Length of each clip, in seconds.
    padding: Padding of the last window; openai/whisper pads with silence.
    references: Manifest with the reference texts of lists that have none.
    methods: Methods, separated by commas: mbr, mbr+scores (minimum Bayes risk), table (learned
        replacements), lm:MODEL, lm-total:MODEL, lm+scores:MODEL (language model scores). The
        first hypotheses (1best) are always included. Repeat it for more.
    corrector: A generative corrector, causal or seq2seq, such as google/flan-t5-base: a folder,
        a Hub id, its short name or zoo:NAME. Repeat it for more.
    train_share: Share of the lists that a corrector was trained on; not tested.
    dev_share: Share of the lists to fit settings on; not tested.
    n (--count, -n): Images of each mode.
    modes: Ways to sample, separated by commas: ar (or plain), exact, fast, relaxed. Plain
        decoding is always included, twice: with --seed, and with another seed.
    also: Another mode, as 'DRAFTER + ACCEPTANCE RULE', for example 'jacobi:window=16 +
        lantern:delta=0.1'. Repeat it for more.
    class_id: A class to generate; default: all, in turn. Repeat it for more.
    prompts: For text-to-image models: a file with one prompt per line.
    guidance: Scale s of classifier-free guidance; 1: off; default: the model's.
    temperature: Sampling temperature; default: the model's.
    top_k: Top-k filter; 0: off; default: the model's.
    top_p: Top-p filter; 1: off; default: the model's.
    classifier: Classifier of the images: a folder in timm's format, zoo:NAME, none, or auto:
        zoo:scene-classifier for zoo:llamagen-scenes, else none.
    real: Images that the model was not trained on: a folder, scenes (rendered), none, or auto:
        scenes for zoo:llamagen-scenes, else none.
    training: Folder of the model's training images, to detect memorised samples.
    permutations: Permutations of images in each two-sample test.
    batch_size: Items decoded at once.
    warmup: Untimed runs of the first batch of each mode.
    limit: Use only this many items, for a smoke test.
    output (--out): Folder for rows, tables, figures and HTML page.
    rescore: Folder of an earlier run: score its rows again.
    resamples: Number of bootstrap samples.
    seed: First seed of sampling, and seed of guides and of every bootstrap.
"""
"""Help of the options, unless a task has another one; see `mmdecode.cli.flags.documented`."""


class Tasks(Group):
    """The built-in tasks, and those of one's own: a file ``*.py`` or an entry point."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds a task by name."""
        name = args[0]
        if name not in TASKS and not ctx.resilient_parsing and not name.startswith("-"):
            made = flags.as_command(command_of(task_of(name)), name)
            return name, completed(made), args[1:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Tasks,
    help="Score models on speech or images, or transcripts made elsewhere.\n\nTASK is one of those "
    "below, or a Python file that defines TASK.",
    add_completion=False,
)


def command_of(task: Task) -> Callable[..., None]:
    """Returns the command of a task, whose options are those that the task takes."""

    def command(context: typer.Context, **given: Any) -> None:
        _evaluate(task, context, given)

    made = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    parameters = [made("context", annotation=typer.Context)]
    for name, default in task.options.items():
        given = inspect.Parameter.empty if default is ... else default
        parameters.append(made(name, default=given, annotation=OPTIONS[name]))
    parameters.append(made("json", default=False, annotation=JsonFlag))
    helps = "".join(f"    {name}: {text}\n" for name, text in task.helps.items())
    about = inspect.cleandoc(task.about or f"Task {task.name}.")
    command.__doc__ = f"{about}\n\nOptions:{HELP}{helps}"
    return flags.documented(flags.with_parameters(command, parameters))


for _name in TASKS:
    app.command(_name)(command_of(task_of(_name)))


def _evaluate(task: Task, context: typer.Context, given: dict[str, Any]) -> None:
    """Runs a task or reads an earlier run, then writes the report and prints it."""
    from mmdecode.evaluation.runner import refuse, run_task

    refuse(task, given)
    for needed, names in task.needs(given).items():
        flags.refuse_without(needed, names, context)
    only_our_output()
    with warnings_shown("default"):
        run, report, files = run_task(task, given, partial(_record, given))
    failures = report.failures()
    if given.get("json"):
        left_out = [{"error": problem} for problem in run.left_out]
        emit_json(report.summary | {"failures": [*failures, *left_out], "files": files})
    else:
        _show(report, files)
    _tell(task, run, failures, files, report.conditions.get("limit"))
    if failures or run.left_out:
        raise typer.Exit(1)


def _record(given: Mapping[str, Any], run: Run, journal: RowJournal[Any] | None) -> list[Any]:
    """Computes the rows of a run, with a bar."""
    assert run.record is not None
    output = given.get("output")

    def done() -> int:
        return sum(row.error is None for row in journal.rows.values()) if journal else 0

    if journal and journal.changed:
        text = f"{len(journal.changed)} changed since and done again"
        print_line(text, console, "yellow")
    if given.get("engine", LOCAL) != LOCAL:  # which has a bar of its own
        return run.record(journal, lambda row: None)
    with resumable(output, lambda: (done(), run.total)), progress_bar() as bar:
        task = bar.add_task(run.doing, total=run.total, completed=done())
        return run.record(journal, lambda row: bar.advance(task))


def _show(report: Report, files: Sequence[Path]) -> None:
    """Prints the verdict, the short tables with their explanation, and where the full ones are."""
    for line in report.verdict():
        print_line(line)
    show_tables(report.brief())
    print_line(report.about())
    compared = len(report.comparisons)
    if not report.differences():
        for found in report.comparisons:
            print_line(str(found))
    where = f"in {files[1]}" if files else "printed with --json, and written with --out"
    also = f" and {compared} comparison{'s' * (compared > 1)}" if compared else ""
    print_line(f"all columns{also} are {where}")


def _tell(
    task: Task,
    run: Run,
    failures: Sequence[Mapping[str, Any]],
    files: Sequence[Path],
    limit: int | None,
) -> None:
    """Prints files, notes, failures and limits on the use of the numbers."""
    if limit:
        print_line(f"--limit {limit}: a smoke test, not a result to report", console, "yellow")
    for path in files[:SHOWN]:
        print_line(str(path), console, "bold")
    for note in run.notes:
        print_line(note, console, "yellow")
    for one in failures[:SHOWN]:
        mode = one.get("mode") or one.get("method")
        named = ": ".join(str(one[key]) for key in ("data", "id", "condition") if key in one)
        print_line(f"failed ({mode}): {named}: {one['error']}", console, "red")
    if failures:
        what = f"; {task.failed}" if task.failed else ""
        print_line(f"{len(failures)} failed{what}", console)
    for problem in run.left_out[:SHOWN]:
        print_line(f"left out: {problem}", console, "red")
