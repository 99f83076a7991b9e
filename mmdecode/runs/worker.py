"""`Worker`: decodes units in a process of its own; as a program, a worker of `runs.processes`.

``python -m mmdecode.runs.worker FILE RANK``: ``FILE`` is the number of the open socket that links
it with the process that started it. When that process ends, in whatever way, so does the worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mmdecode.errors import InputError, MMDecodeError, OptionError
from mmdecode.runs.crashes import OFTEN, times_begun
from mmdecode.runs.items import Failed
from mmdecode.runs.journal import PARTS
from mmdecode.runs.locks import lock
from mmdecode.runs.units import Unit
from mmdecode.runs.work import decoded, loaded

EVERY_S = 0.2
"""Seconds between two messages on what was measured."""


class Worker:
    """Decodes units of work and writes the results into a part of the folder of its own.

    The part is the ledger: what a worker returns is only for the progress bar and the summary.

    Args:
        job: Folder, loader and state of the folder, see `mmdecode.runs.engines.Job`.
        rank: Name of the worker, as no other one of this run has.
        time_limit_s: Seconds without progress after which the process ends.

    Raises:
        InputError: The folder cannot be written, or its locks do not reach the process that started
            the worker.
        MMDecodeError: The model cannot be loaded.
    """

    def __init__(self, job: Any, rank: str, time_limit_s: float) -> None:
        self.folder, load, prepared = job
        self._time_limit_s, self._seen = time_limit_s, 0.0
        _check_locks(self.folder.folder)
        self.folder.open(prepared, rank)
        self.folder.watch.exits = True
        self.model = loaded(load)

    def decode(self, unit: Unit[Any], meter: Callable[[float], None]) -> Iterator[tuple[str, Any]]:
        """Decodes a unit that other workers may have ended over.

        Yields:
            Id and result of each item; ``None`` for one that has a line already.

        A thread of C ends the process if it makes no progress, even if Python is stuck, and prints
        where it is.
        """

        def seen(amount: float = 0.0) -> None:
            if amount:
                meter(amount)
            if time.monotonic() - self._seen > min(1.0, self._time_limit_s / 4):
                self._seen = time.monotonic()
                faulthandler.dump_traceback_later(self._time_limit_s, exit=True)

        tries = self._begun(unit)
        try:
            parts = self.folder.remaining(unit)
            left = {self.folder.id_of(item) for part in parts for item in part.items}
            yield from (
                (name, None) for name in map(self.folder.id_of, unit.items) if name not in left
            )
            for part in parts:
                seen()
                for found in decoded(self.folder, self.model, part, seen):
                    seen()
                    yield found
            tries.unlink(missing_ok=True)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._seen = 0.0

    def _begun(self, unit: Unit[Any]) -> Path:
        """Counts in a file how often a unit was begun, and returns its path.

        Raises:
            MMDecodeError: So many workers ended over the unit that its items cannot be the cause.
        """
        first = self.folder.id_of(unit.items[0])
        name = hashlib.blake2b(os.fsencode(first), digest_size=8).hexdigest()
        path: Path = self.folder.folder / PARTS / f".begun-{name}"
        count = times_begun(path)
        if count > 2 + OFTEN * len(unit.items):  # one over a batch, some over each item
            raise MMDecodeError(
                f"{count - 1} workers ended over the same {len(unit.items)} items, from {first}, "
                "and not while they decoded; run with --engine local to see why"
            )
        return path

    def stats(self) -> dict[str, Any]:
        """Counters of the decoder since the start, see `mmdecode.engine.stats`."""
        stats: dict[str, Any] = self.model.stats.as_dict()
        return stats


def _check_locks(folder: Any) -> None:
    """Refuses a folder that is not locked here, though the process that starts workers does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, folder)
    except OptionError:
        return
    finally:
        os.close(handle)
    raise InputError(
        f"{folder} is not locked for this worker, so it is another folder here, or its file system "
        "does not carry locks from one machine to another; expected a folder that all share, with "
        "POSIX locks, such as NFS 4"
    )


def main() -> None:
    """Decodes the units that arrive, and sends results, measures, and errors of the whole job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the other process ends us
    link = Connection(int(sys.argv[1]))
    try:
        _work(link, sys.argv[2])
    except (EOFError, BrokenPipeError):
        pass
    except Exception as error:
        failed = Failed.of(error, "give fewer --workers")
        with contextlib.suppress(OSError):
            link.send(("error", failed.kind, failed.error))


def _work(link: Connection, rank: str) -> None:
    units: queue.SimpleQueue[Unit[Any]] = queue.SimpleQueue()
    measured, sent = 0.0, time.monotonic()

    def meter(amount: float) -> None:
        nonlocal measured, sent
        measured += amount
        if time.monotonic() - sent >= EVERY_S:
            link.send(("meter", measured))
            measured, sent = 0.0, time.monotonic()

    packed, time_limit_s = link.recv()
    job = pickle.loads(packed)  # before there is another thread that imports
    threading.Thread(target=_listen, args=(link, units, forget := []), daemon=True).start()
    worker = Worker(job, rank, time_limit_s)
    forget.append(worker.folder)
    with contextlib.closing(worker.folder):
        link.send(("ready",))
        while True:
            for name, result in worker.decode(units.get(), meter):
                link.send(("item", name, result))
            link.send(("meter", measured))
            measured = 0.0
            link.send(("unit", worker.stats()))


def _listen(link: Connection, units: queue.SimpleQueue[Any], opened: list[Any]) -> None:
    """Receives units; ends this process when the other one has closed its end or has ended."""
    try:
        while True:
            units.put(link.recv())
    except (EOFError, OSError):
        for folder in opened:  # this end is not the fault of what is being decoded
            folder.forget()
        os._exit(0)


if __name__ == "__main__":
    main()
