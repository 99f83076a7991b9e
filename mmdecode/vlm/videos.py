"""Reads videos: frames by number or by rate, with their times.

Frames are RGB images, upright. Their times come from the file, also where the frame rate varies.
Decoding needs the extra ``media`` (PyAV). Sound is not read.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmdecode.errors import InputError, MissingExtraError
from mmdecode.runs.inputs import refuse_address

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset(".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .ts .ogv .flv .wmv .3gp".split())
"""Suffixes by which a path is taken for a video."""
FRAMES = 8
"""Default number of frames."""
MOST_FRAMES = 512
"""Most frames of a video."""


@dataclass(frozen=True)
class Video:
    """Frames of a video.

    Attributes:
        frames: RGB images, in order.
        seconds: Time of each frame.
        rate: Frames per second of the file.
        total: Number of frames of the file.
    """

    frames: tuple[Image, ...]
    seconds: tuple[float, ...]
    rate: float
    total: int

    def metadata(self) -> dict[str, Any]:
        """The argument ``video_metadata`` of processors of transformers."""
        return {
            "total_num_frames": self.total,
            "fps": self.rate,
            "duration": self.total / self.rate,
            "frames_indices": [round(time * self.rate) for time in self.seconds],
        }


def is_video(path: Any) -> bool:
    """Whether something is the path of a video, by its suffix."""
    if not isinstance(path, (str, os.PathLike)):
        return False
    return os.path.splitext(os.fsdecode(path))[1].lower() in SUFFIXES


def read_video(
    path: str | os.PathLike[str], frames: int = FRAMES, fps: float | None = None
) -> Video:
    """Reads frames of a video file.

    Args:
        path: The file.
        frames: Number of frames, from the first to the last at equal distances.
        fps: Frames per second; ``None``: as many as ``frames``.

    Raises:
        InputError: The file cannot be read, or has too many frames at this rate.
        MissingExtraError: PyAV is not installed.
    """
    with MissingExtraError.instead("reading videos needs PyAV", extra="media"):
        av = importlib.import_module("av")
    name = os.fsdecode(path)
    try:
        refuse_address(name)
        if not os.path.isfile(name):
            raise InputError("does not exist; expected a video file")
        with av.open(name) as container:
            if not container.streams.video:
                raise InputError("has no picture; use 'mmdecode transcribe' for sound")
            rate, total = _size(container)
        if not total:
            total = sum(1 for _ in _decoded(av, name))
        found = _chosen(av, name, _indices(total, rate, frames, fps))
        if found is None:  # fewer frames than the file says
            total = sum(1 for _ in _decoded(av, name))
            found = _chosen(av, name, _indices(total, rate, frames, fps))
        if not found:
            raise InputError("has no frame that can be decoded; it may be damaged")
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    except (av.FFmpegError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{name}: cannot be read as a video: {reason}; it may be damaged, or no video"
        ) from error
    images, seconds = zip(*found, strict=True)
    return Video(images, seconds, rate, total)


def _size(container: Any) -> tuple[float, int]:
    """Frames per second, and number of frames as far as the file says it, else 0."""
    stream = container.streams.video[0]
    rate = float(stream.average_rate or stream.guessed_rate or 0) or 24.0
    duration = 0.0
    if stream.duration is not None and stream.time_base is not None:
        duration = float(stream.duration * stream.time_base)
    elif container.duration is not None:
        duration = container.duration / 1e6
    return rate, int(stream.frames or round(duration * rate))


def _indices(total: int, rate: float, frames: int, fps: float | None) -> list[int]:
    if fps is None:
        count = min(frames, total)
        last = max(count - 1, 1)
        return [round(index * (total - 1) / last) for index in range(count)]
    count = max(int(total / rate * fps), 1)
    if count > MOST_FRAMES:
        raise InputError(
            f"has {count} frames at {fps:g} per second, and at most {MOST_FRAMES} are read; give a "
            "lower rate, or a number of frames"
        )
    return sorted({min(round(index * rate / fps), total - 1) for index in range(count)})


def _chosen(av: Any, name: str, indices: Sequence[int]) -> list[tuple[Image, float]] | None:
    """The frames of these numbers with their times; ``None``: the file ends before the last."""
    wanted, found = set(indices), []
    for number, frame in enumerate(_decoded(av, name)):
        if number in wanted:
            image = frame.to_image()
            turned = getattr(frame, "rotation", 0)
            found.append((image.rotate(turned, expand=True) if turned else image, frame.time))
            if len(found) == len(wanted):
                break
    if len(found) < len(wanted):
        return None
    start = found[0][1] if indices and not indices[0] else 0.0
    return [(image, float((time or 0.0) - (start or 0.0))) for image, time in found]


def _decoded(av: Any, name: str) -> Any:
    with av.open(name) as container:
        container.streams.video[0].thread_type = "AUTO"
        yield from container.decode(video=0)
