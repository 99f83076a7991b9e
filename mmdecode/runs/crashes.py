"""Files that crash the library that decodes them, and with it the process.

Files are read in the process itself: among ten thousand broken recordings none crashed libsndfile
or FFmpeg. Instead an `InFlight` next to the results records which file is being read. If a run
died, later runs first read that file in a separate process, and a file that crashes this process is
a failure like any other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from mmdecode.errors import InputError

OFTEN = 2


Item = TypeVar("Item")


class InFlight:
    """A file with the names of the inputs that crashed earlier runs, and of the one being read.

    Args:
        path: Path of the file; removed after a run that leaves no suspect.
        suspects: Names of inputs that crashed earlier runs, see `suspects_in`.
    """

    def __init__(self, path: Path, suspects: Iterable[str] = ()) -> None:
        self.suspects = dict.fromkeys(suspects)
        self._path = path
        self._file = path.open("wb", buffering=0)
        self._note()

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Records a name while the context is open."""
        self._note(name)
        try:
            yield
        finally:
            self._note()

    def cleared(self, name: str) -> None:
        """Removes a name from the suspects, since its file was read to the end."""
        self.suspects.pop(name, None)
        self._note()

    def close(self) -> None:
        """Called when the process ends normally."""
        self._file.close()
        if not self.suspects:
            self._path.unlink(missing_ok=True)

    def _note(self, *name: str) -> None:
        self._file.seek(0)
        self._file.truncate()
        names = dict.fromkeys([*self.suspects, *name])
        self._file.write(b"\0".join(map(os.fsencode, names)))


class Batches:
    """A file of the items being decoded, which remains if the system kills the process.

    Being killed, for example for lack of memory, cannot be caught. The next run decodes the items
    of that batch one by one; an item during which a process was killed `OFTEN` times alone is a
    failure.

    Args:
        path: Path of the file; removed after a run that leaves no item.
        alone: Items during which earlier runs were killed, see `ended_over`.

    Attributes:
        alone: Items to decode one by one, and how often a process was killed during each alone.
    """

    def __init__(self, path: Path, alone: Mapping[str, int]) -> None:
        self.alone = dict(alone)
        self._journal = InFlight(path)
        self._write([])

    @contextmanager
    def decoding(self, names: Sequence[str]) -> Iterator[None]:
        """Records a batch while the context is open; see `mmdecode.runs.items.Watch`."""
        self._write(list(dict.fromkeys(names)))
        try:
            yield
        finally:
            self._write([])

    def problem(self, name: str) -> str | None:
        """Why an item is not decoded again; ``None``: it is decoded."""
        if self.alone.get(name, 0) < OFTEN:
            return None
        return (
            f"{name}: the system ended the process {self.alone[name]} times while this was decoded "
            "alone, most likely for want of memory; make it shorter, or run where there is more"
        )

    def cleared(self, name: str) -> None:
        """Removes an item, which has its result or is a failure."""
        if self.alone.pop(name, None) is not None:
            self._write([])

    def close(self) -> None:
        """Called when the process ends normally."""
        self._journal.suspects = dict.fromkeys(self.alone)
        self._journal.close()

    def _write(self, batch: list[str]) -> None:
        self._journal._note(json.dumps({"alone": self.alone, "batch": batch}))


def ended_over(notes: Iterable[Path], todo: Collection[str]) -> dict[str, int]:
    """Items during which processes of earlier runs were killed, and how often each alone.

    Args:
        notes: Files of `Batches`, one for each process of the last run.
        todo: Items that are still to be decoded; others are ignored.
    """
    alone: dict[str, int] = {}
    batches: list[list[str]] = []
    for text in suspects_in(notes):
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            found = json.loads(text)
            for name, count in found["alone"].items():
                alone[name] = max(count, alone.get(name, 0))
            batches.append(found["batch"])
    for batch in batches:
        for name in batch:
            alone[name] = alone.get(name, 0) + (len(batch) == 1)
    return {name: count for name, count in alone.items() if name in todo}


def in_groups(
    items: Sequence[Item], alone: Mapping[str, int], name: Callable[[Item], str]
) -> list[list[Item]]:
    """Items to decode together, then one by one those during which a process was killed.

    Args:
        items: Items to decode.
        alone: See `Batches`.
        name: Names an item in the notes.
    """
    single = [item for item in items if name(item) in alone]
    single.sort(key=lambda item: alone[name(item)])
    return [[item for item in items if name(item) not in alone], *([item] for item in single)]


def suspects_in(journals: Iterable[Path]) -> list[str]:
    """Names in journals of processes that died; a journal that does not exist has none."""
    parts = [p for path in journals if path.exists() for p in path.read_bytes().split(b"\0")]
    return [os.fsdecode(name) for name in dict.fromkeys(filter(None, parts))]


def read_apart(code: str, path: str, hint: str) -> None:
    """Reads a file in another process, to see whether it crashes.

    Args:
        code: Python that reads the file named by its first argument, and ends normally if it is
            unreadable.
        path: Path of the file.
        hint: Advice on a file that crashes, for the message.

    Raises:
        InputError: The process crashed. A process that failed in another way says nothing about
            the file.
    """
    command = [sys.executable, "-c", code, path]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    # a signal, or on Windows a status of the system's that is an error
    if done.returncode < 0 or done.returncode >= 0xC0000000:
        raise InputError(
            f"{path}: crashes the library that decodes it (exit code {done.returncode}); {hint}, "
            "or copy or download it again"
        )
