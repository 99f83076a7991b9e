"""`RowJournal`: rows of an evaluation in a folder, see `mmdecode.runs.journal`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from mmdecode.errors import OptionError
from mmdecode.runs.changes import Noted
from mmdecode.runs.files import RUN, append_line, explained, note_settings, refuse_foreign
from mmdecode.runs.journal import Journal
from mmdecode.runs.tables import rows_text, write_rows


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
        read, key, settings, input_of: See the arguments.
        rows: The last row of each key, failures included.
        changed: Input files that have changed since their rows were computed.
        noted: Sizes and digests of the input files.

    Raises:
        OptionError: The folder holds results, and neither ``resume`` nor ``overwrite`` is set; or
            the settings of the results to resume differ; or a file that mmdecode did not write
            would be replaced.
        InputError: The folder cannot be read or written.
    """

    signs = (*Journal.signs, "summary.json")

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
        self.path, self._work, self._rank = path, [], None
        self.read, self.key, self.settings, self.input_of = read, key, settings, input_of
        self.sources = self.noted = noted = Noted(self.folder)
        self.rows: dict[Any, Row] = {}
        self.begin()
        if self._replaced:
            return
        if path.exists():
            known = {key(row): row for row in read(path)}
            files = {file for row in known.values() if (file := input_of(row)) is not None}
            self.changed = {file for file in files if noted.changed_since(file)}
            self.rows = {n: row for n, row in known.items() if input_of(row) not in self.changed}
            with explained(self.folder):
                self.finish_with(list(self.rows.values()))
        with explained(self.folder):
            note_settings(self.folder, settings, overwrite)
            self._file = self._opened()

    def add(self, row: Row) -> None:
        """Appends a row and syncs it to disk, so that a crash does not lose it."""
        line = rows_text([row.as_dict()])
        with explained(self.folder):
            append_line(self.begin_writing(), line.encode("utf-8", "backslashreplace"))
        self.rows[self.key(row)] = row

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
    signs = [folder / one for one in (RUN, name, "summary.json")]
    others = [folder / one for one in ("table.md", "table.csv", "texts.jsonl", "report.html")]
    kinds = ("*.png", "leaderboard/*.jsonl", "audio/*.flac")
    figures = [file for kind in kinds for file in folder.glob(kind)]
    refuse_foreign([*signs, *others, *figures], overwrite)
    if any(path.exists() for path in signs) and not resume and not overwrite:
        hint = "continue it with --resume, " if resumable else ""
        raise OptionError(
            f"{folder} holds an earlier report; {hint}replace it with --overwrite, or choose "
            "another --out"
        )
