"""`EncoderCache`: encoder states of a stream's windows, kept from step to step.

A stream transcribes the audio in its buffer at every step: windows that have not changed, and a
last window that has grown. The cache recognises both by their samples. An unchanged window is not
encoded again; of a window that has grown only the new samples are, with the states whose look-ahead
was not complete. Any other window is encoded from its beginning.

Every window therefore has the states that it has without a cache, up to rounding, wherever the
stream cuts its buffer and its windows. A step costs the new samples, and each window once more when
it is cut shorter at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mmdecode.asr.recognizers.contract import Encoded
from mmdecode.engine.encoding import encode_unpadded, padded
from mmdecode.engine.growing_source import GrowingSource

if TYPE_CHECKING:
    from mmdecode.asr.recognizers.base import Recognizer


KEPT_WINDOWS = 2
"""Audio whose encoder states a stream keeps, in longest windows: its buffer is at most one, but
windows that were not cut at a pause overlap."""


class Encoder(Protocol):
    """An incremental encoder, such as `mmdecode.models.moonshine_streaming_encoder`."""

    def feed(self, samples: Tensor) -> Tensor:
        """Adds samples ``(T,)``; returns the states that became final, ``(S, H)``."""

    def provisional(self) -> Tensor:
        """Returns the states after the final ones, as if the audio ended here."""


@dataclass
class CachedWindow:
    """A window of a stream.

    Attributes:
        encoder: Its encoder.
        samples: Its samples so far, ``(T,)``.
        final: Its final encoder states, ``(S', H)``.
        states: All its encoder states, ``(S, H)``.
        source: Keys and values that the decoder made of its states.
    """

    encoder: Encoder
    samples: Tensor
    final: Tensor
    states: Tensor
    source: GrowingSource = field(default_factory=GrowingSource)


class EncoderCache:
    """Encoder states of the windows of one stream.

    Args:
        make: Function that returns an encoder for another window.
        most: Most samples of all windows that are kept; those used last are kept first.
    """

    def __init__(self, make: Callable[[], Encoder], most: int) -> None:
        self._make, self._most = make, most
        self._entries: list[CachedWindow] = []  # the one used last is the last

    @property
    def kept(self) -> int:
        """Number of samples of all windows that are kept."""
        return sum(len(entry.samples) for entry in self._entries)

    def window(self, samples: Tensor) -> CachedWindow:
        """Encodes what is new of a window with these samples ``(T,)``, and returns it."""
        entry = self._taken(samples)
        fed = len(entry.samples)
        if fed < len(samples) or not fed:
            entry.final = torch.cat([entry.final, entry.encoder.feed(samples[fed:])])
            entry.states = torch.cat([entry.final, entry.encoder.provisional()])
            entry.samples = samples.clone()
        self._entries.append(entry)
        self._forget()
        return entry

    def _taken(self, samples: Tensor) -> CachedWindow:
        """Takes out the longest window that begins these samples; a new one if there is none."""
        begins = [
            index
            for index, entry in enumerate(self._entries)
            if len(entry.samples) <= len(samples)
            and torch.equal(entry.samples, samples[: len(entry.samples)])
        ]
        if begins:
            longest = max(begins, key=lambda index: len(self._entries[index].samples))
            return self._entries.pop(longest)
        encoder = self._make()
        empty = encoder.feed(samples[:0])
        return CachedWindow(encoder, samples[:0], empty, empty)

    def _forget(self) -> None:
        """Drops the windows that were not used for longest."""
        while len(self._entries) > 1 and self.kept > self._most:
            del self._entries[0]


def cache_for(recognizer: Recognizer, make: Callable[[], Encoder]) -> EncoderCache:
    """Returns a cache for the windows of one stream of a recogniser.

    Args:
        recognizer: The recogniser.
        make: Function that returns an encoder for another window.
    """
    return EncoderCache(make, round(KEPT_WINDOWS * recognizer.window_s * recognizer.rate))


class StreamInputs(dict[str, Tensor]):
    """Encoder inputs of a window of a stream, with the stream's cache.

    Args:
        inputs: Encoder inputs, or nothing where the samples are enough.
        cache: Cache of the stream.
        samples: Samples of the window, ``(T,)``.
    """

    def __init__(self, inputs: Mapping[str, Tensor], cache: EncoderCache, samples: Tensor) -> None:
        super().__init__(inputs)
        self._cache, self._samples = cache, samples

    def window(self) -> CachedWindow:
        """Encodes what is new of the window, and returns it."""
        return self._cache.window(self._samples)


def encode_cached(encoder: Any, windows: Sequence[Any], seconds: Sequence[float]) -> Encoded:
    """Encodes windows: those of streams by their caches, the others without padding.

    Args:
        encoder: Encoder of the model.
        windows: Encoder inputs by name, or `StreamInputs`.
        seconds: Length of each window, in seconds.
    """
    cached = [one.window() if isinstance(one, StreamInputs) else None for one in windows]
    if not any(cached):
        return Encoded(windows, seconds, *encode_unpadded(encoder, windows))
    rows = [
        encode_unpadded(encoder, [window])[0][0] if found is None else found.states
        for window, found in zip(windows, cached, strict=True)
    ]
    sources = [None if found is None else found.source for found in cached]
    return Encoded(windows, seconds, *padded(rows), sources=sources)
