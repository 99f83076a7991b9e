"""Journal of a run: a file to which rows are appended one by one, so that a run can resume."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from mmdecode.errors import OptionError
from mmdecode.runs.changes import Noted
from mmdecode.runs.files import (
    RUN,
    append_line,
    check_settings,
    complete_lines,
    explained,
    note_settings,
    open_append,
    refuse_foreign,
    run_of,
)
from mmdecode.runs.tables import write_rows


class Recorded(Protocol):
    """Protocol of a journal's rows."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as a dictionary for JSON."""


Row = TypeVar("Row", bound=Recorded)


class Journal(Generic[Row]):
    """A file of JSON lines to which the rows of a run are appended.

    Args:
        path: Path of the file. Its folder is created if it does not exist; the file
            `mmdecode.runs.files.RUN` in the folder holds the settings.
        read: Reads the existing rows of the file.
        key: Returns the key of a row; if several rows have the same key, the last is used.
        settings: Settings that may change a row.
        resume: Whether to continue existing results.
        overwrite: Whether to replace existing rows, as soon as the first new row is added, and
            files that mmdecode did not write.
        input_of: Returns the input file of a row, or ``None``. Rows whose input file has changed
            are removed.

    Attributes:
        done: The last row of each key, failures included.
        changed: Input files that have changed since their rows were computed.

    Raises:
        OptionError: The folder holds results, and neither ``resume`` nor ``overwrite`` is set; or
            the settings of the results to resume differ; or a file that mmdecode did not write
            would be replaced.
        InputError: The folder cannot be read or written.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], Iterable[Row]],
        key: Callable[[Row], Hashable],
        settings: Mapping[str, Any],
        resume: bool,
        overwrite: bool = False,
        input_of: Callable[[Row], str | None] | None = None,
    ) -> None:
        self.done: dict[Any, Row] = {}
        self.changed: set[str] = set()
        self._inputs = Noted(path.parent)
        self._path, self._key, folder = path, key, path.parent
        with explained(folder):
            refuse_foreign([run_of(folder), path], overwrite)
            self._settings, self._overwrite = settings, overwrite
            self._file: BinaryIO | None = None
            taken = is_taken(folder, path.name)
            if taken and overwrite and not resume:
                return
            if taken:
                check_settings(folder, settings, resume)
            if path.exists():
                self.done = {key(row): row for row in read(path)}
                os.truncate(path, sum(map(len, complete_lines(path))))
                if input_of is not None:
                    self._forget_changed(input_of)
            self._file = self._opened()

    def _forget_changed(self, input_of: Callable[[Row], str | None]) -> None:
        """Removes the rows whose input files have changed."""
        files = {key: input_of(row) for key, row in self.done.items()}
        found = {file for file in files.values() if file is not None}
        self.changed = {file for file in found if self._inputs.changed(file)}
        if self.changed:
            self.done = {
                key: row for key, row in self.done.items() if files[key] not in self.changed
            }
            self.finish(list(self.done.values()))

    def reading(self, path: str | None) -> None:
        """Records size and digest of an input file before rows are computed from it."""
        if path is not None:
            self._inputs.reading(path)

    def _opened(self) -> BinaryIO:
        note_settings(self._path.parent, self._settings, self._overwrite)
        return open_append(self._path, self._overwrite)

    def _reopened(self) -> BinaryIO:
        """Deletes the file with the earlier rows and opens a new one."""
        self._path.unlink(missing_ok=True)
        return self._opened()

    def add(self, row: Row) -> None:
        """Appends a row and syncs it to disk, so that a crash does not lose it."""
        line = json.dumps(row.as_dict(), ensure_ascii=False, allow_nan=False)
        with explained(self._path.parent):
            self._file = self._file or self._reopened()
            append_line(self._file, line.encode() + b"\n")
        self.done[self._key(row)] = row

    def finish(self, rows: Sequence[Row]) -> None:
        """Replaces the content of the file by ``rows``, one for each key, in the order given."""
        write_rows(self._path, [row.as_dict() for row in rows])

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()


def refuse_taken(
    folder: Path, name: str, resume: bool, overwrite: bool, *, resumable: bool = True
) -> None:
    """Refuses a folder whose files a report would replace; called before anything is computed.

    Args:
        folder: Folder of the report; it need not exist.
        name: Name of the file of rows.
        resume: Whether the user asked to continue the earlier report.
        overwrite: Whether the user allows replacing files.
        resumable: Whether the command has the option ``--resume``, for the message.

    Raises:
        OptionError: The folder holds an earlier report, or files that have the names of a report's
            files and that mmdecode did not write.
    """
    names = (RUN, name, "summary.json", "table.md", "table.csv", "texts.jsonl", "report.html")
    figures = [
        f for kind in ("*.png", "leaderboard/*.jsonl", "audio/*.flac") for f in folder.glob(kind)
    ]
    refuse_foreign([*(folder / one for one in names), *figures], overwrite)
    if is_taken(folder, name) and not resume and not overwrite:
        hint = "continue it with --resume, " if resumable else ""
        raise OptionError(
            f"{folder} holds an earlier report; {hint}replace it with --overwrite, or choose "
            "another --out"
        )


def is_taken(folder: Path, name: str) -> bool:
    """Returns whether a folder holds a report or the files of an unfinished run.

    Args:
        folder: Folder of the report; it need not exist.
        name: Name of the file of rows.
    """
    return any((folder / one).exists() for one in (RUN, name, "summary.json"))
