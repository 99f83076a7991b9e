"""`read_ahead`: threads read files of the next batch on CPUs while a batch is decoded."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

Source = TypeVar("Source", bound=Any)

BLOCKS = 4
"""Blocks of a recording that are read ahead; each has 2**18 samples, 1 MiB."""
MOST_THREADS = 4
"""Threads that read; no more than the machine has processors."""


class _Ahead:
    """Sources in the order in which they will be read."""

    def __init__(self, sources: Sequence[Any], count: int) -> None:
        self._sources, self._count, self._next = sources, count, 0
        self._begun: dict[int, Future[Any]] = {}
        threads = min(MOST_THREADS, os.cpu_count() or 1, count)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")

    def read(self, index: int, *how: Any) -> Any:
        """Reads a source, and has those after it read."""
        known = self._begun.pop(index, None)
        self._next = max(self._next, index + 1)
        for later in range(self._next, min(index + 1 + self._count, len(self._sources))):
            self._begun[later] = self._pool.submit(_begin, self._sources[later], how)
            self._next = later + 1
        for passed in [one for one in self._begun if one < index]:  # it was not needed
            self._begun.pop(passed).cancel()
        return known.result() if known else self._sources[index].read(*how)


def read_ahead(sources: Sequence[Source], count: int) -> list[Source]:
    """Returns copies of sources, each of which is read ahead once one before it has been read.

    Errors of reading are raised where the source is read. If a source yields blocks, the first
    `BLOCKS` are read ahead, so that long recordings take no more memory.

    Args:
        sources: Dataclasses with a function ``read``, in the order in which they will be read.
        count: Number of sources that are read ahead at a time.
    """
    ahead = _Ahead(sources, count)
    return [replace(one, read=partial(ahead.read, index)) for index, one in enumerate(sources)]


def _begin(source: Any, how: Sequence[Any]) -> Any:
    """Reads a source, or its first blocks if it yields blocks."""
    content = source.read(*how)
    if not isinstance(content, Iterator):
        return content
    blocks: list[Any] = []
    end: Iterator[Any] = iter(())
    try:
        blocks.extend(itertools.islice(content, BLOCKS))
    except Exception as error:  # raised after the blocks before it, as without this
        end = _raising(error)
    return itertools.chain(blocks, end, content)


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield
