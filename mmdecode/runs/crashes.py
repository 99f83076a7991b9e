"""Handling of input files that crash the decoding library and so kill the whole process.

Files are read in the main process, since crashes are rare: none of ten thousand broken recordings
crashed libsndfile or FFmpeg. An `InFlight` file next to the results records which input is being
read. If a run died, the next run first reads that input in a separate process; if this process
crashes, the input is reported as failed, like any other unreadable file.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mmdecode.errors import InputError
from mmdecode.runs.lines import PARTS

Source = TypeVar("Source", bound=Any)

READING, DECODING = ".reading-{}.tmp", ".decoding-{}"
"""Names of notes of what a process reads and decodes."""
OFTEN = 2


class InFlight:
    """A file that names the input being read now, and the inputs suspected of crashing runs.

    Args:
        path: Path of the file; it is removed at the end of a run without suspects.
        suspects: Names of the inputs that were being read when earlier runs died; see
            `suspects_in`. A mapping gives a count for each.
    """

    def __init__(self, path: Path, suspects: Iterable[str] | Mapping[str, int] = ()) -> None:
        self.suspects = dict.fromkeys(suspects, 0)
        if isinstance(suspects, Mapping):
            self.suspects |= suspects
        self._path, self._held = path, list[Sequence[str]]()
        self._lock = threading.RLock()
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("wb", buffering=0)
        self._note()

    @contextmanager
    def reading(self, *names: str) -> Iterator[None]:
        """Records the name of an input, or names of several, while the context is open.

        Several contexts may be open, in several threads.
        """
        with self._lock:
            self._held.append(names)
            self._note()
        try:
            yield
        finally:
            with self._lock:
                self._held.remove(names)
                self._note()

    def add(self, suspects: Mapping[str, int]) -> None:
        """Adds suspects; of two counts the larger one stays."""
        with self._lock:
            for name, count in suspects.items():
                self.suspects[name] = max(count, self.suspects.get(name, 0))
            self._note()

    def cleared(self, name: str) -> None:
        """Removes an input from the suspects, after it was read to the end or has a result."""
        with self._lock:
            if self.suspects.pop(name, None) is not None:
                self._note()

    def close(self) -> None:
        """Closes the file, at the normal end of a run; removes it if there are no suspects."""
        self._file.close()
        if not self.suspects:
            self._path.unlink(missing_ok=True)

    def _note(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(self._content())

    def _content(self) -> bytes:
        return b"\0".join(
            map(os.fsencode, dict.fromkeys(itertools.chain(self.suspects, *self._held)))
        )


class Batches(InFlight):
    """A file that names the batch being decoded and remains if the system kills the process.

    A process cannot catch being killed, for example for lack of memory. The next run decodes the
    items of the interrupted batch one by one. An item is a failure once `OFTEN` processes were
    killed while they decoded this item alone.

    Args:
        path: Path of the file; it is removed at the end of a run if no items are left in it.
        alone: Items of interrupted batches and their counts, as `ended_over` returns them.

    Attributes:
        alone: Items to decode one by one; for each, the number of processes that were killed while
            they decoded this item alone.
    """

    def __init__(self, path: Path, alone: Mapping[str, int]) -> None:
        super().__init__(path, alone)
        self.alone = self.suspects

    def decoding(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Records a batch while the context is open; see `mmdecode.runs.items.Watch`.

        An inner context's batch takes the place of an outer one's until it is closed.
        """
        return self.reading(*names)

    def problem(self, name: str) -> str | None:
        """Returns the message for an item that is not tried again; ``None`` if it may be tried."""
        if self.alone.get(name, 0) < OFTEN:
            return None
        return (
            f"{name}: something ended the process {self.alone[name]} times while it decoded this "
            "input alone: the system, most likely for lack of memory, a crash, or the time limit; "
            "shorten the input, or run where more memory is free"
        )

    def _content(self) -> bytes:
        batch = list(dict.fromkeys(self._held[-1])) if self._held else []
        return json.dumps({"alone": self.suspects, "batch": batch}).encode()


