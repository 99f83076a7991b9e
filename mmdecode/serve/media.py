"""Decodes the audio and images that clients upload, in processes of their own.

A file that is made to do harm then ends one process of `mmdecode.serve.media_child`, which can open
no file and no socket and has a limit of memory and of time; the server and the other uploads go
on. Where the limits of POSIX do not exist, on Windows, the time limit alone holds. Code that a
client runs in such a process by an error of a library still has the rights of the server's user:
run the server as a user who has few.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmdecode.errors import CrashError, InputError, MissingExtraError, MMDecodeError, OptionError
from mmdecode.serve import media_child
from mmdecode.serve.media_child import read_frame, write_frame

if TYPE_CHECKING:
    from PIL.Image import Image

START_LIMIT_S = 60.0
"""Seconds that a process has to load its libraries."""
USES = 1000
"""Uploads of one process, after which a new one is started, so that no memory leaks for ever."""
PIXEL_BLOCK = 1 << 29
"""Most bytes of a block of pixels. With Pillow's blocks of 16 MiB, the memory of a large image is
not given back to the system: the C library keeps blocks of up to 32 MiB."""
KEPT_VARIABLES = (
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "VIRTUAL_ENV", "PYTHONHOME"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "WINDIR"),
)
"""Environment variables that a process gets; others may hold secrets."""
FEW_THREADS = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment variables that keep the address space small, which is limited."""


class TooLargeError(InputError):
    """An upload is longer, or has more pixels, than the server allows."""


class MediaCounts(NamedTuple):
    """Numbers of uploads since the start.

    Attributes:
        decoded: Uploads that were decoded.
        refused: Uploads that cannot be read or are too large.
        killed: Uploads whose process crashed, or was ended for its time or memory.
    """

    decoded: int = 0
    refused: int = 0
    killed: int = 0


