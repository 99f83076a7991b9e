"""`Engine`: where the units of work of a folder are decoded; the results do not depend on it."""

from __future__ import annotations

import os
import pickle
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from mmdecode.errors import InputError, OptionError, UnknownNameError

if TYPE_CHECKING:
    from mmdecode.runs.journal import Journal
    from mmdecode.runs.units import Prepared, Unit

LOCAL = "local"
ENGINES = {
    LOCAL: "mmdecode.runs.work:in_this_process",
    "processes": "mmdecode.runs.processes:in_processes",
    "ray": "mmdecode.runs.ray_data:on_ray",
}
"""Engines by name, as ``module:FUNCTION``."""
TIME_LIMIT_S = 600.0
"""Seconds without progress after which a worker ends."""


@dataclass(frozen=True)
class Engine:
    """Where and by how many workers units of work are decoded.

    A worker loads the model once. One that ends, or makes no progress for too long, is replaced,
    and what it was decoding is decoded again, item by item, see `mmdecode.runs.crashes`.

    Attributes:
        name: ``local``: this process; ``processes``: worker processes of this machine, see
            `mmdecode.runs.processes`; ``ray``: workers of a Ray cluster, or of this machine if
            there is none, see `mmdecode.runs.ray_data`.
        workers: Number of workers; for Ray also ``MIN:MAX``. ``None``: one per GPU, or two.
        time_limit_s: Seconds without progress after which a worker ends.
        gpus: GPUs of a worker, for Ray; a fraction lets workers share one, whose memory they have
            to share, too. ``None``: 1 if the cluster has any.
        cpus: CPUs of a worker, for Ray.

    Raises:
        UnknownNameError: There is no engine of that name.
        OptionError: Another value is not valid, or does nothing with this engine.
    """

    name: str = LOCAL
    workers: int | str | None = None
    time_limit_s: float = TIME_LIMIT_S
    gpus: float | None = None
    cpus: float = 1

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise UnknownNameError.of("engine", self.name, ENGINES)
        if self.name == "processes" and sys.platform == "win32":
            raise OptionError("--engine processes needs Linux or macOS; leave it out")
        low, high = (1, 1) if self.workers is None else self.bounds
        if not 1 <= low <= high:
            raise OptionError(
                f"{self.workers!r} workers; expected a number from 1 on, or with --engine ray "
                "MIN:MAX, such as 2:16"
            )
        if low < high and self.name != "ray":
            raise OptionError(f"{self.workers} workers need --engine ray; give one number")
        if self.time_limit_s <= 0 or self.cpus <= 0 or (self.gpus or 0) < 0:
            raise OptionError("time limit, GPUs and CPUs of a worker are positive numbers")
        idle = ["--workers"] * (self.workers is not None and self.name == LOCAL)
        idle += ["--time-limit"] * (self.time_limit_s != TIME_LIMIT_S and self.name == LOCAL)
        if self.name != "ray":
            idle += ["--gpus-per-worker"] * (self.gpus is not None)
            idle += ["--cpus-per-worker"] * (self.cpus != 1)
        if idle:
            raise OptionError(f"{' and '.join(idle)} does nothing with --engine {self.name}")

    @property
    def bounds(self) -> tuple[int, int]:
        """Smallest and largest number of workers."""
        if self.workers is None:
            import torch

            count = torch.cuda.device_count() or 2
            return count, count
        found = re.fullmatch(r"(\d+)(?::(\d+))?", str(self.workers))
        return (int(found[1]), int(found[2] or found[1])) if found else (0, 0)

    @property
    def count(self) -> int:
        """Largest number of processes that decode."""
        return 1 if self.name == LOCAL else self.bounds[1]

    def decode(
        self, job: Job, units: Sequence[Unit[Any]], meter: Callable[[float], None]
    ) -> Iterator[tuple[str, Any]]:
        """Decodes units; yields id and result of each item, some twice, see `work.decoded`.

        Args:
            job: The job, whose folder is open.
            units: The units.
            meter: Called with the increase of what `Journal.measure` names.
        """
        found: Iterator[tuple[str, Any]] = pkgutil.resolve_name(ENGINES[self.name])(
            self, job, units, meter
        )
        return found


def engine_of(given: Mapping[str, Any]) -> Engine:
    """Returns the engine that a command's options describe.

    Args:
        given: All options by name; ``engine`` is the engine's name, others are its attributes.

    Raises:
        UnknownNameError: There is no engine of that name.
        OptionError: An option is not valid, or does not go with workers.
    """
    own = (one for one in fields(Engine) if one.name != "name")
    how = {one.name: given.get(one.name, one.default) for one in own}
    engine = Engine(given.get("engine", LOCAL), **how)
    if engine.name == LOCAL:
        return engine
    if given.get("device_map") or re.fullmatch(r"cuda:\d+", given.get("device") or ""):
        raise OptionError(
            f"--engine {engine.name} gives each worker a GPU of its own; leave out --device-map, "
            "and the number of --device"
        )
    if "LOCAL_RANK" in os.environ:
        raise OptionError(
            f"a launcher started several processes, and each would start workers for --engine "
            f"{engine.name}; leave out one of both"
        )
    return engine


@dataclass
class Job:
    """A folder and the loader of the model, for workers.

    Attributes:
        folder: The folder.
        load: Loads the model.
        prepared: State of the folder before the run.
        stats: Counters of the decoders, one dictionary for each, see `mmdecode.engine.stats`.
    """

    folder: Journal[Any]
    load: Callable[[], Any]
    prepared: Prepared
    stats: list[dict[str, Any]]

    def packed(self, how: Any = pickle) -> bytes:
        """Returns the job for other processes.

        Args:
            how: Module with ``dumps``.

        Raises:
            InputError: It cannot be pickled.
        """
        home = getattr(getattr(self.load, "func", self.load), "__module__", None)
        try:
            if how is pickle and home == "__main__":
                raise AttributeError("the function is in a script, which they do not run")
            data: bytes = how.dumps((self.folder, self.load, self.prepared._replace(work=[])))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"workers cannot be given the job: {error}; expected a function of a module to "
                "load the model, and no lambda or function of a script"
            ) from error
        return data
