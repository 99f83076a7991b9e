"""Rows of an evaluation that workers compute, see `mmdecode.runs.engines.Engine`.

Each worker opens the task for itself and writes the rows of its items into a folder in the output
folder, which is removed at the end, when all rows are in the file of rows in the order in which one
process writes them. Rows are those of one process, but without times.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

from mmdecode.engine.stats import Stats
from mmdecode.errors import InputError
from mmdecode.evaluation.task import TASKS, Run, Task, task_of
from mmdecode.runs.console import console, only_our_output, print_line
from mmdecode.runs.engines import LOCAL, Engine
from mmdecode.runs.files import write_file
from mmdecode.runs.items import Failed
from mmdecode.runs.journal import Journal
from mmdecode.runs.lines import Lines, written_in
from mmdecode.runs.rows import RowJournal
from mmdecode.runs.tables import rows_text
from mmdecode.runs.units import Prepared, Unit
from mmdecode.runs.work import run as run_folder

FOLDER = "rows-of-workers"
"""Name of the folder of the workers' rows, in the output folder."""
TIMES = ("seconds", "time", "batch")
"""Fields of rows that hold times."""
FOR_WORKERS = {"engine": LOCAL, "workers": None, "warmup": 0, "classifier": "none"}
"""Values of options in workers, which measure no times and make no report."""


@dataclass(frozen=True)
class Piece:
    """An item of a run for a worker, which has the item itself when it has opened the task.

    Attributes:
        id: Name of the item.
        path: Its input file; ``None``: it has none.
    """

    id: str
    path: str | None = None


@dataclass
class Opened:
    """A task that a worker has opened.

    Attributes:
        run: The run, with its model.
        stats: Counters, which stay empty.
    """

    run: Run
    stats: Stats = field(default_factory=Stats)

    @cached_property
    def _items(self) -> dict[str, Any]:
        return {self.run.name(item): item for item in self.run.items}

    def items(self, pieces: Sequence[Piece]) -> list[Any]:
        """Returns items of the run.

        Raises:
            InputError: The data that the worker has read do not have one.
        """
        missing = [piece.id for piece in pieces if piece.id not in self._items]
        if missing:
            raise InputError(
                f"the data have changed since the run began: a worker does not find {missing[0]}"
            )
        return [self._items[piece.id] for piece in pieces]


def opened(task: Task | str, given: Mapping[str, Any]) -> Opened:
    """Opens a task in a worker.

    Args:
        task: The task, or the argument of `task_of` that gives it.
        given: All options of the task, by name.
    """
    console.errors_only = True  # the parent process has printed the same lines
    only_our_output()
    found = task_of(task) if isinstance(task, str) else task
    return Opened(found.open(given))


def loader(task: Task, given: Mapping[str, Any]) -> Callable[[], Opened]:
    """Returns a function that opens a task in a worker, which can be pickled if the task can.

    A built-in task is looked up again, and one of a file or an entry point is read again.
    """
    named = task.name in TASKS and task_of(task.name) is task
    where = task.name if named else task.origin or task
    own = {name: value for name, value in FOR_WORKERS.items() if name in given}
    return partial(opened, where, {**given, **own})


