"""Reads and writes tables of items, one row each.

A ``.csv`` or ``.tsv`` has a header; a ``.trn``, ``.ref`` or ``.hyp`` has NIST's lines, ``some words
(id)``; anything else is JSON lines, one JSON list, or one JSON object over several lines. A further
``.gz`` means that it is compressed.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmdecode.errors import InputError
from mmdecode.runs.files import write_file
from mmdecode.runs.inputs import refuse_address


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a table, and the line number of each, from 1.

    Raises:
        InputError: The file cannot be read or is no table.
    """
    for line, row in rows_of(path):
        if isinstance(row, InputError):
            raise row
        yield line, row


def rows_of(path: Path) -> Iterator[tuple[int, dict[str, Any] | InputError]]:
    """Like `read_rows`, with an error instead of the row for each line that cannot be read.

    Raises:
        InputError: The file cannot be read or is no table.
    """
    data = _content(path)
    kind = (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()
    try:
        text = _universal(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        if kind in (".csv", ".tsv") or data.lstrip()[:1] == b"[":
            problem = f"{path} cannot be read as a manifest: it is not UTF-8 text"
            raise InputError(problem) from error
        # a line that is not text does not affect the others
        text = _universal(data.decode("utf-8-sig", "surrogateescape"))
    if kind in (".csv", ".tsv"):
        yield from _table(path, text, kind)
    elif kind in (".trn", ".ref", ".hyp"):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield number, _tried(_transcript, line, f"{path}, line {number}")
    elif text.lstrip().startswith("["):
        for number, row in enumerate(_parse(text, str(path)), 1):
            yield number, _tried(_mapping, row, f"{path}, item {number}")
    elif text.startswith("{\n"):
        yield 1, _mapping(_parse(text, str(path)), str(path))
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield number, _tried(_object, line, f"{path}, line {number}")


def _content(path: Path) -> bytes:
    """Decompressed content of a table's file."""
    try:
        refuse_address(path)
    except InputError as error:
        raise InputError(f"{path} {error}") from None
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix.lower() == ".gz" else data
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read as a manifest: it is no whole gzip") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path} cannot be read as a manifest: {reason}") from error


def _universal(text: str) -> str:
    """Text with uniform line ends."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _tried(
    read: Callable[[Any, str], dict[str, Any]], given: Any, where: str
) -> dict[str, Any] | InputError:
    """A row, or the error of its line."""
    try:
        if isinstance(given, str):
            _refuse_bytes(given, where)
        return read(given, where)
    except InputError as error:
        return error


def _refuse_bytes(line: str, where: str) -> None:
    try:
        line.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} is not UTF-8 text; write it as UTF-8") from None


def _object(line: str, where: str) -> dict[str, Any]:
    return _mapping(_parse(line, where), where)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], overwrite: bool = False) -> None:
    """Writes JSON lines under the rule of `write_file`."""
    write_file(path, rows_text(rows), overwrite)


def rows_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def _table(path: Path, text: str, kind: str) -> Iterator[tuple[int, dict[str, Any] | InputError]]:
    lines = io.StringIO(text, newline="")
    if kind == ".tsv":  # a quotation mark there is part of the text
        reader = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.DictReader(lines)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            where = f"{path}, line {reader.line_num}"
            yield reader.line_num, InputError(f"{where} cannot be read: {error}")
            continue
        if None in row or None in row.values():
            yield (
                reader.line_num,
                InputError(
                    f"{path}, line {reader.line_num} does not have the "
                    f"{len(reader.fieldnames or ())} columns of the header"
                ),
            )
            continue
        yield reader.line_num, row


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
        raise InputError(f"{where} holds {type(row).__name__}; expected an object with fields")
    return row


def first_of(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Value of the first of ``names`` that a row has; ``None``: it has none of them."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def text_of(row: Mapping[str, Any], names: Iterable[str], where: str) -> str | None:
    """Text of the first of ``names`` that a row has; ``None``: it has none of them.

    Raises:
        InputError: The value is no text.
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
        raise InputError(f"{where} has half a character under {any_of(names)}") from None
    return str(value)


def any_of(names: Iterable[str]) -> str:
    """Names of columns, as a message lists them."""
    return " or ".join(repr(name) for name in names)


def refuse_all(problems: Iterable[str | None]) -> None:
    """Refuses a table in which every line has a problem.

    Raises:
        InputError: Every line has a problem; the message is that of the first.
    """
    found = list(problems)
    if all(problem is not None for problem in found):
        raise InputError(f"{found[0]}; and no other line is better" if found[1:] else found[0])


def own_id(name: str, line: int, taken: Container[str]) -> str:
    """A unique id for a line whose own id may be taken."""
    while name in taken or not name:
        name = f"{name}#{line}"
    return name
