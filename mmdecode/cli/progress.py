"""The bar of commands that work through many items, and no other."""

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
    """On a terminal's stderr, gone when it ends; ``more`` columns stand before the time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *more,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # all that it leaves in a file is an empty line
    )


def without_other_bars() -> None:
    """Keeps transformers' bars out of a command's output; what it warns of is still shown."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def only_our_output() -> None:
    """Keeps transformers' bars and warnings out of a command's output."""
    from transformers.utils import logging

    without_other_bars()
    logging.set_verbosity_error()
