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
"""Program that decodes the recording whose path is its argument."""


def watched(source: Source, journal: InFlight, path: str = "", *, code: str = READ) -> Source:
    """Wraps a source so that a recording that may have crashed a run cannot crash this one.

    The recording's name is recorded while one of its blocks is decoded. If an earlier run died
    while decoding it, the file is first decoded in a subprocess, whose crash is an ordinary error.

    Args:
        source: Source of the recording.
        journal: File with the name of the recording being decoded, and of recordings that ended
            earlier runs.
        path: Path of the file.
        code: Program that the subprocess runs.
    """

    def read() -> Blocks:
        if source.name in journal.suspects:
            read_apart(code, path, "convert it with ffmpeg")
        blocks = source.read()
        while True:
            with journal.reading(source.name):
                block = next(blocks, None)
            if block is None:
                journal.cleared(source.name)
                return
            yield block

    return replace(source, read=read)
