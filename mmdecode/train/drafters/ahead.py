"""Prefetching of training data in other processes while earlier steps are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")


class _Made(Dataset[T]):
    """Data set whose item at an index is the result of a function of the index."""

    def __init__(self, make: Callable[[int], T], steps: int) -> None:
        self.make = make
        self.steps = steps

    def __getitem__(self, step: int) -> T:
        return self.make(step)

    def __len__(self) -> int:
        return self.steps


def _as_made(made: T) -> T:
    """Returns data unchanged, in the place of a collate function."""
    return made


class Ahead(Generic[T]):
    """Prefetcher of the data of consecutive steps, starting at any step.

    Args:
        make: Computes the data of a step; must depend only on the step.
        steps: Number of steps.
        workers: Number of processes; 0: data are computed in this process when requested.
    """

    def __init__(self, make: Callable[[int], T], steps: int, workers: int = 0) -> None:
        self.made = _Made(make, steps)
        self.workers = workers
        self._next = -1
        self._coming: Iterator[T] = iter(())

    def __call__(self, step: int) -> T:
        """Returns the data of a step; a step out of order restarts the prefetching."""
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
