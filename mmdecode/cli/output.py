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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

__all__ = ["JsonFlag", "console", "emit_json", "out", "warnings_shown"]

console = Console(stderr=True)
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
        console.print(f"{message}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.filterwarnings(how, module=r"mmdecode\.")
        warnings.showwarning = shown  # type: ignore[assignment]
        yield


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
