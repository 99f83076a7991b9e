"""The progress bar of commands over many items."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    from mmdecode.asr.output.manifest import Entry
    from mmdecode.asr.transcriber import Transcriber
    from mmdecode.evaluation.speech.samples import Sample
    from mmdecode.runs.journal import Journal


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


def answered(journal: Journal[Any] | None) -> Callable[[], int]:
    """Returns a function that counts the rows of a journal that have no error."""
    return lambda: sum(row.error is None for row in journal.done.values()) if journal else 0


def tell_changed(journal: Journal[Any]) -> None:
    """Prints how many files have changed since the run that is resumed."""
    if journal.changed:
        text = f"{len(journal.changed)} changed since and done again"
        console.print(text, style="yellow", highlight=False)


def recorded(
    what: str,
    transcribers: Mapping[str, Transcriber],
    entries: Sequence[Entry],
    conditions: Mapping[str, Any],
    out_dir: Path | None,
    resume: bool,
    overwrite: bool = False,
    begin: Callable[[], None] | None = None,
    **how: Any,
) -> list[Sample]:
    """Transcribes recordings in all modes with a progress bar, and returns the samples.

    Args:
        what: Text of the bar.
        transcribers: Transcribers by the name of their mode.
        entries: Recordings.
        conditions: Settings and machine of the run; a resumed run must have the same, except
            ``load_average``.
        out_dir: Folder where samples are saved, to resume the run; ``None``: not saved.
        resume: Whether to continue the folder's run.
        overwrite: Whether to replace the folder's content.
        begin: Called after the folder is checked and before the first recording is read.
        **how: See `mmdecode.evaluation.speech.runs.record`.
    """
    from mmdecode.evaluation.speech.runs import journal_of, record

    fixed = {name: value for name, value in conditions.items() if name != "load_average"}
    journal = journal_of(out_dir, fixed, resume, overwrite, entries) if out_dir else None
    total = len(entries) * len(transcribers)

    def done() -> int:
        return sum(sample.error is None for sample in journal.done.values()) if journal else 0

    with (
        resumable(out_dir, total, done),
        contextlib.closing(journal) if journal else contextlib.nullcontext(),
        progress_bar() as bar,
    ):
        if begin is not None:
            begin()
        if journal:
            tell_changed(journal)
        task = bar.add_task(what, total=total)
        if journal:
            bar.advance(task, done())
        return record(
            transcribers, entries, journal, progress=lambda sample: bar.advance(task), **how
        )
