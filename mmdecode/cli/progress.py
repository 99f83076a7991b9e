"""Progress of commands over many items, and the counts of their summaries."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from mmdecode.runs.console import console, print_line

if TYPE_CHECKING:
    from mmdecode.runs.journal import Unit


@dataclass
class Tally:
    """Counts, results and failures of a run, for its summary."""

    done_before: int = 0
    changed: int = 0
    results: list[Any] = field(default_factory=list)
    failures: list[Any] = field(default_factory=list)
    wall_s: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)

    def sort(self) -> None:
        """Sorts results and failures by their index in the input."""
        for found in (self.results, self.failures):
            found.sort(key=lambda one: one.index)

    def counted(self, done: int, what: str) -> str:
        """Returns how many items are done, and how many failed.

        Args:
            done: Number of items that this run has done.
            what: Verb for what was done to them, for example ``answered``.
        """
        line = f"{done} {what}, {self.done_before} done before, {len(self.failures)} failed"
        return line + (f", {self.changed} changed since and done again" if self.changed else "")

    def speed(self) -> str:
        """Returns the end of a summary: tokens and their time, tokens per pass if drafted."""
        if not (self.stats.get("tokens") and self.wall_s):
            return ""
        line = f"; {self.stats['tokens']} tokens in {self.wall_s:.1f} s"
        if self.stats["drafted"]:
            line += f", {self.stats['acceptance_length']:.2f} per pass"
        return line


def progress_bar(*more: ProgressColumn) -> Progress:
    """Returns a bar on stderr that is removed when done; ``more`` columns come before the time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *more,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # otherwise it would leave an empty line in a file
    )


@contextlib.contextmanager
def resumable(folder: Path | None, total: int, done: Callable[[], int]) -> Iterator[None]:
    """Says last, where Ctrl-C or SIGTERM stops a run, how far it got; the exit code is 130.

    Args:
        folder: Folder of the results; ``None``: there is none, and nothing is said.
        total: Number of items.
        done: Returns how many of them have a result.
    """
    if folder is None:
        yield
        return
    handles = threading.current_thread() is threading.main_thread()
    if handles:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        line = f"stopped: {done()} of {total} done in {folder}; go on with --resume"
        print_line(line, console, "red")
        raise typer.Exit(130) from None
    finally:
        if handles:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def tell_batch_size(units: Sequence[Unit[Any]], batch_size: int, leads: bool = True) -> None:
    """Prints that units of an earlier run keep their batch size, if it is another one.

    Args:
        units: Units to be decoded.
        batch_size: Batch size that was asked for.
        leads: Whether this is the process that prints.
    """
    other = {unit.batch_size for unit in units if len(unit.items) > 1} - {batch_size}
    if other and leads:
        sizes = " and ".join(map(str, sorted(other)))
        line = f"what an earlier run began goes on with its batch size, {sizes}"
        print_line(line, console, "yellow")
