"""The bar of commands that work through many items."""

from __future__ import annotations

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from mmdecode.cli.output import console


def progress_bar(*more: ProgressColumn) -> Progress:
    """On stderr, gone when it ends; ``more`` columns stand before the time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *more,
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
