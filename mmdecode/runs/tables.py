"""Reading and writing of tables, with one row for each item.

The file's suffix gives the format: ``.csv`` and ``.tsv`` have a header; ``.trn``, ``.ref`` and
``.hyp`` have lines of NIST's form ``some words (id)``; ``.parquet`` needs the extra ``tables``; any
other file holds JSON lines, one JSON list, or one JSON object over several lines. A further suffix
``.gz`` means gzip compression.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mmdecode.errors import InputError, MissingExtraError, OptionError
from mmdecode.runs.files import to_json, write_file
from mmdecode.runs.inputs import refuse_address

Result = TypeVar("Result")


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the line number, counted from 1, and the fields of each row of a table.

    Raises:
        InputError: The file, or one of its lines, cannot be read as a table.
    """
    for line, row in rows_of(path):
        if isinstance(row, InputError):
            raise row
        yield line, row


def rows_of(path: Path) -> Iterator[tuple[int, dict[str, Any] | InputError]]:
    """Yields line numbers and rows; for a line that cannot be read, an `InputError` as its row.

    Raises:
        InputError: The file as a whole cannot be read as a table.
    """
    if path.suffix.lower() == ".parquet":
        yield from _of_parquet(path)
        return
    data = _content(path)
    kind = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if kind in (".csv", ".tsv") or data.lstrip()[:1] == b"[":
            problem = f"{path} cannot be read as a manifest: it is not UTF-8 text"
            raise InputError(problem) from error
        # a line that is not text does not affect the others
        text = data.decode("utf-8-sig", "surrogateescape")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    of_line = _transcript if kind in (".trn", ".ref", ".hyp") else _object
    if kind in (".csv", ".tsv"):
        yield from _table(path, text, kind)
    elif of_line is _object and text.lstrip().startswith("["):
        for number, row in enumerate(_parse(text, str(path)), 1):
            yield number, _tried(_mapping, row, f"{path}, item {number}")
    elif of_line is _object and text.startswith("{\n"):
        yield 1, _object(text, str(path))
    else:
        yield from lines_of(text, path, of_line)


def lines_of(
    text: str, path: Path, read: Callable[[str, str], Result]
) -> Iterator[tuple[int, Result | InputError]]:
    """Yields number and result of each line that is not blank, or its error; see `rows_of`."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, _tried(read, line, f"{path}, line {number}")


def _content(path: Path) -> bytes:
    """Reads a table's file, decompressed if its name ends in ``.gz``."""
    try:
        refuse_address(path)
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix.lower() == ".gz" else data
    except InputError as error:
        raise InputError(f"{path} {error}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read as a manifest: it is a broken gzip") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path} cannot be read as a manifest: {reason}") from error


def _tried(read: Callable[[Any, str], Result], given: Any, where: str) -> Result | InputError:
    """Returns the row that ``read`` parses, or the `InputError` that it raises."""
    try:
        if isinstance(given, str):
            given.encode()
        return read(given, where)
    except UnicodeEncodeError:
        return InputError(f"{where} is not UTF-8 text; write it as UTF-8")
    except InputError as error:
        return error


def _object(line: str, where: str) -> dict[str, Any]:
    return _mapping(_parse(line, where), where)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows as JSON lines; see `write_file` for which existing files are replaced."""
    write_file(path, rows_text(rows))


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as a table, in the format of the file's suffix.

    Args:
        path: Path of the file: ``.csv``, ``.tsv``, ``.json``, ``.jsonl`` or ``.parquet``. Values
            that are no text and no number are JSON in ``.csv`` and ``.tsv``.
        rows: Rows; a column is empty where a row has no value of that name.

    Raises:
        OptionError: The file has another suffix, or is there already and is not ours.
        MissingExtraError: ``.parquet`` needs a package that is not installed.
    """
    kind = path.suffix.lower()
    if kind not in WRITERS:
        raise OptionError(f"{path} is no table; expected a file {', '.join(WRITERS)}")
    write_file(path, WRITERS[kind](rows))


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _csv_text(rows: Sequence[Mapping[str, Any]], delimiter: str = ",") -> str:
    plain = (str, int, float, type(None))
    file = io.StringIO()
    writer = csv.DictWriter(file, _columns(rows), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: cell if isinstance(cell, plain) else to_json(cell) for name, cell in row.items()}
        for row in rows
    )
    return file.getvalue()


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    pyarrow = _pyarrow()
    names = _columns(rows)
    whole = [{name: row.get(name) for name in names} for row in rows]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(whole), file)
    return file.getvalue()


