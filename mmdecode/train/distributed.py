"""Device, precision and processes of a training run.

In bf16 and fp16 the frozen target model has half-precision weights, losses are computed under
autocast, and the trained weights stay in float32. In fp16 the loss is scaled, and a step whose
gradients overflow is skipped. If ``accelerate launch`` starts several processes, each computes the
gradients of its own batch, all take the step with the mean of these gradients, and the process of
rank 0 evaluates and writes files.

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
    """Returns the name in `PRECISIONS` of a dtype.

    Args:
        dtype: Dtype as users give it, such as ``auto``; see `mmdecode.checkpoints.dtype_of`.
        model_id: Name of the target model.
        device: Device of the training.

    Raises:
        OptionError: There is no such dtype.
    """
    kind = dtype_of(dtype, model_id, device)
    return next(name for name, one in PRECISIONS.items() if one == kind)


class Alone:
    """Training in one process, in float32.

    Attributes:
        precision: One of `PRECISIONS`.
        rank: Rank of this process, from 0.
        size: Number of processes.
        scaler: Loss scaler, a ``torch.amp.GradScaler``; ``None``: losses are not scaled.
    """

    precision = "fp32"
    rank, size = 0, 1
    scaler: Any = None

    def batch_index(self, step: int) -> int:
        """Returns the index of the batch that this process uses at a step."""
        return self.size * step + self.rank

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context in which losses are computed; without effect in this class."""
        return nullcontext()

    def first(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` in one process and returns its result."""
        return work()

    def backward(self, loss: Tensor, learner: nn.Module) -> None:
        """Computes the gradients of a loss."""
        loss.backward()

    def step(self, learner: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Clips gradients to norm 1, takes an optimizer step and clears the gradients."""
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
    """One of the processes of a training run, with its device and precision.

    Args:
        device: Requested device; ``None``: CUDA if it is available. With several processes and no
            device, or ``cuda``, each process uses its own GPU.
        precision: One of `PRECISIONS`.

    Attributes:
        device: Device of this process.

    Raises:
        MissingExtraError: Half precision or several processes are requested, and accelerate is not
            installed.
        OptionError: The device does not support training in this precision.
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
            raise OptionError("precision 'fp16' is not supported on a CPU; use bf16 or fp32")
        with MissingExtraError.instead(
            f"training in {self.precision} needs accelerate", extra="train"
        ):
            from accelerate import Accelerator
            from accelerate.state import AcceleratorState
        # Accelerator's state is global: it would keep the precision of the first one created
        AcceleratorState._reset_state(reset_partial_state=self.size == 1)
        try:
            return Accelerator(cpu=on_cpu, mixed_precision=self.precision)
        except ValueError as error:
            raise OptionError(
                f"device {self.device!r} does not support {self.precision}: {error}"
            ) from error

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context in which losses are computed: autocast to the precision."""
        return nullcontext() if self._accelerator is None else self._accelerator.autocast()

    def first(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` in the process of rank 0; returns its result in all processes."""
        return self._team.first(work)

    def leave(self) -> None:
        """Leaves the process group, at the end of the training."""
        self._team.leave()

    def backward(self, loss: Tensor, learner: nn.Module) -> None:
        """Computes the mean gradients of all processes, scaled if there is a scaler."""
        super().backward(loss if self.scaler is None else self.scaler.scale(loss), learner)
        if self.size == 1:
            return
        from accelerate.utils import reduce

        for parameter in learner.parameters():
            if parameter.requires_grad:  # unused in this batch, maybe used in another's
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = reduce(own, "mean")
