"""`Service`: the models of a server with their workers, and `Channel`, from workers to requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from mmdecode.errors import (
    IncompatibleError,
    InputError,
    MissingExtraError,
    MMDecodeError,
    OptionError,
    OverloadError,
    UnknownNameError,
)
from mmdecode.runs.items import OUT_OF_MEMORY
from mmdecode.serve.answers import AnswerWorker
from mmdecode.serve.limits import LOG, Budget, Limits, Receive, Refusal
from mmdecode.serve.media import MediaDecoder, TooLargeError
from mmdecode.serve.metrics import Metrics
from mmdecode.serve.speech import SpeechWorker

Item = TypeVar("Item")
ASKED = InputError, OptionError, UnknownNameError, IncompatibleError, MissingExtraError
"""Errors of what a client sent, or of an option that this server does not have."""
_OF_PROGRAMS = re.compile(r",[^,]*--allow-truncated \(allow_truncated=True\)")
"""Advice of a reader that a client cannot follow."""
MEDIA_THREADS = 8
"""Uploads that are decoded, or wait for it, at a time; others wait before."""


@dataclass(kw_only=True)
class Service:
    """Models, workers and settings that the endpoints share.

    Attributes:
        limits: The limits.
        metrics: The counters.
        media: Decoder of uploads.
        speech: Worker of the recogniser; ``None``: there is none.
        answers: Worker of the vision-language model; ``None``: there is none.
        speech_names: Names of the recogniser, by which clients ask for it; the first is its own.
        answer_names: Names of the vision-language model.
        knows_key: Whether a key is that of the server.
        budget: Memory that requests may hold.
        created: Time when the server started, in seconds since 1970.
        drained: Set when the server is about to end.
    """

    limits: Limits
    metrics: Metrics
    media: MediaDecoder
    speech: SpeechWorker | None = None
    answers: AnswerWorker | None = None
    speech_names: Sequence[str] = ()
    answer_names: Sequence[str] = ()
    knows_key: Callable[[bytes | None], bool] = lambda key: True
    budget: Budget = field(default_factory=lambda: Budget(1 << 40))
    created: int = field(default_factory=lambda: int(time.time()))
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        # of its own, so that uploads that wait for a decoder hold up nothing else
        self._threads = ThreadPoolExecutor(MEDIA_THREADS, "media")

    async def decoded(self, decode: Callable[..., Item], *args: Any, **how: Any) -> Item:
        """Returns what a function of `media` returns, in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(decode, *args, **how))

    @property
    def is_alive(self) -> bool:
        """Whether the workers run."""
        workers = (self.speech, self.answers)
        return all(worker.is_alive for worker in workers if worker is not None)

    def close(self) -> None:
        """Ends all workers."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in (self.speech, self.answers, self.media):
            if worker is not None:
                worker.close()

    def speech_for(self, name: str) -> SpeechWorker:
        """Returns the worker of a recogniser that a client names.

        Raises:
            Refusal: There is no such recogniser.
        """
        if self.speech is None or name not in self.speech_names:
            raise self._unknown(name, self.speech_names, "speech")
        return self.speech

    def answers_for(self, name: str) -> AnswerWorker:
        """Returns the worker of a vision-language model that a client names.

        Raises:
            Refusal: There is no such model.
        """
        if self.answers is None or name not in self.answer_names:
            raise self._unknown(name, self.answer_names, "chat")
        return self.answers

    def _unknown(self, name: str, known: Sequence[str], task: str) -> Refusal:
        served = f"expected {' or '.join(map(repr, known))}" if known else "none is served"
        return Refusal(
            404,
            f"no {task} model {name[:100]!r}: {served}; see /v1/models",
            "model",
            "model_not_found",
        )


class GoneError(Exception):
    """The client has closed the connection."""


class Channel(Generic[Item]):
    """Hands items from the thread of a worker to the coroutine of a request."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def put(self, item: Item) -> None:
        """Adds an item; called from any thread."""
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def get(self, until_s: float = math.inf) -> Item:
        """Returns the next item, as soon as there is one.

        Args:
            until_s: Time of the monotonic clock until which it has to come.

        Raises:
            Refusal: It takes too long.
        """
        left_s = None if math.isinf(until_s) else max(0.0, until_s - time.monotonic())
        try:
            return await asyncio.wait_for(self._items.get(), left_s)
        except TimeoutError:
            raise _late() from None

    async def get_for(self, receive: Receive, until_s: float) -> Item:
        """Returns the next item, while the client of a request waits for it.

        Args:
            receive: Function that receives from the client, who has sent all of the request.
            until_s: Time of the monotonic clock until which it has to come.

        Raises:
            GoneError: The client has gone.
            Refusal: It takes too long.
        """
        getting = asyncio.ensure_future(self._items.get())
        going = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait(
                (getting, going),
                timeout=max(0.0, until_s - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if getting.done():
                return getting.result()
            if going.done():
                raise GoneError
            raise _late()
        finally:
            getting.cancel()
            going.cancel()


def _late() -> Refusal:
    return Refusal(504, "the request takes too long; send less at once", code="timeout")


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal_of(error: MMDecodeError, param: str | None = None) -> Refusal:
    """Returns the answer to a request that raises an error."""
    text = _OF_PROGRAMS.sub("", str(error))
    if isinstance(error, TooLargeError):
        return Refusal(413, text, param)
    if isinstance(error, OverloadError):
        return Refusal(503, text, code="overloaded", retry_s=1)
    if isinstance(error, ASKED):
        return Refusal(400, text, param)
    LOG.error("%s: %s", type(error).__name__, text)  # of the server's own
    return Refusal(500, "the server failed; its log says why", code="internal_error")


def refusal_of_failure(error: str, kind: str | None) -> Refusal:
    """Returns the answer to a request whose decoding failed."""
    if kind in {one.__name__ for one in ASKED} | {"CrashError"}:
        return Refusal(400, error)
    if kind == OUT_OF_MEMORY:
        return Refusal(503, error, code="overloaded", retry_s=5)
    return Refusal(500, "decoding failed; the server's log says why", code="internal_error")