WRITERS: dict[str, Callable[[Sequence[Mapping[str, Any]]], str | bytes]] = {
    ".csv": _csv_text,
    ".tsv": lambda rows: _csv_text(rows, "\t"),
    ".json": lambda rows: to_json(list(rows), indent=1) + "\n",
    ".jsonl": lambda rows: "".join(to_json(row) + "\n" for row in rows),
    ".parquet": _parquet,
}
"""Functions that format rows, by suffix."""


def _pyarrow() -> Any:
    """The package, with its module ``parquet``."""
    with MissingExtraError.instead("Parquet needs pyarrow", extra="tables"):
        import pyarrow
        import pyarrow.parquet
    return pyarrow


def _of_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    pyarrow = _pyarrow()
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path} cannot be read as a manifest: {error}") from error
    for number, row in enumerate(rows, 1):
        yield number, {name: value for name, value in row.items() if value is not None}


def rows_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Formats rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def _table(path: Path, text: str, kind: str) -> Iterator[tuple[int, dict[str, Any] | InputError]]:
    how: dict[str, Any] = {}
    if kind == ".tsv":  # a quotation mark there is part of the text
        how = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    reader = csv.DictReader(io.StringIO(text, newline=""), **how)
    while True:
        problem = ""
        try:
            row = next(reader)
            if None in row or None in row.values():
                count = len(reader.fieldnames or ())
                problem = f"does not have the {count} columns of the header"
        except StopIteration:
            return
        except csv.Error as error:
            problem = f"cannot be read: {error}"
        where = f"{path}, line {reader.line_num}"
        yield reader.line_num, InputError(f"{where} {problem}") if problem else row


def _transcript(line: str, where: str) -> dict[str, Any]:
    found = re.fullmatch(r"(.*)\(([^()]+)\)\s*", line)
    if not found:
        raise InputError(f"{where} does not end with an id; expected 'some words (id)'")
    return {"id": found[2].strip(), "text": found[1].strip()}


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from error


def _mapping(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise InputError(f"{where} holds {type(row).__name__}; expected an object: {{...}}")
    return row


def first_of(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Returns a row's value for the first of ``names`` that is not null; ``None`` if all are."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def text_of(row: Mapping[str, Any], names: Iterable[str], where: str) -> str | None:
    """Returns a row's text under the first of ``names`` that is not null; ``None`` if all are.

    Args:
        row: Fields of the row; an integer is accepted as text.
        names: Names of columns, in order of preference.
        where: File and line, for the message.

    Raises:
        InputError: The value is not text.
    """
    value = first_of(row, names)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        found = f"{type(value).__name__} {str(value)[:40]!r}"
        raise InputError(f"{where} has {found} under {any_of(names)}; expected text")
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} has invalid Unicode under {any_of(names)}") from None
    return str(value)


def any_of(names: Iterable[str]) -> str:
    """Formats the names of columns for a message: ``'a' or 'b'``."""
    return " or ".join(repr(name) for name in names)


def refuse_all(problems: Iterable[str | None]) -> None:
    """Refuses a table in which every line has a problem.

    Args:
        problems: The problem of each line; ``None`` if the line has none.

    Raises:
        InputError: Every line has a problem; the message names the first problem.
    """
    found = list(problems)
    if all(problem is not None for problem in found):
        raise InputError(f"{found[0]}; and no other line is valid" if found[1:] else found[0])


def own_id(name: str, line: int, taken: Container[str]) -> str:
    """Returns a unique id for a line: its own, or with ``#LINE`` appended if that is in use.

    Args:
        name: The line's own id; may be empty.
        line: Number of the line.
        taken: Ids of other lines.
    """
    while name in taken or not name:
        name = f"{name}#{line}"
    return name
