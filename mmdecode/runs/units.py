"""Units of work: what a job decodes together, cut from the whole input before anything runs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

UNIT = 8
"""Number of batches in a unit of work."""
SOME = 4
"""Least number of units of each process, if there are enough batches."""
Item = TypeVar("Item", bound=Any)
Work = list[tuple[int, list[str]]]
"""Batch size and ids of each unit of work."""


class Prepared(NamedTuple):
    """State of a folder before a run, which all processes start from.

    Attributes:
        suspects: Names of input files that were being read when an earlier run crashed.
        changed: Ids of items whose input files have changed; their results were removed.
        alone: Ids of items to decode one by one, since a run ended while they were decoded in a
            batch, see `mmdecode.runs.crashes.ended_over`.
        work: The units of work.
        replaced: Whether existing results are deleted when the first new one is written.
    """

    suspects: set[str]
    changed: set[str]
    alone: dict[str, int]
    work: Work
    replaced: bool = False


class Unit(NamedTuple, Generic[Item]):
    """Items that are decoded together, in order, with their batch size."""

    items: list[Item]
    batch_size: int


def cut(earlier: Any, ids: Iterable[str], batch_size: int, shares: int = 1) -> Work:
    """Returns the units of an earlier run that is continued, and new ones for further items.

    Args:
        earlier: Units that the earlier run noted in ``run.json``, if there is one.
        ids: Ids of all items, in order.
        batch_size: Batch size of new units.
        shares: Number of processes among which the work is shared; each should have some units.
    """
    work: Work = []
    with contextlib.suppress(ValueError, KeyError, TypeError):
        work = [(size, names) for size, names in earlier["units"]]
    known = {name for _, names in work for name in names}
    new = [name for name in ids if name not in known]
    fair = len(new) // (batch_size * shares * SOME) if shares > 1 else UNIT
    size = batch_size * min(max(fair, 1), UNIT)
    return work + [(batch_size, new[i : i + size]) for i in range(0, len(new), size)]


def unfinished(
    work: Work,
    given: Mapping[str, Item],
    done: Collection[str],
    *,
    failed: Collection[str],
    alone: Mapping[str, int],
    size: int,
) -> list[Unit[Item]]:
    """Returns the units of work that have an item without a result.

    Items that ended a process come last, each alone; so do items that failed in an earlier run
    whose unit is complete, together.

    Args:
        work: Units of work.
        given: Items by id.
        done: Ids of the items that have a result.
        failed: Ids of the items that failed in an earlier run.
        alone: Ids of the items that ended a process, with the number of processes that each ended
            alone.
        size: Batch size for failed items.
    """
    found: list[Unit[Item]] = []
    again: list[Item] = []
    for batch_size, ids in work:
        names = [name for name in ids if name in given and name not in alone]
        missing = [name for name in names if name not in done]
        if any(name not in failed for name in missing):
            found.append(Unit([given[name] for name in names], batch_size))
        else:
            again += [given[name] for name in missing]
    found += [Unit(again[i : i + size], size) for i in range(0, len(again), size)]
    own = [name for _, ids in work for name in ids if name in given and name not in done]
    ended = sorted((name for name in own if name in alone), key=alone.__getitem__)
    return found + [Unit([given[name]], 1) for name in ended]
