"""`run`: decodes what a folder of results lacks, see `mmdecode.runs.journal`; for all jobs.

Workers of an `Engine` decode the units of work; several processes, each with its `Shard` of them,
may also run at any times, on one machine or on several.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import TextColumn

from mmdecode.errors import CrashError, MMDecodeError, OptionError
from mmdecode.runs.console import console, print_line, progress_bar, without_other_bars
from mmdecode.runs.distributed import Shard
from mmdecode.runs.engines import LOCAL, Engine, Job
from mmdecode.runs.files import claimed, explained
from mmdecode.runs.items import Failed
from mmdecode.runs.units import cut

if TYPE_CHECKING:
    from mmdecode.runs.journal import Journal
    from mmdecode.runs.units import Unit


@dataclass
class Tally:
    """Counts, results and failures of a run, for its summary.

    Attributes:
        done_before: Number of items that had a result before.
        changed: Number of items whose input files had changed.
        done: Number of items that this run has done.
        results: Results of this run by their position in the input, if they are kept.
        failures: Failures of this run by their position in the input.
        shard: Share of the units that this process had; ``None``: all.
        others_failed: Number of failures of other shards, if this one has merged the results;
            ``None``: others are not done.
        wall_s: Seconds of decoding.
        stats: Counters of the decoder, see `mmdecode.engine.stats`.
    """

    done_before: int = 0
    changed: int = 0
    done: int = 0
    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Any] = field(default_factory=dict)
    shard: Shard | None = None
    others_failed: int | None = 0
    wall_s: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)

    def add(self, position: int, result: Any, keep: bool) -> bool:
        """Counts a result, and keeps it if asked to; failures are always kept.

        Returns whether the item succeeded.

        Args:
            position: Position of the item in the input.
            result: Its result, as `Journal.add` returns it.
            keep: Whether to keep a result.
        """
        line = isinstance(result, Mapping)
        if result.get("error") if line else getattr(result, "error", None):
            self.failures[position] = result
            return False
        self.done += 1
        if keep:
            self.results[position] = result
        return True

    def counted(self, what: str) -> str:
        """Returns how many items are done, and how many failed.

        Args:
            what: Verb for what was done to them, for example ``answered``.
        """
        line = f"{self.done} {what}, {self.done_before} done before, {len(self.failures)} failed"
        line += f", {self.changed} changed since and done again" if self.changed else ""
        if self.shard:
            line = f"shard {self.shard}: {line}; "
            if self.others_failed is None:
                return line + "other shards are not done"
            line += f"all shards are merged, {len(self.failures) + self.others_failed} failed"
        return line

    @property
    def fine(self) -> bool:
        """Whether no item failed, as far as this process is the one to say so.

        Launchers end all processes when one says that it failed, so the last shard speaks for all.
        """
        return self.others_failed is None or not (self.failures or self.others_failed)

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
    engine: Engine | str = LOCAL,
    shard: Shard | None = None,
) -> Tally:
    """Decodes the items of a folder that have no result yet.

    Args:
        folder: The folder, which is not open.
        load: Loads the model; not called if there is nothing to decode.
        items_of: Returns the items for a loaded model; ``None``: ``folder.items`` are known.
        keep: Whether the tally keeps results.
        temporary: Whether the folder is temporary, so that the run cannot be resumed.
        engine: Engine, or its name: ``local``, ``processes`` or ``ray``.
        shard: Share of the units that this process decodes; ``None``: all. Each process continues
            what is in the folder; the one that ends last merges the results.

    Returns:
        Counts and failures of this run.

    Raises:
        OptionError: See `Journal.prepare`; or a temporary folder is shared.
        InputError: The folder cannot be read or written.
        MMDecodeError: The model cannot be loaded, or the configuration fails for every item.
    """
    engine = Engine(engine) if isinstance(engine, str) else engine
    if temporary and (shard or engine.name != LOCAL):
        how = f"shard {shard}" if shard else f"--engine {engine.name}"
        raise OptionError(f"{how} writes results to a folder; give --out, and files in place of -")
    done = lambda: sum(name in folder.done for name in given)  # noqa: E731
    given: Sequence[str] = ()
    with contextlib.ExitStack() as stack:
        named = None if temporary else folder.shown
        stack.enter_context(resumable(named, lambda: (done(), len(given))))
        claim = stack.enter_context(claimed(folder.folder, shared=shard is not None))
        resumed, folder.resume = folder.resume, folder.resume or shard is not None
        folder.begin()  # refused before a model is loaded
        if items_of is not None:
            load = _loaded_once(folder, load, items_of, engine)
        if shard and not resumed:
            _refuse_other_items(folder)
        folder.shares = (shard.count if shard else 1) * engine.count
        rank = str(shard.index) if shard else None
        prepared = folder.plan() if claim.first else folder.joined(rank or "0")
        changed = len(prepared.changed)
        if shard:
            claim.share()
            prepared = prepared._replace(work=prepared.work[shard.index - 1 :: shard.count])
        folder.open(prepared, rank)
        with contextlib.closing(folder):
            names = (name for _, ids in prepared.work for name in ids)
            given = [name for name in names if name in folder.given]
            before, units = done(), folder.units()
            tell_batch_size(units, folder.batch_size)
            if engine.name != LOCAL:  # the largest first, so that all end together
                sizes = _sizes(folder, units)
                units = [units[i] for i in sorted(range(len(units)), key=lambda i: -sizes[i])]
            tally = _decoded(folder, units, Job(folder, load, prepared, []), engine, keep)
            tally.done = done() - before  # some of workers that ended before they could say so
        last = shard is None or claim.alone()
        if last:
            folder.finish()
        if shard:
            tally.others_failed = None
        if shard and last:
            lines = {name: "error" in line for _, name, line in folder.lines(folder.path)}
            if lines.keys() >= folder.given.keys():
                tally.others_failed = sum(lines.values()) - len(tally.failures)
    tally.done_before, tally.changed, tally.shard = before, changed, shard
    return tally


def _refuse_other_items(folder: Journal[Any]) -> None:
    """Refuses an input that lacks items of the shards before; it may have new ones.

    Raises:
        OptionError: Items are missing.
    """
    work = folder._before.get("work")
    known = {name for _, ids in cut(work, (), 1) for name in ids} if work else set[str]()
    if missing := sorted(known - folder.given.keys()):
        raise OptionError(
            f"{folder.folder} has the work of {len(known)} items, of which this shard was not "
            f"given {len(missing)}, such as {missing[0]}; give each shard the same input, or "
            "--resume to go on with another one"
        )


def loaded(load: Callable[[], Any]) -> Any:
    """Loads a model without bars of other libraries."""
    without_other_bars()
    return load()


def _loaded_once(
    folder: Journal[Any],
    load: Callable[[], Any],
    items_of: Callable[[Any], Sequence[Any]],
    engine: Engine,
) -> Callable[[], Any]:
    """Asks the model for the items; returns a loader, of the same model if it decodes here."""
    model = loaded(load)
    folder.items = items_of(model)
    return (lambda: model) if engine.name == LOCAL else load


def _sizes(folder: Journal[Any], units: Sequence[Unit[Any]]) -> list[float]:
    """Amount of work of each unit."""
    sizes = iter(folder.sizes([item for unit in units for item in unit.items]))
    return [sum(itertools.islice(sizes, len(unit.items))) for unit in units]


def _decoded(
    folder: Journal[Any], units: Sequence[Unit[Any]], job: Job, engine: Engine, keep: bool
) -> Tally:
    """Decodes units with a bar, and counts their results."""
    tally = folder.tally()
    total = sum(len(unit.items) for unit in units)
    if not total:
        return tally
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

        counted = set[str]()
        for name, result in engine.decode(job, units, meter):
            if name in counted:  # its unit was interrupted
                continue
            counted.add(name)
            folder.begin_writing()  # in place of older results, of which workers know nothing
            bar.advance(task)
            if result is None or tally.add(positions[name], result, keep):
                folder.done.add(name)  # a worker's folder is another object
            meter(0)
    tally.wall_s = time.perf_counter() - started
    tally.stats = summed(job.stats)
    tally.results = dict(sorted(tally.results.items()))  # workers end in any order
    tally.failures = dict(sorted(tally.failures.items()))
    return tally


def in_this_process(
    engine: Engine, job: Job, units: Sequence[Unit[Any]], meter: Callable[[float], None]
) -> Iterator[tuple[str, Any]]:
    """Decodes units one after the other; see `Engine.decode`."""
    model = loaded(job.load)
    for unit in units:
        yield from decoded(job.folder, model, unit, meter)
    job.stats.append(model.stats.as_dict())


def decoded(
    folder: Journal[Any], model: Any, unit: Unit[Any], meter: Callable[[float], None]
) -> Iterator[tuple[str, Any]]:
    """Decodes a unit and adds its results to the folder.

    Yields:
        Id and result of each item; ``None`` for an item that has a line already, since its unit was
        interrupted.

    Raises:
        MMDecodeError: Not each item had one result.
    """
    results = folder.decode(model, unit, meter)
    missing = {folder.id_of(item) for item in unit.items}
    if len(unit.items) == 1 and (text := folder.batches.problem(folder.noted_as(unit.items[0]))):
        results = iter([folder.crashed(unit.items[0], Failed.of(CrashError(text), hint=""))])
    with explained(folder.folder):
        for result in results:
            name = folder.id_of_result(result)
            if name not in missing:
                raise MMDecodeError(f"the model answered for {name}, which it was not given")
            missing.remove(name)
            yield name, None if name in folder.done else folder.add(result)
    if missing:
        raise MMDecodeError(f"the model did not answer for {', '.join(sorted(missing))}")


def _stop(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def resumable(folder: Path | None, done: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Says last, where Ctrl-C, SIGTERM or SIGHUP stops a run, how far it got.

    Args:
        folder: Folder of the results; ``None``: there is none, and nothing is said.
        done: Returns how many items have a result, and how many there are.
    """
    if folder is None:
        yield
        return
    handles = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")] if handles else []
    before = {number: signal.getsignal(number) for number in numbers if number is not None}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)
    try:
        yield
    except KeyboardInterrupt:
        count, total = done()
        line = f"stopped: {count} of {total} done in {folder}; go on with --resume"
        print_line(line, console, "red")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


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
