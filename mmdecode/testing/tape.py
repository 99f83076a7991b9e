"""Capture and replay without a GPU: a round is recorded operation by operation.

A CUDA graph replays kernels on fixed addresses and runs no Python. So does a tape: it holds the
operations of a call with the very tensors that they read, and a replay runs them again and writes
each result to the place of the first. What a round keeps in a new tensor, or decides in Python,
is as wrong here as it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class Tape(TorchDispatchMode):
    """Records what runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, _tensors(result)))
        return result

    def replay(self) -> None:
        """Runs all of it again, each result to its old place."""
        for func, args, kwargs, places in self.calls:
            for place, value in zip(places, _tensors(func(*args, **kwargs)), strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def record(call: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """As `mmdecode.engine.capture.record`; recording computes, so the first replay does nothing."""
    with Tape() as tape:
        result = call()
    replays: Iterator[Callable[[], None]] = iter([lambda: None])
    return result, lambda: next(replays, tape.replay)()
