"""Recordings that crash a decoder library, and with it the process; see `mmdecode.runs.crashes`."""

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
"""Program that reads the recording that it is given."""


def watched(source: Source, journal: InFlight) -> Source:
    """The source, noted while one of its blocks is decoded."""

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
    """The source, read in a process apart first.

    Args:
        source: Source of the file; reading it is an `InputError` where the process crashed.
        path: Path of the file.
        code: Program that reads it there.
    """

    def read() -> Blocks:
        read_apart(code, path, "convert it with ffmpeg")
        yield from source.read()

    return replace(source, read=read)
