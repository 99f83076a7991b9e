"""`StreamPool`: many streams on one model; a round decodes one step of each in one batch.

The text of a stream is the one that a `Stream` alone gives: a step never waits for, or joins with,
another step of its own stream, and the text of a batch's rows does not depend on the other rows
(`mmdecode.asr.decoding.long_form`). Streams join, pause and leave between two rounds as they like.

If the machine cannot keep up, the delay of every stream grows, evenly: a round takes at most one
step of each stream, those first that were served longest ago. Nothing is dropped. The audio that
waits is limited: a stream with a step that is due takes no block beyond ``most_waiting_s`` seconds;
`PooledStream.feed` then takes nothing and raises `OverloadError`, and the caller feeds the block
again after the next round. (A stream without such a step takes any block.)

Streams may be fed, finished and left from any thread, while another one calls `StreamPool.round`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from mmdecode.asr.decoding.long_form import HINT
from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.results import Failure
from mmdecode.asr.streaming.policies import CommitPolicy, Stable
from mmdecode.asr.streaming.setting import refuse_no_transcriber
from mmdecode.asr.streaming.stream import Stream, Update
from mmdecode.asr.transcriber import Transcriber, failure_of
from mmdecode.errors import MMDecodeError, OptionError, OverloadError, refuse_unknown
from mmdecode.runs.items import Failed, tried

Request = dict[str, Any]


class PooledStream:
    """One stream of a `StreamPool`; made by `StreamPool.open`.

    Attributes:
        name: Its name, for messages.
        failure: Why the stream ended before its audio did; ``None``: it did not.
    """

    def __init__(self, pool: StreamPool, stream: Stream, name: str) -> None:
        self.name = name
        self.failure: Failure | None = None
        self._pool, self._stream = pool, stream
        self._arrivals: deque[tuple[int, float]] = deque()  # samples so far, and when they came
        self._fed = 0
        self._has_left = False
        self.turn = 0  # streams are decoded in this order

    @property
    def rate(self) -> int:
        """Sampling rate of its samples in Hz."""
        return self._stream.rate

    @property
    def fed_s(self) -> float:
        """Seconds of audio received so far."""
        return self._fed / self.rate

    @property
    def audio_s(self) -> float:
        """Seconds of audio transcribed so far."""
        return self._stream.audio_s

    @property
    def waiting_s(self) -> float:
        """Seconds of audio received that no round has taken yet."""
        with self._pool.lock:
            return self._stream.waiting_s

    @property
    def ended(self) -> bool:
        """Whether the last words are committed, or the stream failed or left."""
        return self.failure is not None or self._has_left or self._stream.ended

    @property
    def is_due(self) -> bool:
        """Whether a round can take a step of it."""
        return not self.ended and self._stream.is_due

    def feed(
        self, samples: np.ndarray, rate: int | None = None, arrived_s: float | None = None
    ) -> None:
        """Adds the next samples; they are transcribed in the next rounds.

        Args:
            samples: Mono float32 samples, ``(samples,)``, any number of them.
            rate: Their sampling rate in Hz; ``None``: it is not checked.
            arrived_s: Time when the last one arrived, on the clock of the pool; ``None``: now.

        Raises:
            OverloadError: Too much audio waits already; nothing was taken.
            InputError: The samples have another data type, shape or rate, or are not finite.
            OptionError: The stream is finished, failed or left the pool.
        """
        pool, stream = self._pool, self._stream
        with pool.lock:
            self._refuse_ended()
            stream.check(samples, rate)
            waiting_s = stream.waiting_s
            if stream.is_due and waiting_s + len(samples) / stream.rate > pool.most_waiting_s:
                raise OverloadError(
                    f"stream {self.name} has {waiting_s:.1f} s of audio waiting, and may have "
                    f"{pool.most_waiting_s:g} s; nothing was taken: feed the block again after "
                    "the next round, or run fewer streams on this machine"
                )
            stream.put(samples)
            if len(samples):
                self._fed += len(samples)
                now_s = pool.clock() if arrived_s is None else arrived_s
                self._arrivals.append((self._fed, now_s))

    def finish(self, discard: bool = False) -> None:
        """Ends the audio; the next rounds transcribe the rest and commit all words.

        Args:
            discard: Whether only one more step is taken; waiting audio after it is discarded.

        Raises:
            OptionError: The stream is finished, failed or left the pool.
        """
        with self._pool.lock:
            self._refuse_ended()
            self._stream.close(discard)
            if self._arrivals:  # the rest is due only now
                self._arrivals.pop()
            self._arrivals.append((self._fed, self._pool.clock()))

    def leave(self) -> None:
        """Takes the stream out of the pool at once; words that are not committed are lost."""
        with self._pool.lock:
            self._has_left = True
            self._stream.release()
            self._pool.remove(self)

    def _refuse_ended(self) -> None:
        if self.failure is not None:
            raise OptionError(f"stream {self.name} has failed: {self.failure.error}; open another")
        if self._has_left:
            raise OptionError(f"stream {self.name} has left the pool; open another")

    # ---- called by the pool

    @property
    def transcriber(self) -> Transcriber:
        """Transcriber of its steps."""
        return self._stream.transcriber

    def request(self) -> Request | None:
        """Returns the input of the transcriber for the next step, see `Stream.request`."""
        return self._stream.request()

    def advance(self, found: Any) -> Update | Failure:
        """Takes the result of a step; a failure ends the stream."""
        if not isinstance(found, Failure):
            done = tried(partial(self._stream.advance, found, self._ready_s), HINT)
            if isinstance(done, Update):
                return done
            found = failure_of(self.name, 0, done)
        self.failure = replace(found, source=self.name)
        self._stream.release()
        return self.failure

    def _ready_s(self) -> float:
        """Time at which a step ends: the end of its audio, and how long ago that came."""
        audio_s = self._stream.audio_s
        taken = round(audio_s * self.rate)
        while len(self._arrivals) > 1 and self._arrivals[0][0] < taken:
            self._arrivals.popleft()
        return audio_s + self._pool.clock() - self._arrivals[0][1]


class StreamPool:
    """Runs many streams on one model.

    Args:
        transcriber: Transcriber of all streams; a stream may change its options.
        batch_size: Most streams that a round decodes.
        most_waiting_s: Most seconds of audio that wait in a stream, see `PooledStream.feed`.
        clock: Function that returns the time in seconds, for `Update.ready_s`.

    Raises:
        OptionError: A value is out of range.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        batch_size: int = 64,
        most_waiting_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        refuse_no_transcriber(transcriber)
        if batch_size < 1 or not most_waiting_s > 0:
            raise OptionError(
                f"batch_size={batch_size}, most_waiting_s={most_waiting_s}; expected at least 1, "
                "and more than 0 s"
            )
        self.transcriber, self.batch_size = transcriber, batch_size
        self.most_waiting_s, self.clock = most_waiting_s, clock
        self.lock = threading.RLock()  # of what streams and pool hold
        self._in_round = threading.Lock()
        self._streams: list[PooledStream] = []
        self._shared: WeakValueDictionary[
            tuple[TranscribeOptions, bool, Stable | None], Transcriber
        ] = WeakValueDictionary()
        self._numbers, self._turns = count(), count()

    def __len__(self) -> int:
        with self.lock:
            return sum(not one.ended for one in self._streams)

    @property
    def is_due(self) -> bool:
        """Whether a round can take a step of any of the streams."""
        with self.lock:
            return any(one.is_due for one in self._streams)

    @property
    def delay_s(self) -> float:
        """Most seconds of audio that wait in any of the streams."""
        with self.lock:
            return max((one.waiting_s for one in self._streams), default=0.0)

    def open(
        self,
        policy: CommitPolicy | str = "agreement",
        step_s: float = 1.0,
        longest_s: float | None = None,
        redraft: bool = True,
        name: str | None = None,
        **options: Any,
    ) -> PooledStream:
        """Adds a stream; the next round is the first that can take a step of it.

        Args:
            policy: See `Stream`.
            step_s: See `Stream`.
            longest_s: See `Stream`.
            redraft: See `Stream`.
            name: Name of the stream, for messages, which no other stream has; ``None``: its number.
            **options: Fields of `TranscribeOptions` that differ from those of the transcriber.

        Raises:
            OptionError: An option does not exist or is out of range, the model has no evidence for
                the policy, or another stream has the name.
        """
        refuse_unknown(options, list(TranscribeOptions.__dataclass_fields__))
        transcriber = self.transcriber.with_options(**options) if options else self.transcriber
        stream = Stream(transcriber, policy, step_s, longest_s, redraft)
        with self.lock:
            taken = {one.name for one in self._streams}
            if name is None:
                name = next(text for text in map(str, self._numbers) if text not in taken)
            if name in taken:
                raise OptionError(
                    f"another stream of this pool is named {name!r}; give another name"
                )
            # streams that decode alike share a transcriber, so that their steps share a batch
            rule = stream.policy if isinstance(stream.policy, Stable) else None
            kind = stream.transcriber.options, redraft, rule
            stream.transcriber = self._shared.setdefault(kind, stream.transcriber)
            opened = PooledStream(self, stream, name)
            opened.turn = next(self._turns)
            self._streams.append(opened)
        return opened

    def remove(self, stream: PooledStream) -> None:
        """Removes a stream that has left; called by it."""
        with self.lock:
            self._streams = [one for one in self._streams if one is not stream]

    def round(self) -> list[tuple[PooledStream, Update | Failure]]:
        """Decodes one step of each stream that has one, in one batch for each set of options.

        An error that is not of one stream, such as Ctrl-C, loses nothing: no step was taken.

        Returns:
            The streams that took a step, each with its update, or with the failure that ended it.
            Streams that have ended are removed from the pool.
        """
        with self._in_round:
            with self.lock:
                due = [one for one in self._streams if one.is_due]
                due = sorted(due, key=lambda one: one.turn)[: self.batch_size]
                requests = [one.request() for one in due]
            found: dict[int, Any] = {}
            batches: dict[int, list[tuple[PooledStream, Request]]] = {}
            for one, request in zip(due, requests, strict=True):
                if request is not None:
                    batches.setdefault(id(one.transcriber), []).append((one, request))
            for batch in batches.values():
                found |= _decoded(batch)
            with self.lock:
                updates = [(one, one.advance(found.get(id(one)))) for one in due if not one.ended]
                for one in due:
                    one.turn = next(self._turns)
                self._streams = [one for one in self._streams if not one.ended]
            return updates

    def drain(self) -> Iterator[tuple[PooledStream, Update | Failure]]:
        """Decodes rounds until no stream has a step that is due, and yields all updates."""
        while found := self.round():
            yield from found


def _decoded(batch: Sequence[tuple[PooledStream, Request]]) -> dict[int, Any]:
    """Decodes steps that share a transcriber; returns results by the ids of their streams."""
    streams = [one for one, _ in batch]
    requests = [request for _, request in batch]
    found: dict[int, Any] = {}
    try:
        for result in streams[0].transcriber.stream(requests, batch_size=len(requests)):
            found[id(streams[result.index])] = result
    except MMDecodeError as error:  # of the options: it is that of all in this batch
        failed = failure_of("", 0, Failed.of(error, HINT))
        return {id(one): found.get(id(one), failed) for one in streams}
    return found
