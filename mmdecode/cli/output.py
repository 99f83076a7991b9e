"""Output of commands: text for people, or one line of JSON for programs.

Results as text go to ``out`` (stdout); progress, warnings and errors go to ``console`` (stderr).
With ``--json`` a command writes nothing to stdout but the line of ``emit_json``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mmdecode.runs.console import out, print_line

__all__ = ["JsonFlag", "emit_json", "show_tables"]


JsonFlag = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object as the last line of stdout."),
]


def emit_json(obj: Any) -> None:
    """Prints an object as one line of JSON on stdout.

    Dataclasses, paths, and arrays and scalars of numpy and torch are converted to plain values;
    NaN and infinities become null.
    """
    print(json.dumps(_plain(obj), allow_nan=False), flush=True)


def show_tables(tables: Iterable[Sequence[Mapping[str, str]]]) -> None:
    """Prints tables, lists of rows that map columns to text; as Markdown unless on a terminal."""
    from rich.markup import escape
    from rich.table import Table

    from mmdecode.evaluation.report.layout import markdown

    for rows in tables:
        if not out.is_terminal:
            print_line(markdown(rows))
            continue
        table = Table(*map(escape, rows[0]))
        for row in rows:
            table.add_row(*map(escape, row.values()))
        out.print(table)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return value
