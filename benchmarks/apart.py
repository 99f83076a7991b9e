"""An object in a process of its own, so that two OpenMP runtimes do not share one.

After CTranslate2 has run once, everything that torch does in the same process takes up to twice as
long; people who use one of them do not load the other.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

_kept: dict[int, Any] = {}
_numbers = itertools.count()


@dataclass(frozen=True)
class Kept:
    """A result that stays in the other process.

    Attributes:
        number: Its number there.
        shape: Its shape.
    """

    number: int
    shape: tuple[int, ...]


class Apart:
    """An object that another process makes and keeps.

    Args:
        make: A function of a module, which the other process calls.
        *given: Its arguments.
    """

    def __init__(self, make: Callable[..., Any], *given: Any) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._made = self._pool.submit(_keep, make, given).result()

    def call(self, method: str, *given: Any) -> Any:
        """Calls a method of the object there, and returns its result."""
        return self._pool.submit(_call, self._made, method, given).result()

    def keep(self, method: str, *given: Any) -> Kept:
        """Calls a method of the object there, and leaves its result there."""
        return self._pool.submit(_keep, _call, (self._made, method, given)).result()


def _call(owner: Kept, method: str, given: tuple[Any, ...]) -> Any:
    return getattr(_kept[owner.number], method)(*map(_found, given))


def _keep(make: Callable[..., Any], given: tuple[Any, ...]) -> Kept:
    number = next(_numbers)
    _kept[number] = make(*given)
    return Kept(number, tuple(getattr(_kept[number], "shape", ())))


def _found(value: Any) -> Any:
    return _kept[value.number] if isinstance(value, Kept) else value
