"""`Worker`: decodes units in a process of its own; as a program, a worker of `runs.processes`.

``python -m mmdecode.runs.worker LINK JOB RANK SECONDS``: numbers of the open socket that links it
with the process that started it and of the open file with the job, its name, and the time limit.
When the process that started it ends, in whatever way, so does the worker.
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
from typing import Any, NoReturn

from mmdecode.errors import InputError, MMDecodeError
from mmdecode.runs.crashes import OFTEN, times_begun
from mmdecode.runs.items import Failed
from mmdecode.runs.journal import PARTS
from mmdecode.runs.locks import is_locked
from mmdecode.runs.units import Unit
from mmdecode.runs.work import decoded, loaded

LOADING_S = 3_600.0
"""Seconds in which a worker has to load the model, unless the time limit is longer."""
MOST_STARTS = 20
"""The job fails if so many workers end one after the other while they load the model."""
EVERY_S = 0.2
"""Seconds between two messages on what was measured."""


class Worker:
    """Decodes units of work and writes the results into a part of the folder of its own.

    The part is the ledger: what a worker returns is only for the progress bar and the summary.
    `begin` comes first.

    Args:
        job: Folder, loader and state of the folder, see `mmdecode.runs.engines.Job`.
        rank: Name of the worker, as no other one of this run has.
        time_limit_s: Seconds without progress after which the process ends.
    """

    def __init__(self, job: Any, rank: str, time_limit_s: float) -> None:
        self.folder, self._load, self._prepared = job
        self._rank, self._time_limit_s, self._seen = rank, time_limit_s, 0.0
        self._begun: list[Path] = []
        self.model: Any = None

    def begin(self) -> None:
        """Opens the folder and loads the model.

        Raises:
            InputError: The folder cannot be written, or its locks do not reach the process that
                started the worker.
            MMDecodeError: The model cannot be loaded.
        """
        _check_locks(self.folder.folder)
        self.folder.open(self._prepared, self._rank)
        self.folder.watch.exits = True
        starts = self._begin("loading", MOST_STARTS, "before they had loaded the model")
        faulthandler.dump_traceback_later(max(LOADING_S, self._time_limit_s), exit=True)
        self.model = loaded(self._load)
        faulthandler.cancel_dump_traceback_later()
        self._end(starts)

    def decode(self, unit: Unit[Any], meter: Callable[[float], None]) -> Iterator[tuple[str, Any]]:
        """Decodes a unit that other workers may have ended over.

        A thread of C ends the process if it makes no progress, even if Python is stuck, and prints
        where it is.

        Yields:
            Id and result of each item; ``None`` for one that has a line already.
        """

        def seen(amount: float = 0.0) -> None:
            if amount:
                meter(amount)
            if time.monotonic() - self._seen > min(1.0, self._time_limit_s / 4):
                self._seen = time.monotonic()
                faulthandler.dump_traceback_later(self._time_limit_s, exit=True)

        first, count = self.folder.id_of(unit.items[0]), len(unit.items)
        what = f"over the same {count} items, from {first}, and not while they decoded"
        # one over a batch, some over each item
        tries = self._begin(first, 2 + OFTEN * count, what)
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
            self._end(tries)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._seen = 0.0

    def _begin(self, name: str, most: int, what: str) -> Path:
        """Counts in a file how often something was begun and did not end; returns its path.

        Raises:
            MMDecodeError: A further time is in vain.
        """
        digest = hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()
        path: Path = self.folder.folder / PARTS / f".begun-{digest}"
        self._begun.append(path)
        if (count := times_begun(path)) > most:
            self._end(path)
            raise MMDecodeError(
                f"{count - 1} workers ended {what}; run with --engine local to see why, or with "
                "fewer --workers if memory is short"
            )
        return path

    def _end(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._begun.remove(path)

    def forget(self) -> None:
        """Removes the notes on what is being done, where nothing of that is why this one ends."""
        if self.folder.opened:
            self.folder.forget()
        for path in self._begun:
            path.unlink(missing_ok=True)

    def stats(self) -> dict[str, Any]:
        """Counters of the decoder since the start, see `mmdecode.engine.stats`."""
        stats: dict[str, Any] = self.model.stats.as_dict()
        return stats


def _check_locks(folder: Any) -> None:
    """Refuses a folder that is not locked here, though the process that starts workers does."""
    if is_locked(folder):
        return
    raise InputError(
        f"{folder} is not locked for this worker, so it is another folder here, or its file system "
        "does not carry locks from one machine to another; expected a folder that all share, with "
        "POSIX locks, such as NFS 4"
    )


class _Link:
    """The link with the process that started this worker, which ends when that one has ended."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self.worker: Worker | None = None

    def send(self, *message: Any) -> None:
        try:
            self._link.send(message)
        except OSError:
            self._leave()

    def receive(self) -> Any:
        try:
            return self._link.recv()
        except (EOFError, OSError):
            self._leave()

    def _leave(self) -> NoReturn:
        if self.worker:  # this end is not the fault of what is being decoded
            self.worker.forget()
        os._exit(0)


def main() -> None:
    """Decodes the units that arrive, and sends results, measures, and errors of the whole job."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # they reach all; the other process ends us
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    link = _Link(Connection(int(sys.argv[1])))
    try:
        _work(link, sys.argv[3], int(sys.argv[2]), float(sys.argv[4]))
    except Exception as error:
        failed = Failed.of(error, "give fewer --workers")
        link.send("error", failed.kind, failed.error)


def _work(link: _Link, rank: str, job: int, time_limit_s: float) -> None:
    units: queue.SimpleQueue[Unit[Any]] = queue.SimpleQueue()
    measured, sent = 0.0, time.monotonic()

    def meter(amount: float) -> None:
        nonlocal measured, sent
        measured += amount
        if time.monotonic() - sent >= EVERY_S:
            link.send("meter", measured)
            measured, sent = 0.0, time.monotonic()

    def listen() -> None:
        while True:
            units.put(link.receive())

    # before there is another thread that imports
    opened = pickle.loads(os.pread(job, os.fstat(job).st_size, 0))
    threading.Thread(target=listen, daemon=True).start()
    worker = link.worker = Worker(opened, rank, time_limit_s)
    worker.begin()
    with contextlib.closing(worker.folder):
        link.send("ready")
        while True:
            for name, result in worker.decode(units.get(), meter):
                link.send("item", name, result)
            link.send("meter", measured)
            measured = 0.0
            link.send("unit", worker.stats())


if __name__ == "__main__":
    main()