class RowsFolder(Journal[Piece]):
    """Rows in a folder, a line for each item with the rows of all modes.

    Args:
        folder: The folder.
        settings: Settings that may change a row.
        pieces: The items.
        complete: Names of the items that have all rows elsewhere; none of them is computed, but
            they stay in their units of work, so that the others are decoded in the same batches.
        **how: See `Journal`.
    """

    what, again = "the rows of an item", "decodes that item again"
    fields, measure = ("rows",), "rows"

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        pieces: Sequence[Piece],
        complete: Collection[str] = (),
        **how: Any,
    ) -> None:
        super().__init__(folder, settings, pieces, **how)
        self.shown = folder.parent
        self._complete = set(complete)

    def inputs(self, item: Piece) -> list[str]:
        """The input file."""
        return [] if item.path is None else [item.path]

    def open(self, prepared: Prepared, rank: str | None = None) -> Self:
        """Opens the rows of one process; see `Journal.open`."""
        super().open(prepared, rank)
        self.done |= self._complete
        return self

    def decode(
        self, model: Opened, unit: Unit[Piece], meter: Callable[[float], None]
    ) -> Iterator[dict[str, Any]]:
        """Computes the rows of a unit; see `Journal.decode`."""
        for path in (path for piece in unit.items for path in self.inputs(piece)):
            self.note_read(path)
        assert model.run.record is not None
        # all names, while a batch is prepared; then those of the batch
        with self.batches.decoding([piece.id for piece in unit.items]):
            rows = model.run.record(
                None,
                lambda row: meter(1),
                items=model.items(unit.items),
                noted=self.batches.decoding,
            )
        for index, piece in enumerate(unit.items):
            own = rows[index :: len(unit.items)]
            # as text, since the numbers of a line are rounded
            line = {"id": piece.id, "rows": rows_text(_untimed(row.as_dict()) for row in own)}
            if errors := [row.error for row in own if row.error is not None]:
                line["error"] = errors[0]
            yield line

    def id_of_result(self, result: Mapping[str, Any]) -> str:
        """The name of the item."""
        return str(result["id"])

    def add(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Appends the rows of an item; see `Journal.add`. Returns the line without its rows."""
        piece = self.given[result["id"]]
        line = dict(result)
        for path in self.inputs(piece):
            line |= self.sources.as_read(path) or {}
        self.append(piece, line)
        return {name: value for name, value in line.items() if name != "rows"}

    def crashed(self, item: Piece, failed: Failed) -> dict[str, Any]:
        """A line without rows, which `results` fills in; see `Journal.crashed`."""
        return {"id": item.id, "rows": "", "error": failed.error}

    def results(self, run: Run, journal: RowJournal[Any], *, again: bool) -> list[Any]:
        """Reads the rows; notes in a journal which input files they were computed from.

        Args:
            run: The run.
            journal: File of the rows of the run.
            again: Whether the run goes on: rows of items that ended their processes, or whose input
                file has changed since, are left out.
        """
        found: list[str] = []
        failed: list[Any] = []
        items = {run.name(item): item for item in run.items}
        with closing(Lines(written_in(self.folder), self)) as lines:
            written = list(zip(lines, map(json.loads, lines.read(lines)), strict=True))
        for name, line in written:
            piece = self.given.get(name)
            if piece is None or (again and self.sources.any_changed(self.inputs(piece), line)):
                continue
            if piece.path is not None:
                journal.noted.note(piece.path, _content(line))
            found.append(line["rows"])
            if not (line["rows"] or again):
                failed += run.failed(items[name], line["error"])
        path = self.folder / journal.path.name
        write_file(path, "".join(found))
        return [*journal.read(path), *failed]


def _untimed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if name in TIMES else value for name, value in row.items()}


def _content(line: Mapping[str, Any]) -> dict[str, Any] | None:
    return {name: line[name] for name in ("size", "digest")} if "digest" in line else None


class SharedRun:
    """A run whose rows workers compute, or did before it was interrupted.

    Args:
        run: The run.
        journal: File of its rows.
        batch_size: Number of items decoded at once.
        resume: Whether to continue what workers have written; otherwise it is removed.
    """

    def __init__(self, run: Run, journal: RowJournal[Any], batch_size: int, resume: bool) -> None:
        self._run, self._journal, self._batch_size = run, journal, batch_size
        self._path = journal.folder / FOLDER
        self._keys: dict[str, list[Any]] = {}
        self._pieces: list[Piece] = []
        for item in run.items:
            rows = run.failed(item, "")
            piece = Piece(run.name(item), journal.input_of(rows[0]))
            self._pieces.append(piece)
            self._keys[piece.id] = [journal.key(row) for row in rows]
        if not resume:
            self.remove()

    def take_over(self, *, go_on: bool) -> None:
        """Adds the rows that workers of an interrupted run have written to the journal.

        Args:
            go_on: Whether workers go on; otherwise their folder is removed.
        """
        if not self._path.exists():
            return
        folder = self._folder()
        if not go_on:
            folder.merge()  # waits for workers of a killed process
        for row in folder.results(self._run, self._journal, again=True):
            if row.error is None and not self._is_known(self._journal.key(row)):
                self._journal.add(row)
        if not go_on:
            self.remove()

    def record(
        self, load: Callable[[], Opened], engine: Engine, progress: Callable[[Any], None]
    ) -> list[Any]:
        """Computes the rows that the journal lacks, and writes all rows at the end.

        Returns the rows mode by mode.

        Args:
            load: Opens the task in a worker.
            engine: Where the workers are.
            progress: Called with each new row, at the end.
        """
        journal = self._journal
        ids = {name for name, keys in self._keys.items() if all(map(self._is_known, keys))}
        if len(ids) < len(self._pieces):
            line = "times are left out, since workers share the machine"
            print_line(line, console)
            journal.begin_writing()
            folder = self._folder(ids)
            run_folder(folder, load, engine=engine)
            for row in folder.results(self._run, journal, again=False):
                if not self._is_known(key := journal.key(row)):
                    journal.rows[key] = row
                    progress(row)
        columns = zip(*self._keys.values(), strict=True)
        keys = dict.fromkeys(itertools.chain.from_iterable(columns))
        rows = [journal.rows[key] for key in keys]
        journal.finish_with([*_without(journal.rows, keys), *rows])
        self.remove()
        return rows

    def remove(self) -> None:
        """Removes the folder of the workers' rows."""
        if self._path.exists():
            shutil.rmtree(self._path)

    def _folder(self, complete: Collection[str] = ()) -> RowsFolder:
        resume = self._path.exists()
        how = {"batch_size": self._batch_size, "resume": resume}
        return RowsFolder(self._path, self._journal.settings, self._pieces, complete, **how)

    def _is_known(self, key: Any) -> bool:
        row = self._journal.rows.get(key)
        return row is not None and row.error is None


def _without(rows: Mapping[Any, Any], keys: Collection[Any]) -> Iterable[Any]:
    """Rows under other keys that did not fail, such as those of a model not asked for now."""
    return (row for key, row in rows.items() if key not in keys and row.error is None)