def ended_over(notes: Iterable[Path], todo: Collection[str]) -> dict[str, int]:
    """Returns the items of interrupted batches, and how often each was interrupted alone.

    Args:
        notes: Paths of the `Batches` files, one for each process of the last run.
        todo: Names of the items that are still to be decoded; others are ignored.

    Returns:
        By name of each item whose batch was being decoded when a process was killed: how many
        processes were killed while they decoded this item alone.
    """
    alone: dict[str, int] = {}
    for text in suspects_in(notes):
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            found = json.loads(text)
            counts, batch = dict(found["alone"]), found["batch"]
            counts |= {name: counts.get(name, 0) + (len(batch) == 1) for name in batch}
            for name, count in counts.items():  # a process goes on with the counts of earlier ones
                alone[name] = max(count, alone.get(name, 0))
    return {name: count for name, count in alone.items() if name in todo}


def note_of(folder: Path, kind: str, rank: str | None) -> Path:
    """Path of a process's note, which is with its part of the results, if it is not alone."""
    return folder / (PARTS if rank else "") / kind.format(rank or "0")


def notes_in(folder: Path, kind: str, rank: str = "") -> list[Path]:
    """Notes of all processes, or of one and its workers, and those that were collected."""
    ranks = [rank, f"{rank}-*"] if rank else ["*"]
    parts = (path for one in ranks for path in (folder / PARTS).glob(kind.format(one)))
    return sorted([*folder.glob(kind.format(0)), *parts])


def times_begun(path: Path) -> int:
    """Counts in a file how often something was begun, and returns the count.

    Args:
        path: Path of the file, which is removed when it has ended.
    """
    with path.open("ab") as file:
        file.write(b".")
        return file.tell()


def suspects_in(journals: Iterable[Path]) -> list[str]:
    """Returns the names in the `InFlight` files of processes that died; missing files are skipped.

    Args:
        journals: Paths of the files.
    """
    parts = [p for path in journals if path.exists() for p in path.read_bytes().split(b"\0")]
    return [os.fsdecode(name) for name in dict.fromkeys(filter(None, parts))]


def watched(source: Source, journal: InFlight, path: str, code: str, hint: str) -> Source:
    """Wraps a source so that an input that may have crashed an earlier run cannot crash this one.

    The input's name is recorded while it is read, block by block if it has blocks. If an earlier
    run died while reading it, it is first read in a subprocess, whose crash is an ordinary error.

    Args:
        source: Dataclass with the ``name`` of an input, and a function ``read`` that returns its
            content or an iterator over its blocks.
        journal: File with the name of the input being read, and of inputs that ended earlier runs.
        path: Path of the file.
        code: See `read_apart`.
        hint: See `read_apart`.
    """

    def read(*how: Any) -> Any:
        if source.name in journal.suspects:
            read_apart(code, path, hint)
        with journal.reading(source.name):
            content = source.read(*how)
        if isinstance(content, Iterator):
            return in_blocks(content)
        journal.cleared(source.name)
        return content

    def in_blocks(blocks: Iterator[Any]) -> Iterator[Any]:
        while True:
            with journal.reading(source.name):
                block = next(blocks, None)
            if block is None:
                journal.cleared(source.name)
                return
            yield block

    return replace(source, read=read)


def read_apart(code: str, path: str, hint: str) -> None:
    """Reads a file in a separate process, to find out whether reading it crashes.

    Args:
        code: Python code that reads the file named by its first argument.
        path: Path of the file.
        hint: Advice to the user if the file crashes the process, for the message.

    Raises:
        InputError: The process was killed by a signal or crashed, or there is no file but a data
            URL. Errors of Python in the process are ignored.
    """
    if path.startswith("data:"):
        raise InputError(f"{path} ended an earlier run while it was read; leave it out")
    command = [sys.executable, "-c", code, path]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    # a signal, or on Windows a status of the system's that is an error
    if done.returncode < 0 or done.returncode >= 0xC0000000:
        raise InputError(
            f"{path}: crashes the library that decodes it (exit code {done.returncode}); {hint}, "
            "or copy or download the file again"
        )
