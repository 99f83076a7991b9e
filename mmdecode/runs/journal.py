"""The rows of a run in a folder: appended as they come, continued after an interruption."""

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
    """Row of a journal."""

    def as_dict(self) -> dict[str, Any]:
        """Converts to a row."""


Row = TypeVar("Row", bound=Recorded)


class Journal(Generic[Row]):
    """A file of rows.

    Args:
        path: Path of the file; its folder is created if it does not exist, and holds the settings
            of the rows in `mmdecode.runs.files.RUN`.
        read: Reads the rows that are there.
        key: Key of a row; of several rows with one key the last counts.
        settings: Settings that may change a row.
        resume: Continue what is there.
        overwrite: Replace existing rows when the first new one comes, and files that are not ours.
        input_of: The file that a row is made of, ``None`` for none; rows of files that have changed
            are removed.

    Attributes:
        done: The last row of each key, failures included.
        changed: Files that have changed since their rows were made.

    Raises:
        OptionError: The folder holds results, and neither ``resume`` nor ``overwrite`` is set, or
            the settings to resume differ; or a file that is not ours is there.
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
        """Removes the rows whose files have changed."""
        files = {key: input_of(row) for key, row in self.done.items()}
        found = {file for file in files.values() if file is not None}
        self.changed = {file for file in found if self._inputs.changed(file)}
        if self.changed:
            self.done = {
                key: row for key, row in self.done.items() if files[key] not in self.changed
            }
            self.finish(list(self.done.values()))

    def reading(self, path: str | None) -> None:
        """Records the content of a file before rows are made of it."""
        if path is not None:
            self._inputs.reading(path)

    def _opened(self) -> BinaryIO:
        note_settings(self._path.parent, self._settings, self._overwrite)
        return open_append(self._path, self._overwrite)

    def _reopened(self) -> BinaryIO:
        """Opens the file again, without the rows that it replaces."""
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
        """Rewrites the file with ``rows``, one per key, in order."""
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
        folder: It need not exist.
        name: Name of the file of rows.
        resume: The user continues what is there.
        overwrite: The user allows to replace it.
        resumable: Whether the command has an option to continue, for the message.

    Raises:
        OptionError: It holds an earlier report, or files of such names that are not ours.
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
    """Whether a folder holds a report, or the files of an unfinished run.

    Args:
        folder: It need not exist.
        name: Name of the file of rows.
    """
    return any((folder / one).exists() for one in (RUN, name, "summary.json"))
