"""Reads images of any kind as processors expect them: PIL images in RGB, upright, 8 bits a channel.

Transparency is blended over white, palettes and CMYK are converted to RGB, the EXIF orientation is
applied, 16-bit channels are scaled to 8 bits, and grey levels without a fixed scale are stretched
so that the darkest becomes 0 and the brightest 255. The first frame of an animation and the first
page of a document are used, with a warning. Truncated or damaged files, files that are no images,
and images with more pixels than ``PIL.Image.MAX_IMAGE_PIXELS`` are refused. Nothing is downloaded.

Arrays are accepted too: ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)`` with 1, 3 or 4 channels,
integers from 0 to 255, 16-bit unsigned integers, or floats from 0 to 1.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import os
import re
import stat
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmdecode.errors import InputError, MissingExtraError
from mmdecode.runs.inputs import content_of, refuse_address
from mmdecode.vlm.videos import Video, is_video, read_video

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = frozenset(
    ".png .jpg .jpeg .jpe .jfif .webp .gif .bmp .tif .tiff .ppm .pgm .pbm .pnm .avif .jp2 .ico "
    ".tga".split()
)
"""Suffixes of files that are read from a folder; a file given by its own path may have any."""

_FRAMES = (
    "to have it read as a video, let its name end like one, such as .mp4; or give its frames as "
    "several images of one question"
)
_OTHERS = (
    (4, rb"ftyp(?:hei[cfmsx]|hev[cx]|mif1|msf1)", "HEIC, which Pillow does not read", ""),
    (4, rb"ftyp(?!avif|avis)", "a video (mp4 or a similar format)", _FRAMES),
    (0, rb"\x1a\x45\xdf\xa3", "a video (mkv or webm)", _FRAMES),
    (0, rb"RIFF....AVI ", "a video (avi)", _FRAMES),
    (0, rb"\x00\x00\x01[\xb3\xba]", "a video (mpeg)", _FRAMES),
    (0, rb"FLV\x01", "a video (flv)", _FRAMES),
    (0, rb"%PDF-", "a PDF document", "turn its page into a png"),
    (0, rb"%!PS|\xc5\xd0\xd3\xc6", "a PostScript document", "turn its page into a png"),
    (0, rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)?<svg", "an SVG drawing", "turn it into a png"),
    (0, rb"\s*<(?:!doctype\s+html|html)", "a web page", "download the image itself"),
    (0, rb"PK\x03\x04", "a zip archive", "unpack it"),
    (0, rb"RIFF....WAVE|OggS|fLaC|ID3", "audio", "use 'mmdecode transcribe'"),
)
"""Signatures of other file types: offset, pattern of bytes, name of the type, hint."""


@dataclass(frozen=True)
class ImageSource:
    """One image before it is read.

    Attributes:
        name: Name for users: the path, or ``image 2``.
        read: Reads the image; may be called more than once. For a video it takes the number of
            frames and the frames per second, see `mmdecode.vlm.videos.read_video`.
        identity: Equal for sources of one image; ``None``: its name.
        video: Whether it is a video.
    """

    name: str
    read: Callable[..., Image | Video]
    identity: Hashable = None
    video: bool = False


def image_source(item: Any, name: str, video: bool = False) -> ImageSource:
    """Makes an `ImageSource` from a user's argument; opens no file yet.

    Args:
        item: A path, the bytes of a file, an open file, a PIL image, an array or a tensor, or an
            `ImageSource`.
        name: Name of an image that has no path.
        video: Whether a path is of a video whatever its suffix.
    """
    if isinstance(item, ImageSource):
        return item
    if isinstance(item, (str, os.PathLike)):
        name = os.fspath(item)
        if video or is_video(name):
            return ImageSource(name, partial(read_video, name), video=True)
        return ImageSource(name, partial(read_image, item, name))
    return ImageSource(name, partial(read_image, item, name), id(item))


def read_image(item: Any, name: str | None = None) -> Image:
    """Reads an image and converts it to upright 8-bit RGB; the module's docstring has the rules.

    Args:
        item: A path, the bytes of a file, an open file, a PIL image, an array or a tensor.
        name: Name of the image in errors; ``None``: its path.

    Raises:
        InputError: The image cannot be read or has too many pixels; the message starts with its
            name.
        MissingExtraError: Pillow is not installed.
    """
    with MissingExtraError.instead("reading images needs Pillow", extra="vlm"):
        pil = importlib.import_module("PIL.Image")
    if name is None:
        name = os.fsdecode(item) if isinstance(item, (str, os.PathLike)) else "image"
    try:
        if isinstance(item, pil.Image):
            _load(item)  # it may only have been opened
            return _upright(item, name)
        if isinstance(item, (str, os.PathLike)):
            item = _bytes(os.fspath(item))
        elif hasattr(item, "read"):
            item = content_of(item)
        if isinstance(item, (bytes, bytearray, memoryview)):
            return _decoded(bytes(item), name)
        return _of_array(item, name)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def digest(image: Image | Video) -> str:
    """Returns a hash of an image's pixels, size and mode, independent of the file format.

    A video is hashed by the frames that are read, and their times.
    """
    if isinstance(image, Video):
        return " ".join([*map(digest, image.frames), *map(str, image.seconds)])
    content = hashlib.blake2b(image.tobytes(), digest_size=8)
    content.update(repr((image.mode, image.size)).encode())
    return content.hexdigest()


def _bytes(path: str | bytes) -> bytes:
    refuse_address(path)
    try:
        found = os.stat(path)
        if stat.S_ISDIR(found.st_mode):
            raise InputError("is a folder; expected an image file")
        if not stat.S_ISREG(found.st_mode):
            raise InputError("is no regular file; expected an image file")
        return Path(os.fsdecode(path)).read_bytes()
    except FileNotFoundError:
        raise InputError("does not exist; check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read: {reason}; check the path") from error


def _decoded(data: bytes, name: str) -> Image:
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise InputError("is empty (0 bytes); expected an image file")
    _refuse_others(data)
    with warnings.catch_warnings():
        # plugins warn of defects that they repair; only the warning about size becomes an error
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            image = Image.open(io.BytesIO(data))
            frames = _frames(image)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise InputError(
                f"unpacks to more pixels than PIL.Image.MAX_IMAGE_PIXELS allows ("
                f"{Image.MAX_IMAGE_PIXELS}); resize it, or raise that limit where the file can be "
                "trusted"
            ) from error
        except UnidentifiedImageError as error:
            raise InputError(
                "is no image that Pillow reads, or its beginning is damaged; expected png, jpeg, "
                "webp, gif, bmp or tiff: convert it, or copy or download it again"
            ) from error
        except Exception as error:  # each format's reader raises whatever it likes
            raise _damaged(error) from error
        _load(image)
    if frames > 1:
        warnings.warn(
            f"{name}: has {frames} frames or pages, and only the first is used; to ask about "
            "several, give them as several images of one question, or convert an animation to .mp4",
            stacklevel=2,
        )
    return _upright(image, name)


def _load(image: Any) -> None:
    """Decodes an opened image."""
    try:
        image.load()
    except Exception as error:  # each format's reader raises whatever it likes
        raise _damaged(error) from error


def _damaged(error: Exception) -> InputError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return InputError(f"is truncated or damaged ({reason}); copy or download it again")


def _refuse_others(data: bytes) -> None:
    for offset, pattern, what, hint in _OTHERS:
        if re.match(pattern, data[offset : offset + 1024], re.DOTALL | re.IGNORECASE):
            raise InputError(f"is {what}; expected an image: {hint or 'convert it to jpeg'}")


def _frames(image: Any) -> int:
    """Returns the number of frames or pages; embedded previews and icon sizes do not count."""
    if image.format in ("MPO", "PSD", "ICO", "ICNS"):
        return 1
    return int(getattr(image, "n_frames", 1))


def _upright(image: Any, name: str) -> Image:
    """Converts to RGB over white and applies the EXIF orientation."""
    from PIL import Image, ImageOps

    if not image.width or not image.height:
        raise InputError(f"has {image.width} x {image.height} pixels; expected at least one")
    try:
        image = ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF data do not affect the pixels
        warnings.warn(f"{name}: its EXIF data is damaged; it may be rotated", stacklevel=2)
    if image.mode.startswith(("I", "F")):
        return Image.fromarray(_eight_bits(np.asarray(image), image.mode)).convert("RGB")
    try:
        if image.has_transparency_data:
            page = Image.new("RGBA", image.size, "white")
            page.alpha_composite(image.convert("RGBA"))
            image = page
        return image.convert("RGB")
    except ValueError as error:
        raise InputError(
            f"has the colour mode {image.mode!r}, which Pillow cannot convert to RGB; convert it "
            "with another program"
        ) from error


def _eight_bits(levels: np.ndarray, mode: str) -> np.ndarray:
    """Scales grey levels to 8 bits: from 0..65535, from 0..1, or else from their own range."""
    levels = levels.astype(np.float64)
    if not np.isfinite(levels).all():
        raise InputError(
            "has pixels that are NaN or infinite; expected finite numbers: export it again"
        )
    low, high = float(levels.min()), float(levels.max())
    if mode.startswith("I") and low >= 0 and high < 1 << 16:
        low, high = 0.0, 65535.0
    elif mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    return np.rint((levels - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)


def _of_array(item: Any, name: str) -> Image:
    from PIL import Image

    if hasattr(item, "detach"):
        item = item.detach().float().cpu() if item.is_floating_point() else item.detach().cpu()
    try:
        array = np.asarray(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"cannot be made an array ({error}); expected a path, the bytes of a file, a PIL image "
            "or an array"
        ) from error
    if array.dtype == object or array.dtype.kind not in "biuf":
        raise InputError(
            f"is {type(item).__name__}; expected a path, the bytes of a file, a PIL image or an "
            "array"
        )
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, -1)
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[-1] not in (1, 3, 4)):
        raise InputError(
            f"has shape {np.shape(item)}; expected (H, W), (H, W, C) or (C, H, W) with 1, 3 or 4 "
            "channels: give one image at a time"
        )
    if array.size == 0:
        raise InputError(f"has shape {array.shape}; expected at least one pixel")
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    return _upright(Image.fromarray(_bytes_of(array)), name)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Converts booleans, integers or floats from 0 to 1 to 8-bit levels from 0 to 255."""
    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    if array.dtype == np.uint16:
        return np.rint(array / 257.0).astype(np.uint8)
    low, high = array.min(), array.max()
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise InputError("has values that are NaN or infinite; expected floats of 0..1")
        if low < -1e-3 or high > 1 + 1e-3:  # tolerance for overshoot by resampling
            raise InputError(
                f"has floats from {low:g} to {high:g}; expected 0..1: divide levels of 0..255 by "
                "255, and give images as they were before a processor normalised them"
            )
        return np.rint(array.clip(0, 1) * 255.0).astype(np.uint8)
    if low < 0 or high > 255:
        raise InputError(
            f"has integers from {low} to {high}; expected 0..255, or 16-bit levels as uint16"
        )
    return array.astype(np.uint8)
