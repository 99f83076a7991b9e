"""Detects input files that have changed since results were computed from them.

A result of a transcription or of questions stores the size and the digest of its input file, taken
before the file was decoded. Rows of evaluations have no such fields; `Noted` keeps the sizes and
digests in a separate file. The file `TIMES` keeps modification times: a file whose size and
modification time are unchanged is not hashed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mmdecode.runs.files import complete_lines, explained, open_append

Source = TypeVar("Source", bound=Any)

TIMES = ".mmdecode-times"
CONTENTS = ".mmdecode-inputs"


class Inputs:
    """Recorded sizes and digests of input files.

    Args:
        folder: Folder of the results; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._times = folder / TIMES
        self._read: dict[str, dict[str, Any] | None] = {}
        self._known: dict[str, tuple[int, int, str]] = {}
        with contextlib.suppress(OSError):
            for line in complete_lines(self._times):
                with contextlib.suppress(ValueError, TypeError):
                    path, size, time, digest = json.loads(line)
                    self._known[path] = size, time, digest

    def content(self, path: str) -> dict[str, Any] | None:
        """Returns size and digest of a file; ``None`` if it is unreadable or no regular file."""
        path = os.path.abspath(path)
        try:
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                return None
            size, time, digest = self._known.get(path, (-1, -1, ""))
            if (size, time) != (found.st_size, found.st_mtime_ns):
                with open(path, "rb") as file:
                    digest = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
                self._known[path] = found.st_size, found.st_mtime_ns, digest
                with open_append(self._times) as times:
                    times.write(json.dumps([path, *self._known[path]]).encode() + b"\n")
        except OSError:
            return None
        return {"size": found.st_size, "digest": digest}

    def reading(self, path: str) -> None:
        """Records the content of a file before its first read in this run."""
        if path not in self._read:
            self._read[path] = self.content(path)

    def noting(self, source: Source, paths: Sequence[str]) -> Source:
        """Returns a copy of a source whose ``read`` first calls `reading` for its files."""

        def read(*how: Any) -> Any:
            for path in paths:
                self.reading(path)
            return source.read(*how)

        return dataclasses.replace(source, read=read)

    def as_read(self, path: str) -> dict[str, Any] | None:
        """Returns what `reading` recorded for a file; ``None`` if it recorded nothing."""
        return self._read.get(path)

    def any_changed(self, paths: Sequence[str], line: Mapping[str, Any]) -> bool:
        """Returns whether a file has another content than a line about it says.

        Args:
            paths: Paths of the files.
            line: Line with ``size`` and ``digest``, or, of several files, ``sizes`` and
                ``digests``.
        """
        sizes = line.get("sizes", [line.get("size")])
        digests = line.get("digests", [line.get("digest")])
        return any(
            self.changed(path, {"size": size, "digest": digest})
            for path, size, digest in zip(paths, sizes, digests, strict=False)
        )

    def changed(self, path: str, before: Mapping[str, Any]) -> bool:
        """Returns whether a file's content has changed; false if it vanished or was not recorded.

        Args:
            path: Path of the file.
            before: Earlier ``size`` and ``digest`` of the file, as a result stores them.
        """
        if before.get("digest") is None or not os.path.isfile(path):
            return False
        if os.path.getsize(path) != before.get("size"):
            return True
        now = self.content(path)
        return now is not None and now["digest"] != before["digest"]


class Noted(Inputs):
    """Sizes and digests of the input files of a run, kept in the file `CONTENTS`.

    Args:
        folder: Folder of the run's results; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._contents = folder / CONTENTS
        self._noted: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            for line in complete_lines(self._contents):
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    row = json.loads(line)
                    self._noted[row.pop("path")] = row

    def reading(self, path: str) -> None:
        """Records the content of a file before its first read in this run."""
        path = os.path.abspath(path)
        super().reading(path)
        self.note(path, self.as_read(path))

    def note(self, path: str, content: Mapping[str, Any] | None) -> None:
        """Records the content of a file as another process has read it.

        Args:
            path: Path of the file.
            content: Its ``size`` and ``digest``; ``None``: they are not known.
        """
        path = os.path.abspath(path)
        if content is not None and content != self._noted.get(path):
            self._noted[path] = content
            with explained(self._contents.parent), open_append(self._contents) as file:
                file.write(json.dumps({"path": path, **content}).encode() + b"\n")

    def changed_since(self, path: str) -> bool:
        """Returns whether a file's content has changed since `reading` recorded it."""
        path = os.path.abspath(path)
        return self.changed(path, self._noted.get(path, {}))
