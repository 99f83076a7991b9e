"""Where a training runs: on which device, in which precision, and how many processes share it.

In half precision the target's weights are half, losses are computed under autocast and what learns
keeps its weights in float32; in fp16 the loss is scaled before it is differentiated, and a step
whose gradients overflow is left out. Several processes, as ``accelerate launch`` starts them, learn
from a batch each and step by the mean of their gradients; one of them judges and writes.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mmdecode.checkpoints import dtype_of
from mmdecode.errors import MissingExtraError, OptionError, UnknownNameError
from mmdecode.runs.distributed import Team

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_of(dtype: str, model_id: str, device: str) -> str:
    """The one of `PRECISIONS` that a dtype names; see `mmdecode.checkpoints.dtype_of`.

    Raises:
        OptionError: It names none.
    """
    kind = dtype_of(dtype, model_id, device)
    return next(name for name, one in PRECISIONS.items() if one == kind)


class Alone:
    """The neutral setting: one process, in float32.

    Attributes:
        precision: One of `PRECISIONS`.
        rank: Rank of this process, from 0.
        size: Processes in all.
        scaler: Scaler of losses, ``torch.amp.GradScaler``; ``None``: they are not scaled.
    """

    precision = "fp32"
    rank, size = 0, 1
    scaler: Any = None

    def place(self, step: int) -> int:
        """Number of this process's batch of a step."""
        return self.size * step + self.rank

    def autocast(self) -> AbstractContextManager[Any]:
        """For losses."""
        return nullcontext()

    def first(self, work: Callable[[], Any]) -> Any:
        """Result of what one process does for all."""
        return work()

    def backward(self, loss: Tensor, learner: nn.Module) -> None:
        """Leaves gradients, perhaps scaled."""
        loss.backward()

    def step(self, learner: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Steps with gradients clipped to norm 1, and clears them."""
        for optimizer in optimizers if self.scaler is not None else ():
            self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        for optimizer in optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        if self.scaler is not None:
            self.scaler.update()


class Worker(Alone):
    """A process of a training that others may share.

    Args:
        device: ``None``: CUDA where there is one. Each of several processes has its own.
        precision: One of `PRECISIONS`.

    Attributes:
        device: Device of this process.

    Raises:
        MissingExtraError: Half precision or several processes, and accelerate is not installed.
        OptionError: The device cannot learn in this precision.
        UnknownNameError: There is no such precision.
    """

    def __init__(self, device: str | None = None, precision: str = "fp32") -> None:
        if precision not in PRECISIONS:
            raise UnknownNameError.of("precision", precision, PRECISIONS)
        self._team = Team(device)
        self.rank, self.size = self._team.rank, self._team.size
        self.device = self._team.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.precision = precision
        self._accelerator = None
        if precision != "fp32":
            self._accelerator = self._accelerated()
            self.scaler = self._accelerator.scaler

    def _accelerated(self) -> Any:
        on_cpu = self.device == "cpu"
        if on_cpu and self.precision == "fp16":
            raise OptionError(
                "precision 'fp16' on a CPU, where gradients cannot be scaled; use bf16 or fp32"
            )
        try:
            from accelerate import Accelerator
            from accelerate.state import AcceleratorState
        except ImportError as error:
            raise MissingExtraError(
                f"training in {self.precision} needs accelerate", extra="train"
            ) from error
        # it keeps the precision of the process's first one, which may be another
        AcceleratorState._reset_state(reset_partial_state=self.size == 1)
        try:
            return Accelerator(cpu=on_cpu, mixed_precision=self.precision)
        except ValueError as error:
            raise OptionError(
                f"device {self.device!r} cannot learn in {self.precision}: {error}"
            ) from error

    def autocast(self) -> AbstractContextManager[Any]:
        """In the precision."""
        return nullcontext() if self._accelerator is None else self._accelerator.autocast()

    def first(self, work: Callable[[], Any]) -> Any:
        """Result of what the leading process does while the others wait."""
        return self._team.first(work)

    def leave(self) -> None:
        """No more steps together."""
        self._team.leave()

    def backward(self, loss: Tensor, learner: nn.Module) -> None:
        """Leaves the mean of the gradients of all processes, perhaps scaled."""
        super().backward(loss if self.scaler is None else self.scaler.scale(loss), learner)
        if self.size == 1:
            return
        from accelerate.utils import reduce

        for parameter in learner.parameters():
            if parameter.requires_grad:  # what one batch does not reach another may
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = reduce(own, "mean")
