"""Images that crash the library that decodes them, and with it the process.

Images are read in the process itself; a `Journal` beside the answers notes which one. Where a run
died over an image, those that follow read it in a process apart first, and an image that ends that
process is a failure like any other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmdecode.errors import InputError
from mmdecode.vlm.images import ImageSource

if TYPE_CHECKING:
    from PIL.Image import Image

_READ = """
import sys
from mmdecode.errors import MMDecodeError
from mmdecode.vlm.images import read_image
try:
    read_image(sys.argv[1])
except MMDecodeError:
    pass
"""


class Journal:
    """A file of the images over which runs have died, and of the one that is being read.

    Args:
        path: Of the file; gone after a run where no image was ever suspected.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        names = path.read_bytes().split(b"\0") if path.exists() else []
        self._suspects = dict.fromkeys(filter(None, names))
        self._file = path.open("wb", buffering=0)
        self._note()

    def watched(self, source: ImageSource) -> ImageSource:
        """The source, noted while it is read; a suspected one is read in a process apart first."""
        name = os.fsencode(source.name)

        def read() -> Image:
            if name in self._suspects:
                _read_apart(source.name)
            self._note(name)
            try:
                return source.read()
            finally:
                self._note()

        return replace(source, read=read)

    def close(self) -> None:
        """The process got to its end."""
        self._file.close()
        if not self._suspects:
            self._path.unlink(missing_ok=True)

    def _note(self, *name: bytes) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(b"\0".join(dict.fromkeys([*self._suspects, *name])))


def _read_apart(path: str) -> None:
    command = [sys.executable, "-c", _READ, path]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise InputError(
            f"{path}: crashes the library that decodes it (exit code {done.returncode}); convert "
            "it with another program, or copy or download it again"
        )