class MediaDecoder:
    """Decodes uploads in child processes; may be used by many threads at once.

    A process decodes one upload at a time; a thread waits until one is free. Processes are started
    when they are first needed, and again after they were killed.

    Args:
        workers: Most processes.
        time_limit_s: Seconds that decoding of one upload may take; waiting does not count.
        memory_bytes: Memory that decoding of one upload may use.
        longest_s: Most seconds of audio.
        most_pixels: Most pixels of an image.

    Raises:
        OptionError: A number is not positive.
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        time_limit_s: float = 30.0,
        memory_bytes: int = 2 << 30,
        longest_s: float = 7200.0,
        most_pixels: int = 64_000_000,
    ) -> None:
        numbers = {"workers": workers, "time_limit_s": time_limit_s, "memory_bytes": memory_bytes}
        numbers |= {"longest_s": longest_s, "most_pixels": most_pixels}
        for option, value in numbers.items():
            if not value > 0:
                raise OptionError(f"{option} is {value}; expected a number greater than 0")
        self.time_limit_s, self.memory_bytes = time_limit_s, memory_bytes
        self.longest_s, self.most_pixels = longest_s, most_pixels
        words = [str(value) for value in (int(memory_bytes), int(most_pixels), time_limit_s)]
        self._children = [_Child(words, time_limit_s) for _ in range(workers)]
        self._free = list(self._children)
        self._changed = threading.Condition()
        self._closed = False
        self._counts = MediaCounts()

    def __enter__(self) -> MediaDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counts(self) -> MediaCounts:
        """Numbers of uploads so far."""
        return self._counts

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run."""
        return [one.process.pid for one in self._children if one.process is not None]

    def samples(self, data: bytes, rate: int, *, name: str = "audio") -> np.ndarray:
        """Decodes audio.

        Args:
            data: Content of a file; see `mmdecode.asr.audio.reading` for the formats.
            rate: Sampling rate of the samples in Hz.
            name: Name of the upload in errors.

        Returns:
            Mono float32 samples, ``(samples,)``.

        Raises:
            InputError: The audio cannot be read; the message starts with ``name``.
            TooLargeError: It is longer than ``longest_s``.
            CrashError: It takes too much time or memory, or crashes a library.
        """
        most = int(self.longest_s * rate)
        request = {"kind": "samples", "name": name, "rate": rate, "most": most}
        _, content = self._answer(
            request, data, 4 * most, f"is longer than {self.longest_s:g} s; split it"
        )
        return np.frombuffer(content, "<f4").astype(np.float32, copy=False)

    def image(self, data: bytes, *, name: str = "image") -> Image:
        """Decodes an image to upright 8-bit RGB, see `mmdecode.vlm.images`.

        Args:
            data: Content of a file.
            name: Name of the upload in errors.

        Raises:
            InputError: The image cannot be read; the message starts with ``name``.
            TooLargeError: It has more than ``most_pixels`` pixels.
            CrashError: It takes too much time or memory, or crashes a library.
        """
        with MissingExtraError.instead("reading images needs Pillow", extra="vlm"):
            pil = importlib.import_module("PIL.Image")
        pil.core.set_block_size(PIXEL_BLOCK)
        frame, content = self._answer(
            {"kind": "image", "name": name},
            data,
            3 * self.most_pixels,
            f"has more than {self.most_pixels} pixels; resize it",
        )
        width, height = frame["size"]
        return pil.fromarray(np.frombuffer(content, np.uint8).reshape(height, width, 3))

    def close(self) -> None:
        """Ends the processes; uploads that are being decoded or wait fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while len(self._free) < len(self._children):
                for child in self._children:
                    child.kill()
                self._changed.wait(0.05)  # again: one may just have been started
        for child in self._children:
            child.end()

    def _answer(
        self, request: dict[str, Any], data: bytes, most_bytes: int, too_large: str
    ) -> tuple[dict[str, Any], bytearray]:
        """Has an upload decoded, and counts it.

        Args:
            request: Header of the request, with the ``name`` of the upload.
            data: The upload.
            most_bytes: Most bytes of the answer.
            too_large: The problem of an upload that is too large, and what to do.
        """
        name = request["name"] = request["name"][:200]
        try:
            with self._borrowed() as child:
                frame, content = child.ask(request, data, most_bytes)
            kind, message = frame["kind"], str(frame.get("message"))
            if kind == media_child.MISSING:
                raise MMDecodeError(message)
            if kind == media_child.MEMORY:
                raise CrashError(
                    f"{name}: needs more than the {self.memory_bytes / (1 << 20):g} MiB of memory "
                    "that decoding may use; shorten it, make it smaller, or split it"
                )
            if kind == media_child.TOO_LARGE:
                raise TooLargeError(f"{name}: {too_large}")
            if kind != media_child.END:
                raise InputError(message)
        except CrashError:
            if self._closed:
                raise MMDecodeError(_CLOSED) from None
            self._count(killed=1)
            raise
        except InputError:
            self._count(refused=1)
            raise
        self._count(decoded=1)
        return frame, content

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[_Child]:
        """Waits for a child that is free, and holds it while the context is open."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise MMDecodeError(_CLOSED)
            child = self._free.pop()  # the last one used: others need not be started
        try:
            yield child
        except BaseException:  # it may still write the answer, which nobody reads
            child.end()
            raise
        finally:
            with self._changed:
                self._free.append(child)
                self._changed.notify_all()

    def _count(self, **more: int) -> None:
        with self._changed:
            found = self._counts._asdict()
            self._counts = MediaCounts(**{n: found[n] + more.get(n, 0) for n in found})


_CLOSED = "the decoder of uploads is closed; the server ends"


