"""Decoding by workers of a Ray cluster: Ray Data places and restarts them.

Results are in the shared folder, as with every engine: a worker writes them into a part of its own
and returns what the progress bar and the summary need. One block of the dataset is one unit of
work, so that little is decoded again when a worker has ended; what it was decoding, the next one
finds in the folder, see `mmdecode.runs.worker`. Files are read by the workers themselves, ahead of
decoding, and do not go through Ray's object store.

Source: Ray Data, ``Dataset.map_batches`` with an actor pool, https://docs.ray.io/en/latest/data.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import pickle
import signal
import threading
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from mmdecode.errors import MissingExtraError, MMDecodeError, OptionError
from mmdecode.runs.console import console
from mmdecode.runs.engines import Engine, Job
from mmdecode.runs.items import Failed, error_of
from mmdecode.runs.memory import share_gpu
from mmdecode.runs.units import Unit

STORE = 150_000_000
"""Bytes of the object store of a cluster of this machine alone; Ray would take a third of all."""
FEWEST_CPUS = 4
"""Ray's operators wait for each other for ever with two CPUs; these are only names for slots."""
QUIET = {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Ray's own settings without which it prints a paragraph for each worker that ended, on stdout."""
AHEAD = 2
"""Units handed to a worker at a time, so that it need not wait for the next one."""


class RayWorker:
    """An actor: loads the model once, and decodes one unit at a time.

    Args:
        job: Reference to the pickled job, see `mmdecode.runs.engines.Job.packed`.
        rank: Beginning of the workers' names.
        time_limit_s: Seconds without progress after which the process ends.
        gpus: GPUs of the worker, see `share_gpu`.
        threads: Number of torch's threads; Ray allows one to an actor with a part of a CPU.
        folder: Working directory of the job, from which its paths count.
    """

    def __init__(
        self, job: Any, rank: str, time_limit_s: float, gpus: float, threads: int, folder: str
    ) -> None:
        import ray

        os.environ["OMP_NUM_THREADS"] = str(threads)  # torch is imported with the model
        share_gpu(gpus)
        self._failed: Failed | None = None
        with contextlib.suppress(OSError):  # of the first machine alone: paths are absolute
            os.chdir(folder)
        try:
            from mmdecode.runs.worker import Worker

            opened = pickle.loads(ray.get(job))
            self._worker = Worker(opened, f"{rank}-{uuid.uuid4().hex[:8]}", time_limit_s)
            self._worker.begin()
        except Exception as error:  # of the whole job: raised where it was started
            self._failed = Failed.of(error, "give fewer --workers")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Decodes a unit; returns its results, pickled."""
        found: dict[str, Any] = {"items": [], "measured": 0.0, "error": None, "stats": {}}

        def meter(amount: float) -> None:
            found["measured"] += amount

        if self._failed is None:
            try:
                size, names = json.loads(batch["unit"][0])
                given = self._worker.folder.given
                unit = Unit([given[name] for name in names], size)
                found["items"] = list(self._worker.decode(unit, meter))
                found["stats"] = {self._worker.folder.rank: self._worker.stats()}
            except Exception as error:
                self._failed = Failed.of(error, "give fewer --workers")
        if self._failed:
            found["error"] = self._failed.kind, self._failed.error
        return {"found": [pickle.dumps(found)]}


def on_ray(
    engine: Engine, job: Job, units: Sequence[Unit[Any]], meter: Callable[[float], None]
) -> Iterator[tuple[str, Any]]:
    """Decodes units on Ray; see `Engine.decode`.

    Raises:
        MissingExtraError: Ray is not installed.
        MMDecodeError: See `mmdecode.runs.processes.Workers.decode`; or Ray itself fails.
    """
    with _quiet():
        with MissingExtraError.instead("--engine ray needs Ray", extra="scale"):
            import ray
            import ray.data
        packed = job.packed(ray.cloudpickle)
        stats: dict[str, Any] = {}
        with (
            _cluster(ray, engine, len(packed)),
            contextlib.closing(_rows(ray, engine, job, packed, units)) as rows,
        ):
            for found in rows:
                if found["error"]:
                    raise error_of(*found["error"])
                meter(found["measured"])
                stats |= found["stats"]
                yield from found["items"]
    job.stats.extend(stats.values())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Ray's messages off the output, unless all output is wanted."""
    names = {} if console.tells_all else {n: v for n, v in QUIET.items() if n not in os.environ}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def _rows(
    ray: Any, engine: Engine, job: Job, packed: bytes, units: Sequence[Unit[Any]]
) -> Generator[dict[str, Any], None, None]:
    """Yields what workers return; closing it ends Ray's iterator, which would start Ray again."""
    with _explained(ray, job):
        rows = iter(_dataset(ray, engine, job, packed, units).iter_rows())
    try:
        while True:
            with _explained(ray, job):
                row = next(rows, None)
            if row is None:
                return
            yield pickle.loads(row["found"])
    finally:
        if hasattr(rows, "close"):
            rows.close()
        del rows
        gc.collect()


def _dataset(ray: Any, engine: Engine, job: Job, packed: bytes, units: Sequence[Unit[Any]]) -> Any:
    """The units as a dataset of blocks of one row, decoded by a pool of actors."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # workers watch over themselves; a long recording is no reason to end the job
    context.execution_no_progress_timeout_s = -1
    there = float(ray.cluster_resources().get("GPU", 0))
    gpus = float(there > 0) if engine.gpus is None else engine.gpus
    _refuse_more_than_there_is(ray, gpus, engine.cpus)
    low, high = engine.bounds
    if engine.workers is None and gpus:
        low = high = max(int(there / gpus), 1)
    low, high = min(low, len(units)), min(high, len(units))
    id_of = job.folder.id_of
    rows = [
        {"unit": json.dumps([unit.batch_size, [id_of(item) for item in unit.items]])}
        for unit in units
    ]
    threads = max(1, int(engine.cpus))
    how = ray.put(packed), job.folder.rank, engine.time_limit_s, gpus, threads, os.getcwd()
    return ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        RayWorker,
        fn_constructor_args=how,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            min_size=low, max_size=high, max_tasks_in_flight_per_actor=AHEAD
        ),
        num_cpus=engine.cpus,
        num_gpus=gpus,
    )


def _refuse_more_than_there_is(ray: Any, gpus: float, cpus: float) -> None:
    """Refuses a worker that no machine has room for; Ray would wait for one without a word.

    Raises:
        OptionError: There is no such machine.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("GPU", 0) >= gpus and node.get("CPU", 0) >= cpus for node in nodes):
        most = {name: max(node.get(name, 0) for node in nodes) for name in ("GPU", "CPU")}
        raise OptionError(
            f"a worker needs {gpus:g} GPUs and {cpus:g} CPUs, and no machine of the cluster has "
            f"more than {most['GPU']:g} and {most['CPU']:g}; give other --gpus-per-worker and "
            "--cpus-per-worker"
        )


@contextlib.contextmanager
def _cluster(ray: Any, engine: Engine, size: int) -> Iterator[None]:
    """Joins the cluster that ``RAY_ADDRESS`` names, or starts one of this machine, if need be."""
    if ray.is_initialized():
        yield
        return
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    how: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": console.tells_all}
    if not os.environ.get("RAY_ADDRESS"):
        slots = engine.bounds[1] * engine.cpus + 2
        how |= {
            "address": "local",
            "num_cpus": max(FEWEST_CPUS, os.cpu_count() or 1, int(slots + 0.99)),
            "object_store_memory": STORE + 2 * size,
            "include_dashboard": False,
        }
    before = signal.getsignal(signal.SIGTERM)
    with _explained(ray, None):
        ray.init(**how)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray takes it for itself
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _explained(ray: Any, job: Job | None) -> Iterator[None]:
    """Converts an error of Ray's own into one that says what to do."""
    try:
        yield
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        text = " ".join(str(error).split())
        then = (
            f"what is done is in {job.folder.folder}; go on with --resume"
            if job
            else "check RAY_ADDRESS, or leave it out to use this machine alone"
        )
        raise MMDecodeError(f"Ray failed: {type(error).__name__}: {text[:400]}; {then}") from error
