"""Protection from images that crash their decoder and the process; see `mmdecode.runs.crashes`."""

from __future__ import annotations

from mmdecode.runs import crashes
from mmdecode.runs.crashes import InFlight
from mmdecode.vlm.images import ImageSource

READ = """
import sys
from mmdecode.vlm.images import image_source
image_source(sys.argv[1], "").read()
"""
"""Program that decodes the image file whose path is its argument."""


def watched(source: ImageSource, journal: InFlight, *, code: str = READ) -> ImageSource:
    """Wraps a source so that an image that may have crashed an earlier run cannot crash this one.

    Args:
        source: Source of the image.
        journal: File with the name of the image being read, and of images that ended earlier runs.
        code: Program that the subprocess runs.
    """
    return crashes.watched(source, journal, source.name, code, "convert it with another program")
