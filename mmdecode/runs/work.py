"""`run`: decodes what a folder of results lacks, see `mmdecode.runs.journal`; for all jobs.

Several processes that ``accelerate launch`` or ``torchrun`` started share the units of work.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import TextColumn

from mmdecode.runs.console import console, print_line, progress_bar, without_other_bars
from mmdecode.runs.distributed import Team, share_out
from mmdecode.runs.files import claimed

if TYPE_CHECKING:
    from mmdecode.runs.journal import Journal, Prepared, Unit


@dataclass
class Tally:
    """Counts, results and failures of a run, for its summary.

    Attributes:
        done_before: Number of items that had a result before.
        changed: Number of items whose input files had changed.
        done: Number of items that this run has done.
        results: Results of this run by their position in the input, if they are kept.
        failures: Failures of this run by their position in the input.
        wall_s: Seconds of decoding.
        stats: Counters of the decoder, see `mmdecode.engine.stats`.
    """

    done_before: int = 0
    changed: int = 0
    done: int = 0
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Any] = field(default_factory=dict)
    wall_s: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)

    def add(self, position: int, result: Any, keep: bool) -> None:
        """Counts a result, and keeps it if asked to; failures are always kept.

        Args:
            position: Position of the item in the input.
            result: Its result, as `Journal.add` returns it.
            keep: Whether to keep a result.
        """
        line = isinstance(result, Mapping)
        if result.get("error") if line else getattr(result, "error", None):
            self.failures[position] = result
            return
        self.done += 1
        if keep:
            self.results[position] = result

    def joined(self, other: Tally) -> Tally:
        """Returns the counts and results of two processes together."""
        values: dict[str, Any] = {}
        for name, own in vars(self).items():
            more = getattr(other, name)
            both = isinstance(own, dict)
            values[name] = dict(sorted((own | more).items())) if both else own + more
        return replace(self, **values | {"stats": summed([self.stats, other.stats])})

    def counted(self, what: str) -> str:
        """Returns how many items are done, and how many failed.

        Args:
            what: Verb for what was done to them, for example ``answered``.
        """
        line = f"{self.done} {what}, {self.done_before} done before, {len(self.failures)} failed"
        return line + (f", {self.changed} changed since and done again" if self.changed else "")

    def speed(self) -> str:
        """Returns the end of a summary: tokens and their time, tokens per pass if drafted."""
        if not (self.stats.get("tokens") and self.wall_s):
            return ""
        line = f"; {self.stats['tokens']} tokens in {self.wall_s:.1f} s"
        if self.stats["drafted"]:
            line += f", {self.stats['acceptance_length']:.2f} per pass"
        return line


def summed(stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums the counters of several decoders, see `mmdecode.engine.stats`."""
    stats = [one for one in stats if one]  # a process without work has none
    if len(stats) < 2:
        return stats[0] if stats else {}
    counters = "calls", "tokens", "passes", "row_passes", "drafted", "accepted"
    total: dict[str, Any] = {name: sum(one[name] for one in stats) for name in counters}
    kept = sum(one["acceptance_length"] * one["row_passes"] for one in stats)
    histograms = [one["accepted_histogram"] for one in stats]
    return total | {
        "acceptance_length": round(kept / max(total["row_passes"], 1), 4),
        "acceptance_rate": round(total["accepted"] / max(total["drafted"], 1), 4),
        "accepted_histogram": [sum(n) for n in itertools.zip_longest(*histograms, fillvalue=0)],
    }


