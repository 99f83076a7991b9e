"""Protection from images that crash their decoder and the process; see `mmdecode.runs.crashes`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmdecode.errors import InputError
from mmdecode.runs.crashes import InFlight, read_apart
from mmdecode.vlm.images import ImageSource

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmdecode.vlm.videos import Video

READ = """
import sys
from mmdecode.errors import MMDecodeError
from mmdecode.vlm.images import image_source
try:
    image_source(sys.argv[1], "").read()
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

    def read(*how: Any) -> Image | Video:
        if source.name in journal.suspects and source.name.startswith("data:"):
            raise InputError(f"{source.name} ended an earlier run while it was read; leave it out")
        if source.name in journal.suspects:
            read_apart(code, source.name, "convert it with another program")
        with journal.reading(source.name):
            image = source.read(*how)
        journal.cleared(source.name)
        return image

    return replace(source, read=read)
