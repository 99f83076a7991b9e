"""The process that decodes uploads; `mmdecode.serve.media` starts it and asks it.

It reads requests from standard input and answers on standard output, in frames: the lengths of a
header in JSON and of the content, then both. The libraries that decode are loaded first. Then the
process limits itself: it can open no file and no socket, write no file, and use a given amount of
memory. Limits are those of POSIX; where these do not exist, only the time limit of the parent
holds.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import signal
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from mmdecode.errors import InputError, MissingExtraError

READY, PART, END = "ready", "part", "end"
"""Kinds of frames: the process has started, a part of an answer, its last part."""
REFUSED, TOO_LARGE, MEMORY, MISSING = "refused", "too large", "memory", "missing"
"""Kinds of frames with an error."""
LONGEST_HEADER, LONGEST_MESSAGE = 1 << 16, 2000
LIBRARIES = ("soundfile", "soxr", "av", "PIL.Image", "PIL.ImageCms")
"""Modules that readers and libraries import when they need them."""
GRACE_S = 10.0
"""A process whose parent has died ends so long after the time limit, whatever it decodes."""

_LENGTHS = struct.Struct(">IQ")  # of header and content
# silence at a rate that is resampled, for PyAV and for soundfile, and one black pixel
_AMR = b"#!AMR\n" + b"\x3c" + bytes(31)
_AU = b".snd" + struct.pack(">5I", 24, 160, 1, 8000, 1) + bytes([0xFF]) * 160
_PPM = b"P6 1 1 255\n" + bytes(3)


def write_frame(stream: BinaryIO, header: dict[str, Any], content: bytes = b"") -> None:
    """Writes a header and content."""
    head = json.dumps(header).encode()
    stream.write(_LENGTHS.pack(len(head), len(content)) + head)
    stream.write(content)
    stream.flush()


def read_frame(stream: BinaryIO, longest: int | None = None) -> tuple[dict[str, Any], bytes] | None:
    """Reads a header and content; ``None`` at the end of the stream.

    Args:
        stream: Stream that frames are read from.
        longest: Most bytes of content; ``None``: any number.

    Raises:
        ValueError: There is no frame of such a length.
    """
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    of_header, of_content = _LENGTHS.unpack(lengths)
    if of_header > LONGEST_HEADER or (longest is not None and of_content > longest):
        raise ValueError(f"a frame of {of_header} and {of_content} bytes")
    head, content = stream.read(of_header), stream.read(of_content)
    if len(head) < of_header or len(content) < of_content:
        return None
    header = json.loads(head)
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    return header, content


def decode_samples(request: dict[str, Any], data: bytes, answers: BinaryIO) -> None:
    """Answers with mono float32 samples, block by block."""
    from mmdecode.asr.audio.reading import blocks, encoded

    left = request["most"]
    for block in blocks(encoded(data, request["name"]), request["rate"]):
        left -= len(block)
        if left < 0:
            write_frame(answers, {"kind": TOO_LARGE})
            return
        write_frame(answers, {"kind": PART}, block.astype("<f4", copy=False).tobytes())
    write_frame(answers, {"kind": END})


def decode_image(request: dict[str, Any], data: bytes, answers: BinaryIO) -> None:
    """Answers with the size and the RGB levels of an image."""
    from mmdecode.vlm.images import read_image

    image = read_image(data, request["name"])
    write_frame(answers, {"kind": END, "size": image.size}, image.tobytes())


DECODERS: dict[str, Callable[[dict[str, Any], bytes, BinaryIO], None]] = {
    "samples": decode_samples,
    "image": decode_image,
}


def error_frame(error: BaseException, name: str) -> dict[str, Any]:
    """Returns the frame for an error; its message names no path of this machine.

    Args:
        error: Error of a reader.
        name: Name of the upload.
    """
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    # FFmpeg has an error of its own, and goes on: a damaged file may claim any size
    if any(type(one) is MemoryError for one in causes):
        return {"kind": MEMORY}
    if any(type(one).__name__.startswith("DecompressionBomb") for one in causes):
        return {"kind": TOO_LARGE}
    text = str(error)
    if isinstance(error, MissingExtraError):
        return {"kind": MISSING, "message": text[:LONGEST_MESSAGE]}
    if not isinstance(error, InputError) or any(_names_a_path(one, text) for one in causes):
        text = f"{name}: cannot be decoded by the libraries that are installed; convert it to a "
        text += "common format such as wav or png, or copy or download it again"
    return {"kind": REFUSED, "message": text[:LONGEST_MESSAGE]}


def _names_a_path(error: BaseException, text: str) -> bool:
    """Whether a message has the path of a file or module that could not be opened."""
    filename = error.filename if isinstance(error, OSError) else None
    return isinstance(error, ImportError) or (filename is not None and str(filename) in text)


def load_readers(most_pixels: int) -> None:
    """Imports the libraries that decode, and decodes something with each, so that all is loaded.

    A library that is not installed counts as missing from then on, without a search for it.

    Args:
        most_pixels: Images with more pixels are refused before they are decoded.
    """
    names = list(LIBRARIES)
    with contextlib.suppress(ImportError):  # PyAV imports some when a file has subtitles
        modules = pkgutil.walk_packages(importlib.import_module("av").__path__, "av.")
        names += [one.name for one in modules if one.name not in ("av.__main__", "av.datasets")]
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules[name] = None  # type: ignore[assignment]
    sys.modules["librosa"] = None  # type: ignore[assignment]  # it reads paths, not bytes
    warnings.simplefilter("ignore")
    audio = {"kind": "samples", "name": "", "rate": 16_000, "most": 1 << 20}
    image = {"kind": "image", "name": ""}
    pil: Any = sys.modules["PIL.Image"]
    if pil is not None:
        pil.MAX_IMAGE_PIXELS = most_pixels
    for request, data in ((audio, _AMR), (audio, _AU), (image, _PPM), (audio, b"?"), (image, b"?")):
        answer(request, data, io.BytesIO())


def answer(request: dict[str, Any], data: bytes, answers: BinaryIO) -> bool:
    """Decodes an upload and writes the answer; returns whether the process is fit for another."""
    try:
        DECODERS[request["kind"]](request, data, answers)
    except Exception as error:  # readers raise whatever they like
        frame = error_frame(error, request["name"])
        write_frame(answers, frame)
        return frame["kind"] != MEMORY
    return True


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns standard input and output, which are the null device for everything else."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return requests, answers


def limit_memory(more_bytes: int) -> None:
    """Limits the address space to what is used now and ``more_bytes``, where that is known."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def limit_files(last: int) -> None:
    """From now on nothing can be opened, no file and no socket, and nothing written to a file.

    Args:
        last: The largest descriptor that stays open.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    os.closerange(last + 1, 1 << 16)
    for number in range(last):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(0, number)  # a gap would be free for a file
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, last + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def set_alarm(seconds: float) -> None:
    """Lets the system end this process after so many seconds; 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main(memory_bytes: int, most_pixels: int, time_limit_s: float) -> None:
    """Answers requests until the end of standard input.

    Args:
        memory_bytes: Memory that decoding may use.
        most_pixels: Most pixels of an image.
        time_limit_s: Seconds that the parent gives an upload. A parent that has died kills nothing,
            so the system ends this process `GRACE_S` later.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the server says when it is over
        signal.signal(number, signal.SIG_IGN)
    requests, answers = take_pipes()
    load_readers(most_pixels)
    limit_memory(memory_bytes)
    limit_files(max(requests.fileno(), answers.fileno()))
    write_frame(answers, {"kind": READY})
    fit = True
    while fit:
        try:
            frame = read_frame(requests)
        except MemoryError:
            write_frame(answers, {"kind": MEMORY})
            return
        if frame is None:
            return
        set_alarm(time_limit_s + GRACE_S)
        fit = answer(*frame, answers)
        set_alarm(0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the parent has ended
        main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
