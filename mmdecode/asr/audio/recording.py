"""`Recording`: reads a recording window by window, with only a few windows in memory.

A recording is read twice: first for its length and its hash, then for its windows. Recordings of up
to `KEEP_S` seconds are kept in memory, so that the file is decoded only once.
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
    """Reads ranges of samples from a stream of blocks; a range may not begin before the last one.

    Earlier samples are dropped. Beyond its two ends the recording is continued by its mirror image,
    like the reflection padding of ``torch.stft``.
    """

    def __init__(self, parts: Iterator[np.ndarray]) -> None:
        self._parts = parts
        self._held = np.zeros(0, np.float32)
        self._start = 0

    @property
    def end(self) -> int:
        """Number of samples read from the blocks so far."""
        return self._start + len(self._held)

    def fill(self, end: int) -> None:
        """Reads blocks until ``end`` samples are read or no block is left."""
        taken, size = [self._held], self.end
        while size < end and (part := next(self._parts, None)) is not None:
            taken.append(part)
            size += len(part)
        if len(taken) > 1:
            self._held = np.concatenate(taken)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns samples ``start`` to ``stop``; ``start`` may not decrease from call to call."""
        self.fill(stop)
        low, high = max(start, 0), min(stop, self.end)
        self._held, self._start = self._held[low - self._start :], low
        inside = self._held[: high - low]
        return np.pad(inside, (low - start, stop - high), mode="reflect")


class Recording:
    """A recording whose length and hash are known.

    Args:
        source: Source of its samples.
        rate: Sampling rate in Hz, to which it is resampled.
        keep_s: Longest recording that is kept in memory, in seconds.

    Attributes:
        name: Its name in results and errors.
        rate: Sampling rate in Hz.
        key: Hash of its samples, hexadecimal.
        samples: Number of its samples.
        encoder_cache: Cache of encoder states that its source came with.

    Raises:
        InputError: The recording cannot be read, is damaged, or holds no samples.
    """

    def __init__(self, source: Source, rate: int, *, keep_s: float = KEEP_S) -> None:
        self.name, self.rate = source.name, rate
        self.encoder_cache = source.encoder_cache
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
        """Its length in frames, the unit of windows: here samples."""
        return self.samples

    def tape(self) -> Tape:
        """Returns a new `Tape` from the beginning of the recording, without padding."""
        return Tape(self._replay())

    def waveform(self, start: int, stop: int) -> np.ndarray:
        """Returns samples up to ``stop`` or the end; calls come in the order of ``start``."""
        return self._tape.read(start, min(stop, self.samples))

    def _first_pass(self, parts: Iterator[np.ndarray], known: int | None) -> None:
        """Reads all samples once; subclasses override it to compute values of the whole recording.

        Args:
            parts: Blocks of the samples in order; all of them must be consumed.
            known: Number of samples if the recording is in memory, else ``None``.
        """
        collections.deque(parts, maxlen=0)


class _Meter:
    """Iterator over blocks that counts and hashes their samples."""

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
