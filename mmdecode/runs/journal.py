"""`Journal`: results of a job in a folder, so that the job can be interrupted and continued.

The files of an item are written first, each under a temporary name and then renamed; then a line of
JSON about the item is appended to ``results.jsonl`` and flushed. So an item with a line is
complete, and an item without one is computed again. ``run.json`` holds the settings, and the work:
before anything runs, the whole input is cut into units of items that are decoded together, in
order. A unit that was interrupted is computed again as a whole, and lines that are there stay; new
inputs become new units. So the results do not depend on interruptions, nor on the number of
processes. Each of several processes appends its lines to a file of its own, ``parts/rank-N.jsonl``;
at the start and end of a run all lines are merged, one per item in the order of the input.

A run is continued only on request, only with the same settings (`mmdecode.runs.files`), and only if
each id still belongs to the same item. Items that failed, and items whose input files have changed,
are computed again.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, Self

from mmdecode.errors import OptionError
from mmdecode.runs.changes import Inputs
from mmdecode.runs.crashes import (
    DECODING,
    READING,
    Batches,
    InFlight,
    ended_over,
    note_of,
    notes_in,
    suspects_in,
)
from mmdecode.runs.files import (
    append_line,
    check_settings,
    complete_lines,
    explained,
    is_own,
    note_settings,
    open_append,
    refuse_foreign,
    remove_partial,
    run_of,
    to_json,
    write_file,
)
from mmdecode.runs.items import Failed, Watch
from mmdecode.runs.lines import PARTS, RESULTS, Lines, drop_torn, ended, lines_in, state_of
from mmdecode.runs.locks import lock
from mmdecode.runs.units import Item, Prepared, Unit, cut, unfinished
from mmdecode.runs.work import Tally


class Journal(Generic[Item]):
    """Base class of results in a folder; each kind of job says how its items are named and written.

    `prepare` is called by the first process, `open` by each process, `finish` by the last one when
    all have closed the journal.

    Args:
        folder: Folder of the results.
        settings: Settings that may change a result.
        items: The input, in order; the same for all processes.
        batch_size: Number of items decoded at once, for new units of work.
        resume: Whether to continue existing results.
        overwrite: Whether files that mmdecode did not write may be replaced, and, without
            ``resume``, earlier results; these are kept until the first new result.
        tree: Whether files are also in subfolders.
        command: Words of the command line, to be run again by ``mmdecode results --retry``.

    Attributes:
        resume: Whether to continue existing results.
        shown: Folder that messages name.
        done: Ids of the items that have a result.
        changed: Ids of items whose input files have changed; they are computed again.
        reading: Note on disk of the file that is being read, to be found after a crash.
        batches: Note on disk of the items that are being decoded, to be found after a crash.
        watch: Watch over the run, which keeps ``batches``.
    """

    what: ClassVar[str] = "a result"
    """A result in words, for messages."""
    other: ClassVar[str] = "another item"
    again: ClassVar[str] = "computes that item again"
    fields: ClassVar[Sequence[str]] = ()
    """Fields that every line has, besides its id."""
    signs: ClassVar[Sequence[str]] = (PARTS,)
    """Names of further files that show that a folder holds results."""
    needs_files: ClassVar[bool] = False
    """Whether an item with a line whose files have vanished is computed again."""
    doing: ClassVar[str] = "decoding"
    """Label of the progress bar."""
    measure: ClassVar[str] = ""
    """Unit of what `decode` measures besides items, such as tokens."""
    tally: ClassVar[type[Tally]] = Tally
    shares: int = 1
    """Number of processes among which new work is shared."""
    besides: Sequence[Path] = ()
    """Files that will be written besides those of items."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        items: Sequence[Item] = (),
        *,
        batch_size: int = 1,
        resume: bool = False,
        overwrite: bool = False,
        tree: bool = False,
        command: Sequence[str] = (),
    ) -> None:
        self.command = command
        self.folder, self.path, self.shown = folder, folder / RESULTS, folder
        self.items, self.batch_size = items, batch_size
        self._settings, self.resume, self._overwrite = settings, resume, overwrite
        self._tree, self._replaced = tree, False
        self.sources = Inputs(folder)
        self._before: dict[str, Any] = {}
        self._seen, self._merged = False, (0, 0, 0)
        self.done: set[str] = set()
        self.changed: set[str] = set()
        self._failed: dict[str, bytes] = {}
        self._file: BinaryIO | None = None
        self.opened = False

    def __getstate__(self) -> dict[str, Any]:
        """State of the journal as if it were not open yet, for another process."""
        opened = ("reading", "batches", "watch", "given", "_noted", "_work")
        state = {name: value for name, value in vars(self).items() if name not in opened}
        paths = {"folder": self.folder.absolute(), "path": self.path.absolute()}
        state |= paths | {"_before": {}, "_seen": False, "done": set(), "_failed": {}}
        return state | {"_file": None, "opened": False}

    @functools.cached_property
    def given(self) -> dict[str, Item]:
        """The items by id, in order."""
        return {self.id_of(item): item for item in self.items}

    @functools.cached_property
    def _noted(self) -> dict[str, str]:
        """Ids of the items by their names in notes."""
        return {self.noted_as(item): name for name, item in self.given.items()}

    def id_of(self, item: Item) -> str:
        """Id of an item, the same in every run."""
        return str(item.id)

    def decode(self, model: Any, unit: Unit[Item], meter: Callable[[float], None]) -> Iterator[Any]:
        """Yields the result of each item of a unit, in any order, failures included.

        Args:
            model: The loaded model.
            unit: The unit.
            meter: May be called with the increase of what ``measure`` names.
        """
        raise NotImplementedError

    def id_of_result(self, result: Any) -> str:
        """Id of the item of a result that `decode` yields."""
        return str(result.id)

    def add(self, result: Any) -> Any:
        """Writes the files of an item, then its line; returns the result as `Tally` counts it.

        Raises:
            InputError: The folder cannot be written.
        """
        raise NotImplementedError

    def crashed(self, item: Item, failed: Failed) -> Any:
        """Returns the result, which `add` takes, of an item that ended the processes before.

        Args:
            item: The item.
            failed: The failure, of the kind `mmdecode.errors.CrashError`.
        """
        raise NotImplementedError

    def sizes(self, items: Sequence[Item]) -> Sequence[float]:
        """Amount of work of each item, in any unit."""
        return [1.0] * len(items)

    def known(self, item: Item) -> dict[str, Any]:
        """Fields of an item's line that say which item it is; empty: its id alone."""
        return {}

    def inputs(self, item: Item) -> Sequence[str]:
        """Paths of the files that an item is computed from."""
        return ()

    def files(self, item: Item) -> Iterable[Path]:
        """Paths of the files that are written for an item."""
        return ()

    def noted_as(self, item: Item) -> str:
        """Name of an item in the notes of what is being decoded."""
        return self.id_of(item)

    def check_line(self, line: Mapping[str, Any]) -> str:
        """Returns the id in a line.

        Raises:
            KeyError: The line is no result; so are `ValueError` and `TypeError`.
        """
        _ = [line[name] for name in self.fields]
        return str(line["id"])

    def differing(self, item: Item, line: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Fields, before and now, by which an item is another one than that of a line."""
        now = json.loads(to_json(self.known(item)))
        return [(n, line.get(n), now[n]) for n in now if line.get(n) != now[n]]

    def prepare(self) -> Prepared:
        """Checks settings and items, cleans up after earlier runs, and cuts the work into units.

        Raises:
            OptionError: The folder holds results of other settings or items, or ``resume`` is not
                set, or files that mmdecode did not write would be replaced.
            InputError: The folder cannot be read or written.
        """
        self.begin()
        return self.plan()

    def begin(self) -> None:
        """Checks the settings of the folder; see `prepare`."""
        with explained(self.folder):
            run = run_of(self.folder)
            signs = (run, self.path, *(self.folder / name for name in self.signs))
            there = any(path.exists() for path in signs)
            self._replaced = there and self._overwrite and not self.resume
            if not is_own(run):
                refuse_foreign([run, self.path], self._overwrite)
            if there and not self._replaced:
                self._before = check_settings(self.folder, self._settings, self.resume)

    def plan(self) -> Prepared:
        """Checks the items, cleans up after earlier runs, and cuts the work into units."""
        with explained(self.folder), ExitStack() as stack:
            lines = None if self._replaced else stack.enter_context(closing(self._check()))
            done = self.done - self.changed
            todo = [item for name, item in self.given.items() if name not in done]
            files = (file for item in todo for file in self.files(item))
            refuse_foreign(itertools.chain(files, self.besides), self._overwrite)
            for name in self.changed:
                for file in self.files(self.given[name]):
                    file.unlink(missing_ok=True)
            reading, decoding = notes_in(self.folder, READING), notes_in(self.folder, DECODING)
            suspects = set(suspects_in(reading))
            names = {self.noted_as(item) for item in todo}
            alone = {} if self._replaced else ended_over(decoding, names)
            # into one note, which outlives the parts
            first = self.folder / DECODING.format(0)
            Batches(first, alone).close()
            for note in {*reading, *decoding} - {first}:
                note.unlink()
            remove_partial(self.folder, tree=self._tree)
            work = cut(self._before.get("work"), self.given, self.batch_size, self.shares)
            if not self._replaced:
                self._note_run(work)
            if lines is not None or (self.folder / PARTS).exists():
                self.merge(self.changed, lines)
        return Prepared(suspects, self.changed, alone, work, self._replaced)

    def joined(self, rank: str) -> Prepared:
        """State of a folder that another process has prepared and is writing to.

        Items that are not among the units of that process are left out.

        Args:
            rank: Name of this process; an earlier one of that name may have ended.
        """
        known = cut(self._before["work"], (), self.batch_size)
        names = {self.noted_as(item) for item in self.items}
        reading, decoding = (notes_in(self.folder, kind, rank) for kind in (READING, DECODING))
        return Prepared(set(suspects_in(reading)), set(), ended_over(decoding, names), known)

    def _check(self) -> Lines:
        """Checks that ids still belong to the same items; finds those that are done or changed."""

        def check(name: str, line: Mapping[str, Any]) -> None:
            if "error" in line:
                return
            self._add_done(name)
            item = self.given.get(name)
            if item is None:
                return
            if differing := self.differing(item, line):
                shown = "; ".join(f"{n} was {was!r}, is {now!r}" for n, was, now in differing)
                raise OptionError(
                    f"{self.folder} holds {self.what} with the id {name!r}, which is now the id of "
                    f"{self.other} ({shown}); resume in the folder in which the run was started, "
                    "with the same input, or choose another --out"
                )
            if self.sources.any_changed(self.inputs(item), line):
                self.changed.add(name)

        return Lines(ended(self.folder), self, check)

    def _add_done(self, name: str) -> None:
        """Notes that an item has a line without an error; see ``needs_files``."""
        files = self.files(self.given[name]) if self.needs_files and name in self.given else ()
        if all(file.exists() for file in files):
            self.done.add(name)

    def _note_run(self, work: list[tuple[int, list[str]]], overwrite: bool = False) -> None:
        """Writes ``run.json``."""
        noted = {"command": list(self.command), "in": os.getcwd(), "units": work}
        note_settings(self.folder, self._settings, overwrite, work=noted)

    def open(self, prepared: Prepared, rank: str | None = None) -> Self:
        """Opens the results of one process.

        Args:
            prepared: Result of `prepare`, whose units may be a share of all.
            rank: Name of this process, as no other one has; ``None``: it is the only one.

        Raises:
            OptionError: Another run is writing there.
            InputError: The folder cannot be written.
        """
        self._replaced, self.changed = prepared.replaced, prepared.changed
        self._work, self._rank = prepared.work, rank
        with explained(self.folder):
            if not self._replaced:
                self._read_merged()
                self._file = self._opened()
            self.reading = InFlight(self.note(READING), sorted(prepared.suspects))
            self.batches = Batches(self.note(DECODING), prepared.alone)
        self.watch = Watch(self.batches.decoding)
        self.opened = True
        return self

    def _read_merged(self) -> None:
        """Finds what is done and what failed before this run, unless `plan` has just seen that."""
        self.done -= self.changed
        if self._seen:
            return
        self.done.clear()
        # of the parts, those of a process of this name that has ended, and of its workers
        own = () if self._rank is None else (self._rank, f"{self._rank}-*")
        parts = (part for one in own for part in (self.folder / PARTS).glob(f"rank-{one}.jsonl"))
        for raw, name, line in self.lines(self.path, *parts):
            if "error" in line:
                self._failed[name] = raw
            else:
                self._add_done(name)

    def _opened(self) -> BinaryIO:
        """Opens the file for this process's lines, and deletes older results to be replaced."""
        if self._replaced and self._rank is None:  # a worker leaves it to who started it
            self.path.unlink(missing_ok=True)
            self._note_run(self._work, self._overwrite)
        self._replaced = False
        part = f"{PARTS}/rank-{self._rank}.jsonl"
        file = open_append(self.path if self._rank is None else self.folder / part)
        try:
            lock(file.fileno(), self.folder)
            drop_torn(Path(file.name))
        except BaseException:
            file.close()
            raise
        return file

    def units(self) -> list[Unit[Item]]:
        """Units of work that have an item without a result; see `unfinished`."""
        return unfinished(
            self._work,
            self.given,
            self.done,
            failed=self._failed,
            alone={self._noted[name]: n for name, n in self.batches.alone.items()},
            size=self.batch_size,
        )

    def remaining(self, unit: Unit[Item]) -> list[Unit[Item]]:
        """Units for one that other processes may have ended over, as their notes tell.

        Names of files that a living process reads may be among those taken for the cause; they are
        then read with the same care.
        """
        names = [self.noted_as(item) for item in unit.items]
        read = {*names, *(file for item in unit.items for file in self.inputs(item))}
        others = set(notes_in(self.folder, READING)) - {self.note(READING)}
        self.reading.add(dict.fromkeys(read.intersection(suspects_in(others)), 0))
        for note in set(notes_in(self.folder, DECODING)) - {self.note(DECODING)}:
            if not (found := ended_over([note], names)):
                continue
            self.batches.add(found)
            rank = note.name.removeprefix(DECODING.format(""))
            for _, name, line in self.lines(note.with_name(f"rank-{rank}.jsonl")):
                if "error" not in line:
                    self._add_done(name)
        self._work = [(unit.batch_size, [self.id_of(item) for item in unit.items])]
        return self.units()

    def note_read(self, path: str | None) -> None:
        """Records size and digest of an input file, if any, before it is first read in this run."""
        if path is not None:
            self.sources.reading(path)

    def begin_writing(self) -> BinaryIO:
        """Returns the file for lines; older results are deleted before the first new one."""
        self._file = self._file or self._opened()
        return self._file

    def append(self, item: Item, line: Mapping[str, Any]) -> None:
        """Appends the line of an item and flushes it; a line that is there already stays.

        If memory ran out for the item's batch, the line holds the size of the smaller batch.

        Raises:
            InputError: The folder cannot be written.
        """
        name = self.id_of(item)
        if name in self.done:
            return
        size = self.watch.halved.pop(self.noted_as(item), None)
        if size is not None and "error" not in line:
            line = {**line, "batch_size": size}
        with explained(self.folder):
            file = self.begin_writing()
            data = to_json(line).encode() + b"\n"
            if self._failed.get(name) != data:  # it failed just so in an earlier run
                append_line(file, data)
            if "error" not in line:
                self.done.add(name)
            self.batches.cleared(self.noted_as(item))

    def lines(self, *paths: Path) -> Iterator[tuple[bytes, str, dict[str, Any]]]:
        """Yields complete lines of files that exist, the ids in them, and their contents.

        Raises:
            InputError: A line is no result.
        """
        for path in filter(Path.exists, paths):
            yield from lines_in(path, complete_lines(path), self)

    def merge(self, without: Collection[str] = (), lines: Lines | None = None) -> None:
        """Merges all lines: one per item, its result or else its last error, in input order.

        Args:
            without: Ids whose lines are removed.
            lines: The lines, if they are known.

        Raises:
            InputError: A line cannot be read, or the folder cannot be written.
        """
        with explained(self.folder):
            parts, known = (self.folder / PARTS).exists(), lines is not None
            if not (known or without or parts) and self._merged == state_of(self.path):
                return
            with closing(Lines(ended(self.folder), self) if lines is None else lines) as found:
                found.remove(without)
                if known:
                    failed = [name for name in found if name in found.failed]
                    self._failed = dict(zip(failed, found.read(failed), strict=True))
                    self._seen = True
                # items of an earlier, larger input stay, after the others
                write_file(self.path, found.read(found.ordered(self.given)))
            self._merged = state_of(self.path)
            if parts:
                shutil.rmtree(self.folder / PARTS)

    def finish(self) -> None:
        """Closes the files, merges all lines, and removes notes of batches."""
        Journal.close(self)  # a folder that is locked stays so
        self.merge()
        with explained(self.folder):
            for note in notes_in(self.folder, DECODING):
                note.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file of lines and the notes; afterwards no more results can be added."""
        with explained(self.folder):
            for one in (self._file, *((self.reading, self.batches) if self.opened else ())):
                if one:
                    one.close()

    def forget(self) -> None:
        """Removes this process's notes of what is being read and decoded."""
        for kind in (READING, DECODING):
            self.note(kind).unlink(missing_ok=True)

    @property
    def rank(self) -> str:
        """Name of this process among those that write to the folder."""
        return self._rank or "0"

    def note(self, kind: str) -> Path:
        """Path of this process's note of what it reads or decodes."""
        return note_of(self.folder, kind, self._rank)
