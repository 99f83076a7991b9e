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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Encoder(Protocol):
    """An incremental encoder, such as `mmdecode.models.moonshine_streaming_encoder`."""

    def feed(self, samples: Tensor) -> Tensor:
        """Adds samples ``(T,)``; returns the states that became final, ``(S, H)``."""

    def provisional(self) -> Tensor:
        """Returns the states after the final ones, as if the audio ended here."""


@dataclass
class _Entry:
    """A window: its encoder, its samples so far, its final states, and all its states."""

    encoder: Encoder
    samples: Tensor
    final: Tensor
    states: Tensor


class EncoderCache:
    """Encoder states of the windows of one stream.

    Args:
        make: Function that returns an encoder for another window.
        most: Most samples of all windows that are kept; those used last are kept first.
    """

    def __init__(self, make: Callable[[], Encoder], most: int) -> None:
        self._make, self._most = make, most
        self._entries: list[_Entry] = []  # the one used last is the last

    @property
    def kept(self) -> int:
        """Number of samples of all windows that are kept."""
        return sum(len(entry.samples) for entry in self._entries)

    def states(self, samples: Tensor) -> Tensor:
        """Returns the encoder states ``(S, H)`` of a window with these samples ``(T,)``."""
        entry = self._taken(samples)
        fed = len(entry.samples)
        if fed < len(samples) or not fed:
            entry.final = torch.cat([entry.final, entry.encoder.feed(samples[fed:])])
            entry.states = torch.cat([entry.final, entry.encoder.provisional()])
            entry.samples = samples.clone()
        self._entries.append(entry)
        self._forget()
        return entry.states

    def _taken(self, samples: Tensor) -> _Entry:
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
        return _Entry(encoder, samples[:0], empty, empty)

    def _forget(self) -> None:
        """Drops the windows that were not used for longest."""
        while len(self._entries) > 1 and self.kept > self._most:
            del self._entries[0]
