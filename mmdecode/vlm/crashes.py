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
"""Program that decodes the image file whose path is its argument."""


def watched(source: ImageSource, journal: InFlight, *, code: str = READ) -> ImageSource:
    """Wraps a source so that an image that may have crashed an earlier run cannot crash this one.

    The image's name is recorded while the image is read. If an earlier run died while reading it,
    the image is first read in a subprocess, whose crash is an ordinary error.

    Args:
        source: Source of the image.
        journal: File with the name of the image being read, and of images that ended earlier runs.
        code: Program that the subprocess runs.
    """

    def read() -> Image:
        if source.name in journal.suspects:
            read_apart(code, source.name, "convert it with another program")
        with journal.reading(source.name):
            image = source.read()
        journal.cleared(source.name)
        return image

    return replace(source, read=read)
