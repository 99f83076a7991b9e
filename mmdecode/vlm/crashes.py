"""Protection from images that crash their decoder and the process; see `mmdecode.runs.crashes`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mmdecode.runs.crashes import InFlight, read_apart
from mmdecode.vlm.images import ImageSource

if TYPE_CHECKING:
    from PIL.Image import Image

READ = """
import sys
from mmdecode.errors import MMDecodeError
from mmdecode.vlm.images import read_image
try:
    read_image(sys.argv[1])
except MMDecodeError:
    pass
"""
"""Program that decodes the image that is passed to it."""


def watched(source: ImageSource, journal: InFlight, *, code: str = READ) -> ImageSource:
    """A source that is recorded while it is read; a suspected one is first read in a subprocess.

    Args:
        source: Source of the file.
        journal: Record of the image that is being read.
        code: Program that reads a suspected image.
    """

    def read() -> Image:
        if source.name in journal.suspects:
            read_apart(code, source.name, "convert it with another program")
        with journal.reading(source.name):
            image = source.read()
        journal.cleared(source.name)
        return image

    return replace(source, read=read)