def run(
    folder: Journal[Any],
    load: Callable[[], Any],
    *,
    items_of: Callable[[Any], Sequence[Any]] | None = None,
    keep: bool = False,
    temporary: bool = False,
    team: Team | None = None,
) -> Tally:
    """Decodes the items of a folder that have no result yet.

    Args:
        folder: The folder, which is not open.
        load: Loads the model; not called if there is nothing to decode.
        items_of: Returns the items for a loaded model; ``None``: ``folder.items`` are known.
        keep: Whether the tally keeps results.
        temporary: Whether the folder is temporary, so that the run cannot be resumed.
        team: Processes that share the work; ``None``: those of a launcher, or this one alone.

    Returns:
        Counts and failures of this run; in the process of rank 0 those of all processes.

    Raises:
        OptionError: See `Journal.prepare`.
        InputError: The folder cannot be read or written.
        MMDecodeError: The model cannot be loaded, or the configuration fails for every item.
    """
    team = team or Team()
    alone = team.size == 1
    done = lambda: sum(name in folder.done for name in folder.given)  # noqa: E731
    with contextlib.ExitStack() as stack:
        named = folder.folder if alone and not temporary else None
        stack.enter_context(resumable(named, lambda: (done(), len(folder.items))))

        def begin() -> None:
            stack.enter_context(claimed(folder.folder))
            folder.begin()

        team.first(begin)  # refused before a model is loaded
        if items_of is not None:
            model = _loaded(load)
            folder.items, load = items_of(model), lambda: model
        prepared: Prepared = team.first(folder.plan)
        folder.open(prepared, None if alone else team.rank)
        with contextlib.closing(folder):
            before, units = done(), folder.units()
            if team.leads:
                tell_batch_size(units, folder.batch_size)
            sizes = iter(folder.sizes([item for unit in units for item in unit.items]))
            work = [sum(itertools.islice(sizes, len(unit.items))) for unit in units]
            share = [units[index] for index in share_out(work, team.size)[team.rank]]
            started = time.perf_counter()
            own = _decoded(folder, share, load, keep)
        tallies = team.gather(own)  # all have closed the folder
        team.first(folder.finish)
    tally: Tally = functools.reduce(Tally.joined, tallies, folder.tally())
    tally.done_before, tally.changed = before, len(prepared.changed)
    if not alone:
        tally.wall_s = time.perf_counter() - started
    return tally


def _loaded(load: Callable[[], Any]) -> Any:
    """Loads a model without bars of other libraries."""
    without_other_bars()
    return load()


def _decoded(
    folder: Journal[Any], units: Sequence[Unit[Any]], load: Callable[[], Any], keep: bool
) -> Tally:
    """Decodes units and adds their results to the folder."""
    tally = folder.tally()
    total = sum(len(unit.items) for unit in units)
    if not total:
        return tally
    model = _loaded(load)
    positions = {name: position for position, name in enumerate(folder.given)}
    started = time.perf_counter()
    with progress_bar(TextColumn("{task.fields[more]}")) as bar:
        task, measured = bar.add_task(folder.doing, total=total, more=""), 0.0

        def meter(amount: float) -> None:
            nonlocal measured
            measured += amount
            rate = measured / max(time.perf_counter() - started, 1e-9)
            more = [f"{measured:.0f} {folder.measure}, {rate:.1f} a second"] if measured else []
            more += [f"{len(tally.failures)} failed"] if tally.failures else []
            bar.update(task, more=", ".join(more))

        for unit in units:
            for result in folder.decode(model, unit, meter):
                bar.advance(task)
                name = folder.id_of_result(result)
                if name not in folder.done:  # else of a unit that was interrupted
                    tally.add(positions[name], folder.add(result), keep)
                    meter(0)
    tally.wall_s, tally.stats = time.perf_counter() - started, model.stats.as_dict()
    return tally


@contextlib.contextmanager
def resumable(folder: Path | None, done: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Says last, where Ctrl-C or SIGTERM stops a run, how far it got.

    Args:
        folder: Folder of the results; ``None``: there is none, and nothing is said.
        done: Returns how many items have a result, and how many there are.
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
        count, total = done()
        line = f"stopped: {count} of {total} done in {folder}; go on with --resume"
        print_line(line, console, "red")
        raise
    finally:
        if handles:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def tell_batch_size(units: Sequence[Unit[Any]], batch_size: int) -> None:
    """Prints that units of an earlier run keep their batch size, if it is another one.

    Args:
        units: Units to be decoded.
        batch_size: Batch size that was asked for.
    """
    other = {unit.batch_size for unit in units if len(unit.items) > 1} - {batch_size}
    if other:
        sizes = " and ".join(map(str, sorted(other)))
        line = f"what an earlier run began goes on with its batch size, {sizes}"
        print_line(line, console, "yellow")