class _Child:
    """A child process, which is started when it is asked; one thread at a time may ask it.

    Args:
        words: Arguments of the process.
        time_limit_s: Seconds that an answer may take.
    """

    def __init__(self, words: list[str], time_limit_s: float) -> None:
        self.words, self.time_limit_s = words, time_limit_s
        self.process: subprocess.Popen[bytes] | None = None
        self.uses = 0

    def ask(
        self, request: dict[str, Any], data: bytes, most_bytes: int
    ) -> tuple[dict[str, Any], bytearray]:
        """Returns the header of the last frame of the answer, and the content of all.

        Args:
            request: Header of the request.
            data: Content of the request.
            most_bytes: Most bytes of the answer.

        Raises:
            CrashError: The process ended, or was ended since it took too long.
            MMDecodeError: The process cannot be started.
        """
        process = self._running()
        self.uses += 1
        frame, content = None, bytearray()
        wrong = contextlib.suppress(ValueError, KeyError, RecursionError)  # no frames of ours
        with _Watch(process, self.time_limit_s) as watch, wrong:
            frame = _exchange(process, request, data, content, most_bytes)
        spent = frame is None or watch.expired or frame["kind"] == media_child.MEMORY
        code = self.end() if spent or self.uses >= USES else 0
        if frame is None:
            late = f"takes more than {self.time_limit_s:g} s to decode"
            what = late if watch.expired else _crash(code)
            raise CrashError(
                f"{request['name']}: {what}; shorten it, or convert it to a common format such as "
                "wav or png"
            )
        return frame, content

    def kill(self) -> None:
        """Ends the process; the thread that waits for its answer raises."""
        process = self.process
        if process is not None:
            process.kill()

    def end(self) -> int:
        """Ends the process, closes its pipes and returns its exit code; 0 if there is none."""
        process, self.process, self.uses = self.process, None, 0
        if process is None:
            return 0
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written yet
                pipe.close()
        return process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process; starts it if there is none, or none that lives."""
        if self.process is not None and self.process.poll() is None:
            return self.process
        self.end()
        self.process = subprocess.Popen(
            [*child_command(), *self.words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,  # signals of the terminal are for the server alone
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
        process, frame = self.process, None
        with _Watch(process, START_LIMIT_S), contextlib.suppress(ValueError):
            frame = read_frame(_pipe(process.stdout), 0)
        if frame is None:
            raise MMDecodeError(
                f"the process that decodes uploads does not start (exit code {self.end()}); to see "
                f"why, run: {' '.join(child_command())} {' '.join(self.words)}"
            )
        return process


class _Watch:
    """Kills a process if the context is not left in time.

    Args:
        process: The process.
        limit_s: Seconds that it has.

    Attributes:
        expired: Whether it was killed.
    """

    def __init__(self, process: subprocess.Popen[bytes], limit_s: float) -> None:
        self.expired = self._left = False
        self._process, self._lock = process, threading.Lock()
        self._timer = threading.Timer(limit_s, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> _Watch:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._left = True

    def _expire(self) -> None:
        with self._lock:
            if not self._left:
                self.expired = True
                self._process.kill()


def child_command() -> list[str]:
    """Returns the command that starts a child, without its arguments."""
    return [sys.executable, "-P", "-m", media_child.__name__]


def child_environment() -> dict[str, str]:
    """Returns the environment of a child: no secrets, and the same modules as here."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return kept | FEW_THREADS | {"PYTHONPATH": path}


def _exchange(
    process: subprocess.Popen[bytes],
    request: dict[str, Any],
    data: bytes,
    content: bytearray,
    most_bytes: int,
) -> dict[str, Any] | None:
    """Asks a process; returns the header of the last frame, ``None`` if the process ends before.

    Args:
        process: The process.
        request: Header of the request.
        data: Content of the request.
        content: Array to which the content of the answer is added.
        most_bytes: Most bytes of it.

    Raises:
        ValueError: The process writes something that is no answer.
        KeyError: A frame has no kind.
    """
    with contextlib.suppress(OSError):  # it has ended: it may have answered before
        write_frame(_pipe(process.stdin), request, data)
    while (frame := read_frame(_pipe(process.stdout), most_bytes - len(content))) is not None:
        content += frame[1]
        if frame[0]["kind"] != media_child.PART:
            return frame[0]
    return None


def _pipe(stream: Any) -> Any:
    """Returns a pipe of a process, which is never ``None`` here."""
    assert stream is not None
    return stream


def _crash(code: int) -> str:
    """Returns what an exit code of a child says of an upload."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    if -code == getattr(signal, "SIGKILL", None):
        how += ", which the system sends for lack of memory"
    return f"ends the process that decodes it ({how})"
