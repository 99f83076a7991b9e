"""`Tape`: records and replays torch operations like a CUDA graph, without a GPU, for tests.

A CUDA graph replays kernels on fixed addresses and runs no Python. A tape does the same: it records
the operations of a call with the tensors that they read; a replay runs them again, and writes each
result into the tensor of the first run. Code that would be wrong in a graph, since it keeps a
result in a new tensor or decides something in Python, is therefore wrong here too. A tape refuses
operations that a graph does not support: reading a value on the host, results whose size depends
on values, and tensors made from Python values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


REFUSED = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "lift_fresh")
)


class Tape(TorchDispatchMode):
    """Records the torch operations inside the context.

    Raises:
        RuntimeError: An operation is not supported by CUDA graphs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        masks = name.startswith("index") and any(i.dtype == torch.bool for i in _tensors(args[1:2]))
        if name in REFUSED or masks:
            raise RuntimeError(f"{name}{' with a mask' * masks} does not fit a graph")
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, _tensors(result)))
        return result

    def replay(self) -> None:
        """Runs all operations again, and writes each result into the tensor of the first run."""
        for func, args, kwargs, outputs in self.calls:
            for output, value in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                if output.data_ptr() != value.data_ptr():
                    output.copy_(value)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def record(
    call: Callable[[], T], device: Any = None, pool: Any = None
) -> tuple[T, Callable[[], None], Any]:
    """Records a call on a tape; tests use it in place of `mmdecode.engine.capture.record`.

    Recording already computes the result, so the first replay does nothing.

    Args:
        call: Function whose operations are recorded.
        device: Not used.
        pool: Memory pool, which is returned unchanged.

    Returns:
        Result of the call, function that replays it, and the pool.
    """
    with Tape() as tape:
        result = call()
    replays: Iterator[Callable[[], None]] = iter([lambda: None])
    return result, lambda: next(replays, tape.replay)(), pool
