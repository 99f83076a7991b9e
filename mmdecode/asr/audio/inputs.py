"""Audio inputs of streams: files, at full speed or in real time, and samples on a pipe.

An input returns blocks of mono float32 samples at the model's rate, each when it has arrived. It
never waits: if nothing has arrived, it returns nothing. Microphones are in
`mmdecode.asr.audio.microphone`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mmdecode.asr.audio.reading import Source, blocks
from mmdecode.errors import InputError

STDIN = "stdin"
"""Name of standard input in results."""
_MOST_READ = 512
"""Most blocks that are read ahead from a pipe, each of at most 64 KB; then the writer waits."""
_HEADERS = (b"RIFF", b"fLaC", b"OggS", b"ID3")


class Arrival(NamedTuple):
    """A block of samples.

    Attributes:
        samples: Mono float32 samples, ``(samples,)``.
        arrived_s: Time when its last sample arrived, on the input's clock; ``None``: it is there
            whenever it is needed, as that of a file.
    """

    samples: np.ndarray
    arrived_s: float | None = None


class AudioInput:
    """Base of inputs.

    Attributes:
        name: Name in results and messages.
        ended: Whether all blocks were returned.
        lost_s: Seconds of audio that arrived and could not be kept.
        notes: Messages for the user, such as of lost audio; who shows them removes them.
    """

    def __init__(self, name: str) -> None:
        self.name, self.ended, self.lost_s = name, False, 0.0
        self.notes: list[str] = []

    @property
    def is_live(self) -> bool:
        """Whether audio arrives at its own pace, however fast it is transcribed."""
        return False

    def start(self) -> None:
        """Begins to receive audio."""

    def take(self) -> Arrival | None:
        """Returns the next block; ``None``: none has arrived, or the input has ended.

        Raises:
            InputError: The audio cannot be read.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends the input; blocks of a live input that have arrived are still returned."""
        self.ended = True


class FileInput(AudioInput):
    """A recording.

    Args:
        recording: The recording.
        rate: Sampling rate of the samples in Hz.
        block: Most samples per block.
        real_time: Whether a second of audio arrives per second, as from a live source.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        recording: Source,
        rate: int,
        block: int,
        real_time: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(recording.name)
        self._blocks = _divided(blocks(recording, rate), block)
        self._rate, self._real_time, self._clock = rate, real_time, clock
        self._next: np.ndarray | None = None
        self._begin_s = self._taken_s = 0.0
        self._end_s: float | None = None  # audio that arrives later is left out

    @property
    def is_live(self) -> bool:
        """Whether it is read in real time."""
        return self._real_time

    def start(self) -> None:
        """Starts the clock of a recording that is read in real time."""
        self._begin_s = self._clock()

    def take(self) -> Arrival | None:
        """Returns the next block of the file, if it has arrived."""
        if self._next is None and not self.ended:
            self._next = next(self._blocks, None)
        if self._next is None or self.ended:
            self.ended = True
            return None
        samples, arrived_s = self._next, None
        if self._real_time:
            arrived_s = self._begin_s + self._taken_s + len(samples) / self._rate
            if arrived_s > (self._clock() if self._end_s is None else self._end_s):
                self.ended = self._end_s is not None
                return None
        self._next = None
        self._taken_s += len(samples) / self._rate
        return Arrival(samples, arrived_s)

    def close(self) -> None:
        """Ends the file: at once, or in real time with the audio that has arrived."""
        if self._real_time:
            self._end_s = self._clock()
        else:
            self.ended = True


class PipeInput(AudioInput):
    """Samples on a pipe: 16-bit, little-endian, one channel, at the model's rate.

    A thread reads ahead, so that a program that records is not held up. When it is far ahead it
    waits, so that a program that converts a file is.

    Args:
        file: The open file.
        rate: Sampling rate of the samples in Hz.
        block: Most samples per block.
        name: Name in results and messages.
    """

    def __init__(self, file: BinaryIO, rate: int, block: int, name: str = STDIN) -> None:
        super().__init__(name)
        # not the buffer, whose lock would be held when the program ends
        self._file: Any = getattr(file, "raw", file)
        self._rate, self._block, self._faster = rate, block, False
        self._closed = False
        self._blocks: queue.Queue[np.ndarray | Exception | None] = queue.Queue(_MOST_READ)

    @property
    def is_live(self) -> bool:
        """Whether it has never been faster than real time, as a program that records is not."""
        return not self._faster

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(target=self._read, daemon=True, name="pipe").start()

    def _read(self) -> None:
        received, began_s = 0, 0.0
        try:
            for block in _divided(_samples_of(self._file), self._block):
                began_s = began_s or time.monotonic()
                received += len(block)
                ahead_s = received / self._rate - (time.monotonic() - began_s)
                self._faster = self._faster or ahead_s > 2
                self._blocks.put(block)
            self._blocks.put(None)
        except Exception as error:  # raised where the samples are taken
            self._blocks.put(error)

    def take(self) -> Arrival | None:
        """Returns the next block that was read."""
        try:
            block = self._blocks.get_nowait()
        except queue.Empty:
            self.ended = self._closed
            return None
        if isinstance(block, Exception):
            raise block
        if block is None or self.ended:
            self.ended = True
            return None
        return Arrival(block)

    def close(self) -> None:
        """Ends the input: with what a program that records has written, else at once."""
        self._closed, self.ended = True, not self.is_live


def _divided(pieces: Iterator[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Divides blocks of samples into blocks of at most a size."""
    for piece in pieces:
        for start in range(0, len(piece), size):
            yield piece[start : start + size]


def _samples_of(file: Any) -> Iterator[np.ndarray]:
    """Reads 16-bit samples from an open file, and yields float32 blocks as they arrive."""
    rest, started = b"", False
    while data := file.read(1 << 16):
        data = rest + data
        if not started and data.startswith(_HEADERS):
            raise InputError(
                "standard input holds an audio file; expected samples without a header: convert it "
                "with ffmpeg -i - -ac 1 -ar 16000 -f s16le -, or give the file's path"
            )
        started = True
        whole = len(data) - len(data) % 2
        rest = data[whole:]
        yield np.frombuffer(data[:whole], "<i2").astype(np.float32) / 32768
