"""``mmdecode methods``: lists drafters, acceptance rules, guides and other registered classes."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from mmdecode import registry
from mmdecode.cli.output import JsonFlag, emit_json
from mmdecode.errors import UnknownNameError
from mmdecode.runs.console import out


def command(kind: Annotated[str | None, typer.Argument()] = None, json: JsonFlag = False) -> None:
    """List drafters, acceptance rules, guides, correctors, adapters, recognisers, checkpoints.

    Options:
        kind: draft, accept, guide, correct, adapters, recognizers or checkpoints. Default: all.
    """
    if kind is not None and kind not in registry.KINDS:
        raise UnknownNameError.of("kind", kind, registry.KINDS)
    found = {k: registry.describe(k) for k in registry.KINDS if kind in (None, k)}
    if json:
        emit_json({k: [dataclasses.asdict(e) for e in entries] for k, entries in found.items()})
        return
    for k, entries in found.items():
        table = Table("name", "guarantee", "what it does", "source", title=k, title_justify="left")
        for entry in entries:
            origin = entry.source or (f"plug-in: {entry.plugin}" if entry.plugin else "-")
            table.add_row(*map(escape, (entry.name, entry.guarantee, entry.summary, origin)))
        out.print(table)
