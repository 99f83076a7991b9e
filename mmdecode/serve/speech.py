"""`SpeechWorker`: decodes the files and streams of all clients, in batches that clients share.

One thread owns the recogniser. It decodes one step of all streams, then one of each batch of files,
and so on, so that a long file holds up neither streams nor files. Files with the same options share
a batch, which new files join between two steps; the text of a file is the one that it has alone,
see `mmdecode.asr.decoding.long_form`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from mmdecode.asr.audio.reading import Source, source_of
from mmdecode.asr.decoding.long_form import HINT
from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.results import Failure, Segment, Transcript
from mmdecode.asr.streaming import PooledStream, StreamPool, Update
from mmdecode.asr.transcriber import Transcriber, failure_of
from mmdecode.errors import OverloadError
from mmdecode.runs.items import Failed
from mmdecode.serve.limits import Limits
from mmdecode.serve.metrics import Metrics
from mmdecode.serve.worker import Worker

Notify = Callable[[list[Segment], Transcript | Failure | None], None]
"""Takes the new segments of a file, and its result; called in the thread of the worker."""
Take = Callable[[Update | Failure, bool], None]
"""Takes an update of a stream, and whether it is the last; called in the thread of the worker."""


class FileRequest:
    """A file that waits for decoding or is decoded.

    Args:
        source: The recording.
        options: Options of its transcription.
        notify: Function that is called after each step, and at the end with the result.
        discard: Function that takes it out of the queue.

    Attributes:
        cancelled: Whether nobody waits for it any more; it then ends after the step at hand.
    """

    def __init__(
        self,
        source: Source,
        options: TranscribeOptions,
        notify: Notify,
        discard: Callable[[FileRequest], None],
    ) -> None:
        self.source, self.options, self.notify = source, options, notify
        self._discard = discard
        self.cancelled = False

    def cancel(self) -> None:
        """Says that nobody waits for it any more; called from any thread."""
        self.cancelled = True
        self._discard(self)


class Batch:
    """Files with the same options that are decoded together; others join between two steps.

    Args:
        transcriber: Transcriber with their options.
        take: Function that returns the next waiting file with these options, or ``None``.
        size: Most files at once.
    """

    def __init__(
        self, transcriber: Transcriber, take: Callable[[], FileRequest | None], size: int
    ) -> None:
        self._take, self._files = take, dict[int, FileRequest]()
        self._count = 0
        self._steps = transcriber.stream_windows(self, self._is_wanted, size)

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[Source]:
        return self

    def __next__(self) -> Source:
        """Takes a waiting file into the batch."""
        request = self._take()
        if request is None:
            raise StopIteration
        self._files[self._count] = request
        self._count += 1
        return request.source

    def _is_wanted(self, index: int) -> bool:
        if index in self._files and self._files[index].cancelled:
            del self._files[index]
        return index in self._files

    def step(self) -> bool:
        """Decodes, if need be, and hands on what is new of one file; whether any file is left."""
        try:
            index, segments, result = next(self._steps)
        except StopIteration:
            return False
        except Exception as error:  # of the options or the machine: it is that of all of them
            failed = failure_of("", 0, Failed.of(error, HINT))
            for request in self._files.values():
                request.notify([], failed)
            self._files.clear()
            return False
        request = self._files[index]
        if result is not None:
            del self._files[index]
        request.notify(segments, result)
        return True


class LiveStream:
    """A stream of a client.

    Args:
        stream: Its stream in the pool.
        wake: Function that wakes the worker.
        forget: Function that takes the stream from the worker.
    """

    def __init__(
        self,
        stream: PooledStream,
        wake: Callable[[], None],
        forget: Callable[[PooledStream], None],
    ) -> None:
        self.stream, self._wake, self._forget = stream, wake, forget

    def feed(self, samples: np.ndarray) -> None:
        """Adds samples; see `PooledStream.feed`."""
        self.stream.feed(samples)
        self._wake()

    def finish(self) -> None:
        """Ends the audio; see `PooledStream.finish`."""
        self.stream.finish()
        self._wake()

    def leave(self) -> None:
        """Ends the stream at once; see `PooledStream.leave`."""
        self.stream.leave()
        self._forget(self.stream)


class SpeechWorker(Worker):
    """Decodes files and streams in a thread of its own.

    Args:
        transcriber: Transcriber of all requests, each of which may change its options.
        limits: Most requests and streams.
        metrics: Counters of the server.
        batch_size: Most files, and most streams, that are decoded at once.
    """

    def __init__(
        self, transcriber: Transcriber, limits: Limits, metrics: Metrics, batch_size: int = 8
    ) -> None:
        super().__init__("speech")
        self.transcriber, self._limits, self._metrics = transcriber, limits, metrics
        self._size = batch_size
        self._pool = StreamPool(transcriber, batch_size, limits.waiting_s)
        self._takers: dict[PooledStream, Take] = {}
        self._waiting: dict[TranscribeOptions, deque[FileRequest]] = {}
        self._batches: dict[TranscribeOptions, Batch] = {}
        self.start()

    @property
    def waiting(self) -> int:
        """Number of files that wait."""
        with self._changed:
            return sum(map(len, self._waiting.values()))

    @property
    def decoding(self) -> int:
        """Number of files that are decoded."""
        return sum(map(len, list(self._batches.values())))

    @property
    def streams(self) -> int:
        """Number of open streams."""
        return len(self._pool)

    @property
    def delay_s(self) -> float:
        """Most seconds of audio that wait in any stream."""
        return self._pool.delay_s

    def options(self, **options: Any) -> TranscribeOptions:
        """Returns the options of a request, which are checked.

        Raises:
            OptionError: One is out of range, or the model does not support it.
        """
        return self.transcriber.with_options(**options).options

    def submit(
        self, samples: np.ndarray, options: TranscribeOptions, notify: Notify
    ) -> FileRequest:
        """Adds a file.

        Args:
            samples: Its samples at the rate of the transcriber, ``(samples,)``.
            options: Its `options`.
            notify: See `FileRequest`.

        Raises:
            OverloadError: Too many files wait.
        """
        source = source_of(samples, self.transcriber.sampling_rate)
        request = FileRequest(source, options, notify, self._discard)
        with self._changed:
            if self.waiting >= self._limits.queue:
                raise OverloadError(
                    f"{self._limits.queue} files wait already; send the file again later"
                )
            self._waiting.setdefault(options, deque()).append(request)
            self._changed.notify()
        return request

    def open(self, take: Take, **options: Any) -> LiveStream:
        """Opens a stream.

        Args:
            take: See `Take`.
            **options: See `StreamPool.open`.

        Raises:
            OverloadError: Too many streams are open.
            OptionError: See `StreamPool.open`.
            UnknownNameError: There is no such policy.
        """
        with self._changed:
            if len(self._pool) >= self._limits.streams:
                raise OverloadError(
                    f"{self._limits.streams} streams are open, which is the limit; try again later"
                )
            stream = self._pool.open(**options)
            self._takers[stream] = take
        return LiveStream(stream, self._wake, self._forget)

    def _discard(self, request: FileRequest) -> None:
        with self._changed:
            own = self._waiting.get(request.options, deque())
            if request in own:
                own.remove(request)
                if not own:
                    del self._waiting[request.options]

    def _forget(self, stream: PooledStream) -> None:
        with self._changed:
            self._takers.pop(stream, None)

    def has_work(self) -> bool:
        """Returns whether a file or a step of a stream waits, or files are being decoded."""
        return bool(self._batches or self._waiting) or self._pool.is_due

    def work(self) -> None:
        """Decodes a step of the streams, and one of each batch of files."""
        if self._pool.is_due:
            self._round()
        self._begin()
        for options, batch in list(self._batches.items()):
            self._metrics.batch(len(batch))
            if not batch.step():
                del self._batches[options]

    def _begin(self) -> None:
        """Begins batches of options that wait and have none, at most as many as files in one."""
        with self._changed:
            others = [options for options in self._waiting if options not in self._batches]
        for options in others[: max(0, self._size - len(self._batches))]:
            try:
                transcriber = self.transcriber.with_options(**vars(options))
            except Exception as error:  # of the options: it is that of all who have them
                failed = failure_of("", 0, Failed.of(error, HINT))
                with self._changed:
                    waiting = self._waiting.pop(options, deque())
                for request in waiting:
                    request.notify([], failed)
                continue
            self._batches[options] = Batch(transcriber, partial(self._take, options), self._size)

    def _round(self) -> None:
        """Decodes a step of the streams."""
        try:
            found = self._pool.round()
        except Exception as error:  # of no stream alone
            failed = failure_of("", 0, Failed.of(error, HINT))
            with self._changed:
                takers, self._takers = self._takers, {}
            for stream, take in takers.items():
                stream.leave()
                take(failed, True)
            return
        self._metrics.round(len(found))
        for stream, result in found:
            with self._changed:
                taker = self._takers.get(stream)
                if stream.ended:
                    self._takers.pop(stream, None)
            if taker is not None:
                taker(result, stream.ended)

    def _take(self, options: TranscribeOptions) -> FileRequest | None:
        """Returns the next file that waits with the options of a batch.

        While others wait that have no batch, and there is no room for one more, none joins.
        """
        with self._changed:
            own = self._waiting.get(options)
            others = any(other not in self._batches for other in self._waiting)
            full = len(self._batches) >= self._size and len(self._batches[options]) > 0
            if own is None or (others and full):
                return None
            request = own.popleft()
            if not own:
                del self._waiting[options]
            return request
