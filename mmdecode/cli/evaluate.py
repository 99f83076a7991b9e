"""``mmdecode evaluate TASK``: one runner for the tasks of `mmdecode.evaluation.task`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmdecode.cli.evaluate_options import OPTIONS, with_help
from mmdecode.cli.flags import refuse_without
from mmdecode.cli.models import with_models
from mmdecode.cli.output import JsonFlag, emit_json, show_tables
from mmdecode.cli.progress import answered, progress_bar, resumable, tell_changed
from mmdecode.cli.shared import Group, with_devices, with_shared
from mmdecode.evaluation.task import TASKS, Run, Task, task_of
from mmdecode.runs.console import console, only_our_output, print_line, warnings_shown

if TYPE_CHECKING:
    from mmdecode.evaluation.report.report import Report
    from mmdecode.runs.rows import RowJournal

ABOUT = "Score models on speech or images, or transcripts made elsewhere."
SHOWN = 5  # failures, and files, listed one by one


class Tasks(Group):
    """The built-in tasks, and those of one's own: a file ``*.py`` or an entry point."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Finds a task by name."""
        name = args[0]
        if name not in TASKS and not ctx.resilient_parsing and not name.startswith("-"):
            single = typer.Typer(add_completion=False)
            single.command(name)(command_of(task_of(name)))
            made = with_devices(with_models(typer.main.get_command(single)))
            return name, with_shared(made), args[1:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Tasks,
    help=f"{ABOUT}\n\nTASK is one of those below, or a Python file that defines TASK.",
    add_completion=False,
)


@app.callback()
def _tasks() -> None:
    """Score models on speech or images, or transcripts made elsewhere."""


def command_of(task: Task) -> Callable[..., None]:
    """Returns the command of a task, whose options are those that the task takes."""
    parameters = [_parameter("context", typer.Context, ...)]
    for name, default in task.options.items():
        option = OPTIONS[name]
        if name in task.helps:
            option = with_help(option, task.helps[name])
        parameters.append(_parameter(name, option, default))
    parameters.append(_parameter("json", JsonFlag, False))

    def command(context: typer.Context, **given: Any) -> None:
        _evaluate(task, context, given)

    command.__doc__ = task.about or f"Task {task.name}."
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kept = inspect.Parameter.empty if default is ... else default
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=kept, annotation=annotation)


for _name in TASKS:
    app.command(_name)(command_of(task_of(_name)))


def _evaluate(task: Task, context: typer.Context, given: dict[str, Any]) -> None:
    """Runs a task or reads an earlier run, then writes the report and prints it."""
    from mmdecode.evaluation.runner import refuse, run_task

    refuse(task, given)
    for needed, names in task.needs(given).items():
        refuse_without(needed, names, context)
    only_our_output()
    with warnings_shown("default"):
        run, report, files = run_task(task, given, partial(_record, given.get("output")))
    failures = report.failures()
    if given.get("json"):
        left_out = [{"error": problem} for problem in run.left_out]
        emit_json(report.summary | {"failures": [*failures, *left_out], "files": files})
    else:
        _show(report, files)
    _tell(task, run, failures, files, report.conditions.get("limit"))
    if failures or run.left_out:
        raise typer.Exit(1)


def _record(output: Path | None, run: Run, journal: RowJournal[Any] | None) -> list[Any]:
    """Computes the rows of a run, with a bar."""
    assert run.record is not None
    done = answered(journal)
    with resumable(output, run.total, done), progress_bar() as bar:
        if journal:
            tell_changed(journal)
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
