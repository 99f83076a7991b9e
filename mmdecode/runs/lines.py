"""`Lines`: which line of several files counts for each item, in little memory for each."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from mmdecode.errors import InputError
from mmdecode.runs.locks import lock

RESULTS, PARTS = "results.jsonl", "parts"
CHUNK = 1 << 16
OPEN = 100
"""Number of files that stay open; others are opened for each line."""
WAIT_S = 20.0
"""Seconds in which the workers of a killed process end."""


class Kind(Protocol):
    """A kind of results, see `mmdecode.runs.journal.Journal`."""

    @property
    def what(self) -> str:
        """A result in words, for messages."""

    @property
    def again(self) -> str:
        """Consequence of ``--resume`` for a line that is removed, for messages."""

    def check_line(self, line: Mapping[str, Any]) -> str:
        """Returns the id in a line."""


class Lines:
    """The line that counts for each id in files: its last result, or else its last error.

    Only positions are kept, since the lines of a large job do not fit into memory. The first files
    stay open until `close`, so that lines can be read even where the files have been replaced.

    Args:
        paths: Paths of the files; those that are missing are left out.
        kind: Kind of the results.
        check: Called with each id and the content of each line.

    Attributes:
        failed: Ids whose line is an error.

    Raises:
        InputError: A line is no result.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        kind: Kind,
        check: Callable[[str, dict[str, Any]], object] = lambda name, line: None,
    ) -> None:
        self.failed: set[str] = set()
        self._starts: dict[str, int] = {}  # as if the files were one
        self._files: list[tuple[int, Path]] = []
        self._open: dict[int, BinaryIO] = {}
        try:
            end = 0
            for path in filter(Path.exists, paths):
                self._files.append((end, path))
                with self._opened(len(self._files) - 1) as file:
                    whole = itertools.takewhile(lambda line: line.endswith(b"\n"), file)
                    for raw, name, line in lines_in(path, whole, kind):
                        check(name, line)
                        self._add(name, end, "error" in line)
                        end += len(raw)
        except BaseException:
            self.close()
            raise

    def _add(self, name: str, start: int, failed: bool) -> None:
        if not failed:
            self.failed.discard(name)
        elif name not in self._starts or name in self.failed:
            self.failed.add(name)
        else:
            return
        self._starts[name] = start

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, name: object) -> bool:
        return name in self._starts

    def __iter__(self) -> Iterator[str]:
        """Ids in the order of their first lines."""
        return iter(self._starts)

    def remove(self, names: Iterable[str]) -> None:
        """Removes ids that are no longer wanted."""
        for name in names:
            self._starts.pop(name, None)
            self.failed.discard(name)

    def ordered(self, first: Collection[str]) -> Iterator[str]:
        """Yields the ids in a given order, then all others."""
        yield from (name for name in first if name in self)
        yield from (name for name in self if name not in first)

    def read(self, names: Iterable[str]) -> Iterator[bytes]:
        """Yields the lines of ids."""
        for name in names:
            start = self._starts[name]
            number = bisect.bisect_right(self._files, start, key=lambda pair: pair[0]) - 1
            with self._opened(number) as file:
                file.seek(start - self._files[number][0])
                line = file.readline()
            yield line

    @contextlib.contextmanager
    def _opened(self, number: int) -> Iterator[BinaryIO]:
        """Context with a file, which then stays open if it is one of the first `OPEN`."""
        file = self._open.get(number) or self._files[number][1].open("rb")
        if number < OPEN:
            self._open[number] = file
        try:
            yield file
        finally:
            if number >= OPEN:
                file.close()

    def close(self) -> None:
        """Closes the files."""
        for file in self._open.values():
            file.close()


def lines_in(
    path: Path, lines: Iterable[bytes], kind: Kind
) -> Iterator[tuple[bytes, str, dict[str, Any]]]:
    """Yields lines of a file, the ids in them, and their contents.

    Raises:
        InputError: A line is no result.
    """
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            name = kind.check_line(found)
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{path}, line {number} is not {kind.what}; remove the line, and --resume "
                f"{kind.again}"
            ) from None
        yield line, name, found


def written_in(folder: Path) -> list[Path]:
    """Returns the paths of the files of lines in a folder, of which the first may be missing."""
    return [folder / RESULTS, *sorted((folder / PARTS).glob("*.jsonl"))]


def ended(folder: Path) -> list[Path]:
    """Returns the paths of the files of lines in a folder, none of which is written to any more.

    Raises:
        OptionError: A file is being written to; workers of a killed process are waited for.
    """
    written = [path for path in written_in(folder) if path.exists()]
    for path in written:
        with path.open("r+b") as file:
            lock(file.fileno(), folder, WAIT_S)
    return written


def drop_torn(path: Path) -> None:
    """Cuts off what a process that was killed has written of a line, for others to go on."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(end - CHUNK, 0)
            file.seek(start)
            if (last := file.read(end - start).rfind(b"\n")) >= 0:
                file.truncate(start + last + 1)
                return
            end = start
        file.truncate(0)


def state_of(path: Path) -> tuple[int, int, int]:
    """Inode, size and time of a file, which tell whether it is still as it was."""
    if not path.exists():
        return -1, -1, -1
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns
