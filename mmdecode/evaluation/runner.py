"""`evaluate`: runs a task and returns its report; ``mmdecode evaluate`` prints it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.errors import OptionError, UnknownNameError
from mmdecode.evaluation.report.plots import drawable
from mmdecode.evaluation.task import Run, Task, task_of
from mmdecode.runs.console import console, print_line
from mmdecode.runs.engines import LOCAL, engine_of
from mmdecode.runs.files import claimed
from mmdecode.runs.rows import RowJournal, refuse_taken

if TYPE_CHECKING:
    from mmdecode.evaluation.report.report import Report

LISTS = (
    *("also", "class_id", "corrector", "data", "draft", "guide", "hypotheses", "methods"),
    *("speech", "split"),
)
"""Options with several values; a single one need not stand in a list."""
PATHS = (
    *("images", "output", "prompts", "recordings", "references", "rescore", "synonyms"),
    "training",
)


def evaluate(
    task: Task | str, *, progress: Callable[[Any], None] = lambda row: None, **options: Any
) -> Report:
    """Runs a task, as ``mmdecode evaluate`` does, and returns its report.

    Args:
        task: A task; or its name, such as ``pope`` or ``wer``, or the path of a Python file that
            defines ``TASK``.
        progress: Called with each new row.
        **options: Options of the task, see `Task.options`; the command line has the same ones.
            With ``output``, rows and report are written to that folder, and ``resume=True`` goes
            on with the rows that are there. With ``engine="processes"``, workers compute the rows,
            while this process keeps the model for the report.

    Raises:
        UnknownNameError: There is no task of that name, or the task has no such option.
        OptionError: The options do not go together.
        InputError: The data or the folder cannot be read or written.
    """
    found = task if isinstance(task, Task) else task_of(task)
    for name in options:
        if name not in found.options:
            raise UnknownNameError.of(f"option of {found.name}", name, found.options)
    given = {**found.options, **{name: _as_option(name, options[name]) for name in options}}
    if not isinstance(given.get("model"), str | None):
        raise OptionError(
            f"model is a {type(given['model']).__name__}; expected a folder, a Hub id or zoo:NAME, "
            "since evaluate loads the model: save yours with save_pretrained and give its folder"
        )
    refuse(found, given)

    def record(run: Run, journal: RowJournal[Any] | None) -> list[Any]:
        assert run.record is not None
        return run.record(journal, progress)

    return run_task(found, given, record)[1]


def refuse(task: Task, given: Mapping[str, Any]) -> None:
    """Refuses options that do not go together, before anything is read.

    Args:
        task: The task.
        given: All options of the task, by name.

    Raises:
        OptionError: They do not go together.
    """
    task.refuse(given)
    if given["resume"] and given.get("output") is None:
        raise OptionError("--resume continues what a run wrote to --out; give that folder")
    engine = engine_of(given)
    if engine.name != LOCAL and given.get("output") is None and task.decodes(given):
        raise OptionError(f"--engine {engine.name} writes rows to a folder; give --out")


def run_task(
    task: Task,
    given: Mapping[str, Any],
    record: Callable[[Run, RowJournal[Any] | None], list[Any]],
) -> tuple[Run, Report, list[Path]]:
    """Runs a task or reads an earlier run; returns run, report and the files of the report.

    Args:
        task: The task.
        given: All options of the task, by name, which `refuse` accepts.
        record: Computes the rows of a run, and appends them to the journal, if there is one.

    Raises:
        OptionError: The folder holds other results, or the options do not fit the data.
        InputError: The data or the folder cannot be read or written.
    """
    output, rescore = given.get("output"), given.get("rescore")
    resume, overwrite = given["resume"], given["overwrite"]
    folder = output or rescore
    with contextlib.ExitStack() as stack:
        own = rescore is not None and rescore.resolve() == Path(folder or "").resolve()
        if folder is not None:
            drawable()
            stack.enter_context(claimed(folder))
            refuse_taken(folder, task.rows, resume or own, overwrite, resumable=task.decodes(given))
        run = task.open(given) if rescore is None else task.read(rescore, given)
        stack.enter_context(run.closing)
        rows = run.rows
        if rows is None:
            assert run.journal is not None
            journal = run.journal(output, resume, overwrite) if output else None
            with contextlib.closing(journal) if journal else contextlib.nullcontext():
                if journal:
                    run = _shared(task, given, run, journal)
                run.begin()
                rows = record(run, journal)
        report = run.report(rows)
        if own and folder and (folder / "summary.json").exists():
            print_line(f"replacing the report in {folder}; its rows stay", console)
        return run, report, report.save(folder, overwrite) if folder else []


def _shared(task: Task, given: Mapping[str, Any], run: Run, journal: RowJournal[Any]) -> Run:
    """A run whose rows workers compute, if they are asked for; takes over what they have written.

    Raises:
        OptionError: Workers cannot share the run.
    """
    from mmdecode.evaluation.by_workers import FOLDER, SharedRun, loader

    name = given.get("engine", LOCAL)
    if name != LOCAL and run.total and not run.items:
        raise OptionError(f"workers cannot share {task.name}, whose run has no items")
    if not run.items or (name == LOCAL and not (journal.folder / FOLDER).exists()):
        return run
    shared = SharedRun(run, journal, given.get("batch_size", 1), given["resume"])
    shared.take_over(go_on=name != LOCAL)
    if name == LOCAL:
        return run
    load, engine = loader(task, given), engine_of(given)
    return replace(run, record=lambda _, progress: shared.record(load, engine, progress))


def _as_option(name: str, value: Any) -> Any:
    """A value as the command line would give it."""
    if name in LISTS and value is not None:
        values = [value] if isinstance(value, str | int | os.PathLike) else list(value)
        return [os.fspath(one) if isinstance(one, os.PathLike) else one for one in values]
    if name == "model" and isinstance(value, os.PathLike):
        return os.fspath(value)
    return Path(value) if name in PATHS and value is not None else value
