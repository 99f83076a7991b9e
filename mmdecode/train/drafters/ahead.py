"""Prefetching of training data: other processes make a step's data while earlier steps run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")


class _Made(Dataset[T]):
    """Results of a function, by index."""

    def __init__(self, make: Callable[[int], T], steps: int) -> None:
        self.make = make
        self.steps = steps

    def __getitem__(self, step: int) -> T:
        return self.make(step)

    def __len__(self) -> int:
        return self.steps


def _as_made(made: T) -> T:
    """Collates nothing: returns the data unchanged."""
    return made


class Ahead(Generic[T]):
    """Prefetches ``make(step)`` for steps in rising order, from any step on.

    Args:
        make: Makes the data of a step; must depend on the step alone.
        steps: Number of steps.
        workers: Number of processes; 0: data are made in this process when requested.
    """

    def __init__(self, make: Callable[[int], T], steps: int, workers: int = 0) -> None:
        self.made = _Made(make, steps)
        self.workers = workers
        self._next = -1
        self._coming: Iterator[T] = iter(())

    def __call__(self, step: int) -> T:
        """Data of ``step``."""
        if step != self._next:
            rest = range(step, len(self.made))
            loader = DataLoader(
                self.made,
                batch_size=None,
                sampler=rest,
                num_workers=self.workers,
                collate_fn=_as_made,
                multiprocessing_context="fork" if self.workers else None,
            )
            self._coming = iter(loader)
        self._next = step + 1
        return next(self._coming)
