"""`Feeder`: transcribes several audio inputs at once, each in a stream of one pool."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from mmdecode.asr.audio.inputs import Arrival, AudioInput
from mmdecode.asr.results import Failure
from mmdecode.asr.streaming.pool import PooledStream, StreamPool
from mmdecode.asr.streaming.stream import Update
from mmdecode.errors import one_line

_PAUSE_S = 0.02
"""Seconds between two looks for new audio."""


class FedStream:
    """A stream and the input that feeds it.

    Attributes:
        input: The input.
        stream: Its stream in the pool.
        error: Why the input failed; ``None``: it did not. Words until then are committed.
        discarded_s: Seconds of audio that arrived and were not transcribed, since the input was
            stopped.
    """

    def __init__(self, source: AudioInput, stream: PooledStream, step_s: float) -> None:
        self.input, self.stream, self._step_s = source, stream, step_s
        self.error: Failure | None = None
        self.discarded_s = 0.0
        self._ready_s = 0.0
        self._finished = False

    @property
    def ended(self) -> bool:
        """Whether its last words are committed, or it failed."""
        return self.stream.ended

    def fill(self, clock: Callable[[], float]) -> None:
        """Feeds the stream with what has arrived, until it can take a step.

        More audio waits in the input, so that a recording is not read further than necessary.
        """
        try:
            while not self._finished and not self.stream.is_due:
                arrival = self.input.take()
                if arrival is not None:
                    self._feed(arrival, clock())
                if self.input.ended:
                    self._finish()
                elif arrival is None:
                    return
        except Exception as error:
            self.fail(error)

    def _feed(self, arrival: Arrival, now_s: float) -> None:
        """Feeds a block; one of a recording as if it had arrived in real time."""
        arrived_s = arrival.arrived_s
        if arrived_s is None:
            after_s = self.stream.fed_s + len(arrival.samples) / self.stream.rate
            step_end_s = min(after_s, self.stream.audio_s + self._step_s)
            arrived_s = now_s - max(0.0, self._ready_s - step_end_s)
        self.stream.feed(arrival.samples, arrived_s=arrived_s)

    def fail(self, error: Exception) -> None:
        """Ends the input with an error; what it gave until then is transcribed."""
        self.error = Failure(
            source=self.input.name, index=0, error=one_line(error), kind=type(error).__name__
        )
        self.input.close()
        self._finish()

    def _finish(self, discard: bool = False) -> None:
        if not self._finished:
            self._finished = True
            self.stream.finish(discard)

    def stop(self, clock: Callable[[], float]) -> None:
        """Ends the input: at most one more step is transcribed, of audio that has arrived."""
        self.input.close()
        self.fill(clock)
        self.discarded_s = self._untaken_s()
        if not self._finished:
            waiting_s = self.stream.waiting_s
            self._finish(discard=True)
            self.discarded_s += waiting_s - self.stream.waiting_s

    def _untaken_s(self) -> float:
        """Takes what has arrived and is not needed; returns how many seconds that is."""
        samples = 0
        with contextlib.suppress(Exception):
            while not self.input.ended:
                arrival = self.input.take()
                samples += 0 if arrival is None else len(arrival.samples)
        return samples / self.stream.rate

    def note(self, found: Update | Failure) -> None:
        """Takes the result of a step."""
        if isinstance(found, Failure):
            self.error, self._finished = found, True
            self.input.close()
        else:
            self._ready_s = found.ready_s


class Feeder:
    """Feeds the streams of a pool from inputs, and decodes their steps together.

    An input that fails ends alone; the others go on.

    Args:
        pool: Pool of the streams, of the same clock as the inputs.
        inputs: The inputs.
        step_s: Seconds of audio between updates.
        wait: Function that waits for some seconds; called while no audio arrives.
        **options: Other options of the streams, see `StreamPool.open`.

    Attributes:
        streams: The streams, in the order of the inputs.
    """

    def __init__(
        self,
        pool: StreamPool,
        inputs: Sequence[AudioInput],
        step_s: float = 1.0,
        wait: Callable[[float], None] = time.sleep,
        **options: Any,
    ) -> None:
        self._pool, self._wait = pool, wait
        self.streams = [
            FedStream(one, pool.open(step_s=step_s, name=one.name, **options), step_s)
            for one in inputs
        ]
        self._of = {id(one.stream): one for one in self.streams}

    def start(self) -> None:
        """Starts all inputs."""
        for one in self.streams:
            try:
                one.input.start()
            except Exception as error:
                one.fail(error)

    @property
    def ended(self) -> bool:
        """Whether all streams have ended."""
        return all(one.ended for one in self.streams)

    def step(self) -> list[tuple[FedStream, Update | Failure]]:
        """Decodes a step of each stream whose audio has arrived; returns what was found.

        If there is none, it waits a moment.
        """
        for one in self.streams:
            one.fill(self._pool.clock)
        found = [(self._of[id(stream)], result) for stream, result in self._pool.round()]
        for one, result in found:
            one.note(result)
        if not found and not self.ended:
            self._wait(_PAUSE_S)
        return found

    def stop(self) -> None:
        """Ends all inputs; see `FedStream.stop`."""
        for one in self.streams:
            one.stop(self._pool.clock)
