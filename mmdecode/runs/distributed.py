"""Several processes for one job: `Team` for training, `Shard` for the units of work of a folder.

Processes of a training talk to each other and end together. Processes that write to one folder do
not: each decodes its share of the units whenever it runs, and the last one merges the results.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmdecode.errors import MissingExtraError, MMDecodeError, OptionError


class Team:
    """The processes of one training that a launcher started, and the rank of this one.

    Without a launcher there is one process, and neither accelerate nor torch.distributed is used.

    Args:
        device: Requested device; ``None``: CUDA if it is available.

    Attributes:
        rank: Rank of this process, from 0.
        size: Number of processes.
        device: Device of this process; in a run of one process, the requested device.

    Raises:
        MissingExtraError: A launcher started several processes, and accelerate is not installed.
    """

    def __init__(self, device: str | None = None) -> None:
        self.rank, self.size, self.device = 0, 1, device
        launched = "LOCAL_RANK" in os.environ and "RANK" in os.environ
        if not launched or int(os.environ.get("WORLD_SIZE", 1)) < 2:
            return
        with MissingExtraError.instead(
            "sharing a job among processes needs accelerate", extra="train"
        ):
            from accelerate import PartialState
        import torch

        on_cpu = device == "cpu" or not torch.cuda.is_available()
        # processes that finish first wait for the others, for any time
        state = PartialState(cpu=on_cpu, timeout=datetime.timedelta(days=30))
        self.rank, self.size = state.process_index, state.num_processes
        if device in (None, "cuda"):
            self.device = str(state.device)

    @property
    def leads(self) -> bool:
        """Whether this is the process of rank 0, which reports."""
        return self.rank == 0

    def first(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` in the process of rank 0 and returns its result in all processes.

        Raises:
            MMDecodeError: ``work`` failed. The process of rank 0 raises the error of ``work``
                itself.
        """
        problem, result = None, None
        if self.leads:
            try:
                result = work()
            except Exception as error:
                problem = error
        succeeded, result = self.gather((problem is None, result))[0]
        if not succeeded:
            raise problem or MMDecodeError("the process of rank 0 failed; its own error says why")
        return result

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes, in order of rank; every process must call it."""
        if self.size == 1:
            return [value]
        from accelerate.utils import gather_object

        return gather_object([value])

    def leave(self) -> None:
        """Leaves the process group."""
        if self.size > 1:
            from accelerate import PartialState

            PartialState().destroy_process_group()


@dataclass(frozen=True)
class Shard:
    """A share of a job's units of work: every ``count``-th one, from that of ``index``.

    Attributes:
        index: From 1.
        count: Number of shares.
    """

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def shard_of(text: str | None) -> Shard | None:
    """Returns the share that a process decodes; ``None``: everything.

    Args:
        text: The share as ``INDEX/COUNT``, from ``1/COUNT``; ``None``: that of the environment, in
            which accelerate, torchrun and SLURM's arrays number their processes.

    Raises:
        OptionError: ``text`` is not a share.
    """
    if text is None:
        text = _launched()
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count:
        raise OptionError(
            f"{text!r} is no share of a job; expected INDEX/COUNT with INDEX "
            "from 1 to COUNT, such as 1/4"
        )
    return Shard(index, count) if count > 1 else None


def _launched() -> str:
    def number(name: str, default: int) -> int:
        return int(os.environ.get(name) or default)

    if "LOCAL_RANK" in os.environ and "RANK" in os.environ:
        return f"{number('RANK', 0) + 1}/{number('WORLD_SIZE', 1)}"
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        first, step = number("SLURM_ARRAY_TASK_MIN", 0), number("SLURM_ARRAY_TASK_STEP", 1)
        index = (number("SLURM_ARRAY_TASK_ID", 0) - first) // step
        return f"{index + 1}/{number('SLURM_ARRAY_TASK_COUNT', 1)}"
    return "1/1"


def local_device(device: str | None) -> str | None:
    """Returns the device of this process, if a launcher started one for each GPU of a machine.

    Args:
        device: The device that was asked for; one with a number stays.
    """
    rank = os.environ.get("LOCAL_RANK")
    if rank is None or device not in (None, "auto", "cuda"):
        return device
    import torch

    count = torch.cuda.device_count()
    return f"cuda:{int(rank) % count}" if count else device
