"""Decoding by worker processes of this machine, which are started, watched and replaced.

A unit over which a worker ended is handed to another one, which finds in the folder at which items
that was, see `mmdecode.runs.worker` and `mmdecode.runs.crashes`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from mmdecode.errors import MMDecodeError
from mmdecode.runs.console import console, print_line
from mmdecode.runs.engines import Engine, Job
from mmdecode.runs.items import error_of
from mmdecode.runs.units import Unit

FUTILE = 5
"""The job fails if so many workers in a row end before they have loaded the model."""
PATIENCE_S = 5.0
"""Seconds that workers have to end when the job does."""


@dataclass(eq=False)
class _Worker:
    """A worker process, and the unit that it was handed."""

    link: Connection
    process: subprocess.Popen[bytes]
    slot: int
    unit: Unit[Any] | None = None
    ready: bool = False
    stats: dict[str, Any] = field(default_factory=dict)


class Workers:
    """The workers of a job.

    Args:
        engine: Number of workers and time limit.
        job: The job.

    Raises:
        InputError: The job cannot be pickled.
    """

    def __init__(self, engine: Engine, job: Job) -> None:
        self._job, self._packed, self._file = job, job.packed(), -1
        self._count, self._time_limit_s = engine.bounds[1], engine.time_limit_s
        self._ranks = itertools.count(1)
        self._workers: dict[Connection, _Worker] = {}
        self._futile = 0

    def decode(
        self, units: Sequence[Unit[Any]], meter: Callable[[float], None]
    ) -> Iterator[tuple[str, Any]]:
        """Decodes units; see `Engine.decode`.

        Raises:
            MMDecodeError: A worker cannot load the model, or the configuration fails for every
                item, or workers end before they decode anything.
        """
        todo = deque(units)
        with tempfile.TemporaryFile() as file, contextlib.closing(self):
            file.write(self._packed)
            file.flush()
            self._file = file.fileno()
            while todo or self._busy():
                self._hand_out(todo)
                for link in wait(list(self._workers)):
                    assert isinstance(link, Connection)
                    worker = self._workers[link]
                    try:
                        kind, *more = link.recv()
                    except (EOFError, OSError):
                        todo.extendleft(self._ended(worker))
                        continue
                    if kind == "error":
                        raise error_of(*more)
                    if kind == "ready":
                        worker.ready, self._futile = True, 0
                    elif kind == "meter":
                        meter(*more)
                    elif kind == "unit":
                        worker.unit, [worker.stats] = None, more
                    else:
                        yield tuple(more)

    def _busy(self) -> int:
        return sum(worker.unit is not None for worker in self._workers.values())

    def _hand_out(self, todo: deque[Unit[Any]]) -> None:
        """Hands units to workers that have none; starts workers that are missing."""
        while len(self._workers) < min(self._count, len(todo) + self._busy()):
            self._start()
        for worker in self._workers.values():
            if todo and worker.unit is None:
                worker.unit = todo.popleft()
                with contextlib.suppress(OSError):  # it has ended, which is seen next
                    worker.link.send(worker.unit)

    def _start(self) -> None:
        """Starts a worker, in a slot that is free."""
        ours, theirs = Pipe()
        slot = min(set(range(self._count)) - {one.slot for one in self._workers.values()})
        files = theirs.fileno(), self._file
        rank = f"{self._job.folder.rank}-{next(self._ranks)}"
        words = *files, rank, self._time_limit_s
        with theirs:
            process = subprocess.Popen(
                # -P and the path: the same modules as here, whatever the working directory holds
                [sys.executable, "-P", "-m", "mmdecode.runs.worker", *map(str, words)],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._devices(slot), "PYTHONPATH": _path()},
                pass_fds=files,
                process_group=0,  # Ctrl-C is for this process alone
            )
        self._workers[ours] = _Worker(ours, process, slot)

    def _devices(self, slot: int) -> dict[str, str]:
        """Environment of a worker: its GPU, and its share of the CPUs."""
        import torch

        share = max(1, _cpus() // self._count)
        found = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}
        if gpus := torch.cuda.device_count():
            listed = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = listed.split(",") if listed else [str(index) for index in range(gpus)]
            found["CUDA_VISIBLE_DEVICES"] = names[slot % len(names)]
        return found

    def _ended(self, worker: _Worker) -> list[Unit[Any]]:
        """Removes a worker that has ended; returns its unit, which is decoded again."""
        self._remove(worker)
        code = worker.process.returncode
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        print_line(f"a worker ended ({how}), and is replaced", console, "yellow")
        self._futile += not worker.ready
        if self._futile == FUTILE:
            text = f"{FUTILE} workers in a row ended before they had loaded the model, the last "
            text += f"one with exit code {code}"
            if not any(one.ready for one in self._workers.values()):
                raise MMDecodeError(
                    f"{text}; run with --engine local to see why, or with fewer --workers if "
                    "memory is short"
                )
            self._count, self._futile = self._count - 1, 0
            print_line(f"{text}; going on with {self._count}", console, "yellow")
        return [worker.unit] if worker.unit else []

    def _remove(self, worker: _Worker) -> None:
        worker.link.close()
        worker.process.wait()
        del self._workers[worker.link]
        self._job.stats.append(worker.stats)

    def close(self) -> None:
        """Ends all workers: each ends when its link is closed, or it is ended."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.link.close()
        until = time.monotonic() + PATIENCE_S
        for worker in workers:
            try:
                worker.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
            self._remove(worker)


def _path() -> str:
    """This process's search path of modules, for another one."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def _cpus() -> int:
    """Number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_processes(
    engine: Engine, job: Job, units: Sequence[Unit[Any]], meter: Callable[[float], None]
) -> Iterator[tuple[str, Any]]:
    """Decodes units by worker processes; see `Engine.decode`."""
    return Workers(engine, job).decode(units, meter)
