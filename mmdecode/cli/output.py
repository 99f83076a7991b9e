"""Where commands write: people read the consoles, programs read one JSON line.

Results for people go to ``out`` (stdout); progress, warnings and errors go to ``console`` (stderr).
With ``--json`` a command writes nothing to stdout but the line of ``emit_json``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

__all__ = ["JsonFlag", "console", "emit_json", "out", "print_line", "show_tables", "warnings_shown"]


class Stderr(Console):
    """The console of stderr.

    Attributes:
        errors_only: ``--quiet``: only what is red is printed, errors and failures.
        tells_all: ``--verbose``: what other libraries say is shown too, and where errors come from.
    """

    errors_only = False
    tells_all = False

    def print(self, *objects: Any, style: Any = None, **how: Any) -> None:
        """As in rich."""
        if style == "red" or not self.errors_only:
            super().print(*objects, style=style, **how)

    @property
    def is_terminal(self) -> bool:
        """Whether bars can be drawn, and should be."""
        return super().is_terminal and not self.errors_only


console = Stderr(stderr=True)
out = Console()

JsonFlag = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object as the last line of stdout."),
]


def emit_json(obj: Any) -> None:
    """Prints one JSON object on one line of stdout.

    Dataclasses, paths, arrays and scalars of numpy and torch are written as plain values; numbers
    that JSON cannot hold (NaN, infinities) as null.
    """
    print(json.dumps(_plain(obj), allow_nan=False), flush=True)


@contextlib.contextmanager
def warnings_shown(how: Literal["always", "default"]) -> Iterator[None]:
    """Shows our warnings as lines for people: each time, or each text once."""

    def shown(message: Any, *_: Any) -> None:
        print_line(f"{message}", console, "yellow")

    with warnings.catch_warnings():
        warnings.filterwarnings(how, module=r"mmdecode\.")
        warnings.showwarning = shown  # type: ignore[assignment]
        yield


def print_line(text: str, where: Console = out, style: str | None = None) -> None:
    """One line as it is: no markup, no highlights, no breaks."""
    where.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def show_tables(tables: Iterable[Sequence[Mapping[str, str]]]) -> None:
    """Rows by column, table after table; Markdown where there is no terminal to lay them out."""
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
