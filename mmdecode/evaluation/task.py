"""`Task`: what ``mmdecode evaluate NAME`` scores; the table of tasks, and tasks of one's own.

A task is data and functions: how its items are read, how they are decoded, and which report is made
of the rows. One runner (`mmdecode.cli.evaluate`) does the rest for all: files, resuming, progress,
failures, pages. A task of one's own is a Python file that defines ``TASK``, or an entry point in
the group ``mmdecode.tasks``.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import importlib.metadata
import json
import pkgutil
import runpy
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdecode.errors import InputError, MMDecodeError, OptionError, UnknownNameError
from mmdecode.runs.engines import LOCAL, TIME_LIMIT_S
from mmdecode.runs.files import RUN

if TYPE_CHECKING:
    from mmdecode.evaluation.report.report import Report
    from mmdecode.runs.rows import RowJournal

TASKS = {
    "wer": "mmdecode.evaluation.speech.task:WER",
    "silence": "mmdecode.evaluation.speech.silence_task:SILENCE",
    "nbest": "mmdecode.evaluation.nbest.task:NBEST",
    "pope": "mmdecode.evaluation.vision.benchmarks:POPE",
    "chair": "mmdecode.evaluation.vision.benchmarks:CHAIR",
    "mme": "mmdecode.evaluation.vision.benchmarks:MME",
    "amber": "mmdecode.evaluation.vision.benchmarks:AMBER",
    "spatial": "mmdecode.evaluation.vision.benchmarks:SPATIAL",
    "vsr": "mmdecode.evaluation.vision.tasks.vsr:TASK",
    "images": "mmdecode.evaluation.images.task:IMAGES",
}
"""Built-in tasks by name, as ``module:NAME``."""
RUNNING = ("output", "overwrite", "rescore")
"""Options that neither decode nor score."""
ENGINE: dict[str, Any] = {
    "engine": LOCAL,
    "workers": None,
    "time_limit_s": TIME_LIMIT_S,
    "gpus": None,
    "cpus": 1,
}
"""Options of every task that decodes: where it does, see `mmdecode.runs.engines.Engine`."""
GROUP = "mmdecode.tasks"
"""Group of entry points of other packages' tasks."""


@dataclass(kw_only=True)
class Run:
    """A run that is ready to start, or an earlier one whose rows have been read.

    Attributes:
        report: Makes the report of the rows.
        rows: Rows that are known; ``None``: `record` computes them.
        record: Computes the rows; takes the journal, or ``None``, and a function that is called
            with each new row. A row has an ``error``, which is ``None`` if it succeeded. The
            keyword ``items`` names a part of the items, whose rows it computes, mode by mode and
            in each mode in the order of the items; the keyword ``noted`` is a function that
            records the names of items being decoded, see `mmdecode.runs.items.Watch`.
        begin: Called before the first item is decoded, by one process.
        items: The items to decode, each to the same number of rows; empty: workers cannot share
            them.
        name: Returns the name of an item, which no other item has.
        failed: Returns the rows of an item, mode by mode, for an error message.
        journal: Opens the file of rows; takes the folder, and whether to resume and to overwrite.
        total: Number of rows.
        doing: Label of the progress bar.
        notes: Sentences on the data or the run that a reader should know.
        left_out: Error messages of rows of the data that cannot be used.
        closing: Context that is closed at the end of the run, for instance of a temporary folder.
    """

    report: Callable[[list[Any]], Report]
    rows: list[Any] | None = None
    record: Callable[..., list[Any]] | None = None
    begin: Callable[[], None] = lambda: None
    items: Sequence[Any] = ()
    name: Callable[[Any], str] = lambda item: str(item.id)
    failed: Callable[[Any, str], list[Any]] = lambda item, error: []
    journal: Callable[[Path, bool, bool], RowJournal[Any]] | None = None
    total: int = 0
    doing: str = "decoding"
    notes: Sequence[str] = ()
    left_out: Sequence[str] = ()
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


@dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """Base class of tasks.

    Attributes:
        name: Name on the command line.
        about: Help of the command; the first line is its summary.
        options: Default values of the command's options, by name in
            `mmdecode.cli.evaluate.OPTIONS`.
        helps: Help texts of options that have another meaning than usual.
        scoring: Names of the options that apply to an earlier run that is scored again, too.
        rows: Name of the file of rows in the output folder.
        failed: How failed items count, for the message.
        origin: Argument of `task_of` that gives the task; empty: not known.
    """

    name: str
    about: str
    options: Mapping[str, Any]
    helps: Mapping[str, str] = field(default_factory=dict)
    scoring: Sequence[str] = ("resamples", "seed")
    rows: str = "items.jsonl"
    failed: str = "they count as wrong"
    origin: str = ""

    def refuse(self, given: Mapping[str, Any]) -> None:
        """Refuses options that do not go together, before anything is read.

        Args:
            given: All options of the command, by name.

        Raises:
            OptionError: They do not go together.
        """
        if "rescore" in self.options:
            one_of(given, "model", "rescore")

    def decodes(self, given: Mapping[str, Any]) -> bool:
        """Whether a model decodes, so that the run can be resumed."""
        return not given.get("rescore")

    def needs(self, given: Mapping[str, Any]) -> dict[str, Collection[str]]:
        """Options that do nothing without another one, which is not given.

        Args:
            given: All options of the command, by name.

        Returns:
            Names of options, by the option that they need as on the command line.
        """
        if not given.get("rescore"):
            return {}
        return {"--model": set(self.options) - {"model", *RUNNING, *self.scoring}}

    @abc.abstractmethod
    def open(self, given: Mapping[str, Any]) -> Run:
        """Reads the data and loads the model.

        Args:
            given: All options of the command, by name.
        """

    def read(self, folder: Path, given: Mapping[str, Any]) -> Run:
        """Reads an earlier run, to score it again.

        Args:
            folder: Output folder of the run.
            given: All options of the command, by name.

        Raises:
            InputError: The folder is no output folder of a run.
            OptionError: The run is of another task.
        """
        raise NotImplementedError


def task_of(name: str) -> Task:
    """Returns a task by its name, or from a Python file of one's own.

    Args:
        name: Name in `TASKS`, of an entry point in `GROUP`, or the path of a file ``*.py``.

    Raises:
        UnknownNameError: There is no task of that name.
        InputError: The file cannot be run, or does not define ``TASK``.
    """
    if name in TASKS:
        found: Task = pkgutil.resolve_name(TASKS[name])
        return found
    if name.endswith(".py"):
        return _of_file(Path(name))
    others = {one.name: one for one in importlib.metadata.entry_points(group=GROUP)}
    if name not in others:
        raise UnknownNameError.of("task", name, [*TASKS, *others])
    loaded = _checked(others[name].load(), f"the entry point {name!r} of {GROUP}")
    return dataclasses.replace(loaded, origin=name)


def _of_file(path: Path) -> Task:
    """Runs a Python file and returns its ``TASK``."""
    with own_code(f"{path} cannot be run"):
        found = runpy.run_path(str(path))
    return dataclasses.replace(_checked(found.get("TASK"), str(path)), origin=str(path.absolute()))


def _checked(found: Any, where: str) -> Task:
    if not isinstance(found, Task):
        raise InputError(
            f"{where} gives {type(found).__name__}; expected TASK = a task, such as "
            "mmdecode.evaluation.YesNoTask(name=..., items=...)"
        )
    return found


@contextlib.contextmanager
def own_code(failed: str) -> Iterator[None]:
    """Context for code of a task of one's own: its errors become ours, with file and line.

    Args:
        failed: Beginning of the message.

    Raises:
        InputError: The code raised an error that is not ours.
    """
    try:
        yield
    except MMDecodeError:
        raise
    except Exception as error:
        libraries = {str(Path(__file__).parents[1]), *sysconfig.get_paths().values(), "<"}
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(tuple(libraries))]
        where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        raise InputError(f"{failed}: {type(error).__name__}: {error}{where}") from error


def settings_in(folder: Path) -> dict[str, Any]:
    """Reads the settings of an earlier run.

    Raises:
        InputError: The folder has none.
    """
    try:
        return dict(json.loads((folder / RUN).read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder / RUN} cannot be read; expected the folder of an earlier run"
        ) from error


def one_of(given: Mapping[str, Any], *names: str) -> None:
    """Refuses options unless exactly one of ``names`` is given.

    Raises:
        OptionError: None or several of them are given.
    """
    found = [f"--{name}" for name in names if given.get(name)]
    if len(found) != 1:
        listed = ", ".join(f"--{name}" for name in names[:-1]) + f" and --{names[-1]}"
        got = ", ".join(found) or "none of them"
        raise OptionError(f"expected one of {listed}, and got {got}")
