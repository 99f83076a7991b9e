"""Sharing of one job by several processes that ``accelerate launch`` or ``torchrun`` started.

Each process creates a `Team`. Without a launcher there is one process, and neither accelerate nor
torch.distributed is used.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmdecode.errors import MissingExtraError, MMDecodeError, OptionError


class Team:
    """The processes of one run, and the rank of this one.

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
        """Whether this is the process of rank 0, which reports and merges the results."""
        return self.rank == 0

    def refuse_alone(self, folder: Path | None) -> None:
        """Refuses what only one process can do.

        Args:
            folder: Folder of the results; ``None``: they are printed, or standard input is read.

        Raises:
            OptionError: There are several processes and no folder.
        """
        if self.size > 1 and folder is None:
            raise OptionError(
                f"{self.size} processes share the work, so they can neither read standard input "
                "nor print the results; give --out, and files instead of '-'"
            )

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


def share_out(sizes: Sequence[float], count: int) -> list[list[int]]:
    """Distributes items over processes: largest first, each to the process with the least work.

    Args:
        sizes: Size of each item, such as its duration.
        count: Number of processes.

    Returns:
        Indices of the items of each process, ascending.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0.0, 0, rank) for rank in range(count)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, pieces, rank = min(loads)
        loads[rank] = (load + sizes[index], pieces + 1, rank)
        shares[rank].append(index)
    return [sorted(share) for share in shares]
