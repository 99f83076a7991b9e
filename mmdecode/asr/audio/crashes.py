"""Protection from recordings that crash a decoder library; see `mmdecode.runs.crashes`."""

from __future__ import annotations

from dataclasses import replace

from mmdecode.asr.audio.reading import Blocks, Source
from mmdecode.runs.crashes import InFlight, read_apart

READ = """
import sys
from mmdecode.asr.audio.reading import blocks, recording
from mmdecode.errors import MMDecodeError
try:
    for _ in blocks(recording(sys.argv[1]), 16_000):
        pass
except MMDecodeError:
    pass
"""
"""Python code that decodes the recording at ``sys.argv[1]``."""


def watched(source: Source, journal: InFlight) -> Source:
    """Wraps a source so that a journal holds its name while one of its blocks is decoded.

    If decoding crashes the process, the journal tells the next run which recording did it.
    """

    def read() -> Blocks:
        blocks = source.read()
        while True:
            with journal.reading(source.name):
                block = next(blocks, None)
            if block is None:
                journal.cleared(source.name)
                return
            yield block

    return replace(source, read=read)


def checked(source: Source, path: str, *, code: str = READ) -> Source:
    """Wraps a source so that a separate process decodes the file first.

    Args:
        source: Source of the file.
        path: Path of the file.
        code: Python code that the process runs.

    Returns:
        The wrapped source; reading it raises `InputError` if the process crashed.
    """

    def read() -> Blocks:
        read_apart(code, path, "convert it with ffmpeg")
        yield from source.read()

    return replace(source, read=read)
