"""The rows of a run in a folder: appended as they come, continued after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mmdecode.files import (
    RUN,
    append_line,
    check_settings,
    complete_lines,
    explained,
    note_settings,
    open_append,
)
from mmdecode.tables import write_rows


class Recorded(Protocol):
    """What a journal holds."""

    def as_dict(self) -> dict[str, Any]:
        """As a row."""


Row = TypeVar("Row", bound=Recorded)


class Journal(Generic[Row]):
    """A file of rows.

    Args:
        path: Of the file; its folder is created where it does not exist, and says in
            `mmdecode.files.RUN` under which settings the rows are made.
        read: Reads the rows that are there.
        key: What a row is about; of several rows about one thing the last counts.
        settings: What may change a row.
        resume: Continue what is there.

    Attributes:
        done: The last row of each key, failures included.

    Raises:
        OptionError: The folder holds results, and ``resume`` is not set or the settings differ.
        InputError: The folder cannot be read or written.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], Iterable[Row]],
        key: Callable[[Row], Hashable],
        settings: Mapping[str, Any],
        resume: bool,
    ) -> None:
        self.done: dict[Any, Row] = {}
        self._path, self._key, folder = path, key, path.parent
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if is_taken(folder, path.name):
                check_settings(folder, settings, resume)
            if path.exists():
                self.done = {key(row): row for row in read(path)}
                os.truncate(path, sum(map(len, complete_lines(path))))
            note_settings(folder, settings)
            self._file = open_append(path)

    def add(self, row: Row) -> None:
        """Writes a row where a crash cannot lose it."""
        line = json.dumps(row.as_dict(), ensure_ascii=False, allow_nan=False)
        append_line(self._file, line.encode() + b"\n")
        self.done[self._key(row)] = row

    def finish(self, rows: Sequence[Row]) -> None:
        """Puts all rows in order, one per key, as they are scored."""
        write_rows(self._path, [row.as_dict() for row in rows])

    def close(self) -> None:
        """No more rows."""
        self._file.close()


def is_taken(folder: Path, name: str) -> bool:
    """Whether a folder holds a report, or what a run began.

    Args:
        folder: It need not exist.
        name: Of the file of rows.
    """
    return any((folder / one).exists() for one in (RUN, name, "summary.json"))
