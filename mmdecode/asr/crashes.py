"""Recordings that crash a decoder library, and with it the process.

Reading is not done in a process of its own: among ten thousand broken files none crashed libsndfile
or FFmpeg. Instead a `Journal` notes which recording a decoder is at work on. Where a run died, the
next one reads what the journals name in a process apart first, and a recording that ends that
process is a failure like any other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mmdecode.asr.audio import Blocks, Source
from mmdecode.errors import InputError

_READ = """
import sys
from mmdecode.asr.audio import blocks, recording
from mmdecode.errors import MMDecodeError
try:
    for _ in blocks(recording(sys.argv[1]), 16_000):
        pass
except MMDecodeError:
    pass
"""


class Journal:
    """A file that holds the name of the recording that is being decoded, and is empty otherwise.

    Args:
        path: Of the file; what it held is gone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=0)

    def watched(self, source: Source) -> Source:
        """The source, noted while one of its blocks is decoded."""

        def read() -> Blocks:
            blocks = source.read()
            while True:
                self._note(os.fsencode(source.name))
                try:
                    block = next(blocks, None)
                finally:
                    self._note(b"")
                if block is None:
                    return
                yield block

        return replace(source, read=read)

    def close(self) -> None:
        """Removes the file: the process got to its end."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _note(self, name: bytes) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(name)


def suspects(journals: Iterable[Path]) -> set[str]:
    """Names in journals of processes that died."""
    return {os.fsdecode(path.read_bytes()) for path in journals} - {""}


def checked(source: Source, path: str) -> Source:
    """The source, read in a process apart first.

    Args:
        source: Of the file; reading it is an `InputError` where the process crashed.
        path: Of the file.
    """

    def read() -> Blocks:
        command = [sys.executable, "-c", _READ, path]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise InputError(
                f"{path}: crashes the library that decodes it (exit code {done.returncode}); "
                "convert it with ffmpeg, or copy or download it again"
            )
        yield from source.read()

    return replace(source, read=read)
