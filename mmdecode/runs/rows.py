"""`RowJournal`: rows of an evaluation in a folder, see `mmdecode.runs.journal`."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mmdecode.errors import OptionError
from mmdecode.runs.changes import Noted
from mmdecode.runs.files import RUN, append_line, explained, note_settings, refuse_foreign
from mmdecode.runs.journal import Journal
from mmdecode.runs.tables import write_rows


class Recorded(Protocol):
    """Protocol of an evaluation's rows."""

    @property
    def error(self) -> str | None:
        """Why the row has no result; ``None``: it has one."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as a dictionary for JSON."""


Row = TypeVar("Row", bound=Recorded)


class RowJournal(Journal[Row]):
    """Rows of an evaluation, one for each item and mode.

    Args:
        path: Path of the file of rows.
        read: Reads the existing rows of the file.
        key: Returns the key of a row; if several rows have the same key, the last is used.
        settings: Settings that may change a row.
        resume: Whether to continue existing results.
        overwrite: Whether to replace existing rows, as soon as the first new row is added, and
            files that mmdecode did not write.
        input_of: Returns the input file of a row, or ``None``. Rows whose input file has changed
            are removed.

    Attributes:
        rows: The last row of each key, failures included.
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
        input_of: Callable[[Row], str | None] = lambda row: None,
    ) -> None:
        super().__init__(path.parent, settings, resume=resume, overwrite=overwrite)
        self.path, self._key, self._work, self._rank = path, key, [], None
        self._noted = Noted(self.folder)
        self.rows: dict[Any, Row] = {}
        self.begin()
        if self._replaced:
            return
        if path.exists():
            known = {key(row): row for row in read(path)}
            files = {name: input_of(row) for name, row in known.items()}
            found = {file for file in files.values() if file is not None}
            self.changed = {file for file in found if self._noted.changed(file)}
            self.rows = {n: row for n, row in known.items() if files[n] not in self.changed}
            with explained(self.folder):
                self.finish_with(list(self.rows.values()))
        with explained(self.folder):
            note_settings(self.folder, settings, overwrite)
            self._file = self._opened()

    def signs(self) -> list[Path]:
        """The summary of a report, too."""
        return [*super().signs(), self.folder / "summary.json"]

    def id_of(self, item: Row) -> str:
        """Key of a row, as text."""
        return str(self._key(item))

    def note_read(self, path: str | None) -> None:
        """Records size and digest of an input file before rows are computed from it."""
        if path is not None:
            self._noted.reading(path)

    def add(self, row: Row) -> None:
        """Appends a row and syncs it to disk, so that a crash does not lose it."""
        line = json.dumps(row.as_dict(), ensure_ascii=False, allow_nan=False)
        with explained(self.folder):
            append_line(self.begin_writing(), line.encode("utf-8", "backslashreplace") + b"\n")
        self.rows[self._key(row)] = row

    def finish_with(self, rows: Sequence[Row]) -> None:
        """Replaces the content of the file by ``rows``, one for each key, in the order given."""
        write_rows(self.path, [row.as_dict() for row in rows])


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
