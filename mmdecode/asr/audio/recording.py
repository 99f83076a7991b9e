"""One recording, measured and ready to be read from its beginning, in memory of a few windows.

A recording is read twice: once for its length and its hash, once for its windows. Recordings of up
to `KEEP_S` seconds are kept in memory instead; longer ones are decoded again.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from mmdecode.asr.audio.reading import blocks
from mmdecode.errors import InputError

if TYPE_CHECKING:
    from mmdecode.asr.audio.reading import Source

KEEP_S = 300


class Tape:
    """Samples by position from blocks that arrive in order; what was left after is dropped.

    Beyond both ends of the recording it is mirrored, as ``torch.stft`` mirrors it.
    """

    def __init__(self, parts: Iterator[np.ndarray]) -> None:
        self._parts = parts
        self._held = np.zeros(0, np.float32)
        self._start = 0

    @property
    def end(self) -> int:
        """Samples that have arrived."""
        return self._start + len(self._held)

    def fill(self, end: int) -> None:
        """Takes blocks until ``end`` samples have arrived or none are left."""
        taken, size = [self._held], self.end
        while size < end and (part := next(self._parts, None)) is not None:
            taken.append(part)
            size += len(part)
        if len(taken) > 1:
            self._held = np.concatenate(taken)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Samples ``start`` to ``stop``; ``start`` never goes back."""
        self.fill(stop)
        low, high = max(start, 0), min(stop, self.end)
        self._held, self._start = self._held[low - self._start :], low
        inside = self._held[: high - low]
        return np.pad(inside, (low - start, stop - high), mode="reflect")


class Recording:
    """A recording, measured.

    Args:
        source: Where its samples come from.
        rate: At which they are wanted, in Hz.
        keep_s: Most seconds that are kept in memory.

    Attributes:
        name: Its name for users.
        rate: Samples a second.
        key: A hash of its samples.
        samples: How many it has.

    Raises:
        InputError: The recording cannot be read or trusted, or holds no samples.
    """

    def __init__(self, source: Source, rate: int, *, keep_s: float = KEEP_S) -> None:
        self.name, self.rate = source.name, rate
        meter = _Meter(blocks(source, rate))
        kept = list(itertools.takewhile(lambda _: meter.samples <= keep_s * rate, meter))
        self._replay: Callable[[], Iterator[np.ndarray]]
        if meter.ended:
            samples = np.concatenate(kept) if kept else np.zeros(0, np.float32)
            self._replay = lambda: iter([samples])
            first = self._replay()
        else:
            self._replay = lambda: blocks(source, rate)
            # takewhile has swallowed the block that was one too many
            first = itertools.chain(kept, [meter.last], meter)
            kept = []
        self._first_pass(first, meter.samples if meter.ended else None)
        if not meter.samples:
            raise InputError(f"{self.name}: holds no samples; expected at least one")
        self.samples = meter.samples
        self.key = meter.digest.hexdigest()
        self._tape = self.tape()

    @property
    def duration_s(self) -> float:
        """Its length in seconds."""
        return self.samples / self.rate

    @property
    def frames(self) -> int:
        """Its length in the steps by which windows are counted: here samples."""
        return self.samples

    def tape(self) -> Tape:
        """The recording once more, from its beginning, without padding."""
        return Tape(self._replay())

    def waveform(self, start: int, stop: int) -> np.ndarray:
        """Samples ``start`` to ``stop``, at most to its end; ``start`` never goes back."""
        return self._tape.read(start, min(stop, self.samples))

    def _first_pass(self, parts: Iterator[np.ndarray], known: int | None) -> None:
        """Reads all samples once.

        Args:
            parts: The samples in order; all of them have to be taken.
            known: How many there are, where that is known before they are read.
        """
        collections.deque(parts, maxlen=0)


class _Meter:
    """Passes blocks on, counting and hashing them."""

    def __init__(self, parts: Iterator[np.ndarray]) -> None:
        self._parts = parts
        self.samples, self.ended = 0, False
        self.digest = hashlib.blake2b(digest_size=16)
        self.last = np.zeros(0, np.float32)

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        part = next(self._parts, None)
        if part is None:
            self.ended = True
            raise StopIteration
        self.samples += len(part)
        self.digest.update(np.ascontiguousarray(part).tobytes())
        self.last = part
        return part
