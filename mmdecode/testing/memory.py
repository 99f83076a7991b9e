"""Counts the memory of live tensors after every operation, also on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorage(TorchDispatchMode):
    """Counts the bytes of tensors that are created inside the context.

    Tensors that share a storage count once, until the last of them is freed. Memory that an
    operation allocates internally is not counted.

    Attributes:
        bytes: Bytes of the tensors that are alive now.
        peak: Largest value of ``bytes`` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._holders: dict[int, int] = {}  # how many tensors share a storage
        self._known: dict[int, weakref.ref[Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        addresses = {_address(tensor) for tensor in _tensors([args, list((kwargs or {}).values())])}
        given = {address for address in addresses if address not in self._holders}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors([result]):
            if _address(tensor) not in given:  # else a view of what was there before
                self._hold(tensor)
        self.peak = max(self.peak, self.bytes)
        return result

    def _hold(self, tensor: Tensor) -> None:
        name, address, size = id(tensor), _address(tensor), tensor.untyped_storage().nbytes()
        if name in self._known:
            return

        def release(_: Any) -> None:
            del self._known[name]
            self._holders[address] -= 1
            if not self._holders[address]:
                del self._holders[address]
                self.bytes -= size

        self._known[name] = weakref.ref(tensor, release)
        if address not in self._holders:
            self._holders[address] = 0
            self.bytes += size
        self._holders[address] += 1


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
