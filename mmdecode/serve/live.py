"""``/v1/audio/stream``: a websocket that transcribes audio while it arrives.

The client may begin with ``{"type": "start", ...}``, see `START`; then sends samples as binary
messages, 16 bits little-endian, one channel; and ends with ``{"type": "finish"}``. The server sends
an ``update`` for each step, see `mmdecode.asr.streaming.Update`, and ``done`` after the last one.
Committed text never changes. If decoding falls behind, ``waiting_s`` grows, and the server reads no
further until it has caught up; nothing is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from mmdecode.asr.results import Failure
from mmdecode.asr.streaming import Update
from mmdecode.errors import MMDecodeError, OptionError, OverloadError
from mmdecode.serve.limits import (
    ADMIT,
    INTERNAL,
    KNOWN,
    POLICY_VIOLATION,
    TRY_AGAIN,
    Refusal,
    close_reason,
    is_text,
)
from mmdecode.serve.service import Channel, Service, refusal_of, refusal_of_failure
from mmdecode.serve.speech import LiveStream

START = {
    "key": str,
    "model": str,
    "rate": int,
    "language": str,
    "task": str,
    "prompt": str,
    "policy": str,
    "step_s": float,
    "word_timestamps": bool,
    "vad": bool,
}
"""Fields of the first message with their types; all may be left out."""
_OF_STREAM = ("language", "task", "prompt", "policy", "step_s", "word_timestamps", "vad")
RATES = (8_000, 48_000)
LEAST_STEP_S = 0.1
STRANGER_S = 5.0
"""Seconds in which a client without the header sends its key."""
BAD = 1007
"""Close code: data that is not consistent."""


def routes(service: Service) -> APIRouter:
    """Returns the endpoint for streams."""
    router = APIRouter()

    @router.websocket("/v1/audio/stream")
    async def stream(socket: WebSocket) -> None:
        with contextlib.suppress(WebSocketDisconnect):  # nobody is there to be told
            await socket.accept()
            try:
                await _Connection(service, socket).run()
            except Refusal as refusal:
                code = {401: POLICY_VIOLATION, 503: TRY_AGAIN}.get(refusal.status, BAD)
                code = INTERNAL if refusal.status == 500 else code
                await socket.send_json(refusal.body["error"] | {"type": "error"})
                await socket.close(code, close_reason(refusal))

    return router


class _Connection:
    """A websocket of a client.

    Args:
        service: Models and limits.
        socket: The websocket, accepted.
    """

    def __init__(self, service: Service, socket: WebSocket) -> None:
        self._service, self._socket = service, socket
        self._channel: Channel[tuple[Update | Failure, bool]] = Channel()
        self._progress = asyncio.Event()  # set by each update
        self._rest = b""
        self._received_s = 0.0
        self._resampler: Any = None

    async def run(self) -> None:
        """Serves the stream from its first message to its last words."""
        wait_s = self._service.limits.receive_s
        if not self._socket.scope[KNOWN]:
            wait_s = min(wait_s, STRANGER_S)
        first = await self._message(wait_s)
        if first is None:
            raise Refusal(408, f"nothing was received for {wait_s:g} s")
        given, data = _start(first)
        self._refuse_unknown_key(given)
        worker = self._service.speech_for(given.get("model", (*self._service.speech_names, "")[0]))
        options = {name: given[name] for name in _OF_STREAM if name in given}
        self._rate = worker.transcriber.sampling_rate
        self._given_rate = given.get("rate", self._rate)
        if self._given_rate != self._rate:
            import soxr

            self._resampler = soxr.ResampleStream(self._given_rate, self._rate, 1, dtype="float32")
        try:
            stream = await asyncio.to_thread(
                partial(worker.open, lambda *found: self._channel.put(found), **options)
            )
        except MMDecodeError as error:
            raise refusal_of(error) from error
        sending = asyncio.create_task(self._send_updates())
        receiving = asyncio.create_task(self._receive_audio(stream, data))
        try:
            await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            await sending
        finally:
            for task in (sending, receiving):
                task.cancel()
            if not stream.stream.ended:
                stream.leave()

    def _refuse_unknown_key(self, given: Mapping[str, Any]) -> None:
        known = self._socket.scope[KNOWN]
        if not known and not self._service.knows_key(str(given.get("key", "")).encode()):
            raise Refusal(
                401,
                "no valid key; send the header 'Authorization: Bearer KEY', or the key in the "
                "first message",
                code="invalid_api_key",
            )
        self._socket.scope[ADMIT]()

    async def _message(self, wait_s: float) -> str | bytes | None:
        """Returns the next message; ``None``: there is none in time, or the server ends.

        Args:
            wait_s: Seconds to wait for it.

        Raises:
            WebSocketDisconnect: The client has gone.
        """
        getting = asyncio.ensure_future(self._socket.receive())
        draining = asyncio.ensure_future(self._service.drained.wait())
        try:
            await asyncio.wait(
                (getting, draining),
                timeout=wait_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not getting.done():
                return None
            message = getting.result()
        finally:
            getting.cancel()
            draining.cancel()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code") or 1005)
        found: str | bytes | None = message.get("bytes")
        found = message.get("text") if found is None else found
        assert found is not None, "a message has bytes or a text"
        return found

    async def _receive_audio(self, stream: LiveStream, data: bytes) -> None:
        """Feeds the stream until the client ends it."""
        await self._feed(stream, data)
        wait_s = self._service.limits.receive_s
        while (message := await self._message(wait_s)) is not None:
            if isinstance(message, bytes):
                await self._feed(stream, message)
                continue
            if _json(message).get("type") != "finish":
                raise Refusal(400, f"message {message[:100]!r}; expected samples or 'finish'")
            break
        if self._service.drained.is_set():
            await self._socket.send_json({"type": "closing"})
        await self._feed(stream, b"", last=True)  # all that came is transcribed
        with contextlib.suppress(OptionError):  # it has failed: the failure is sent
            stream.finish()

    async def _feed(self, stream: LiveStream, data: bytes, last: bool = False) -> None:
        """Feeds samples; waits while too many of them wait for decoding."""
        data = self._rest + data
        whole = len(data) - len(data) % 2
        self._rest = data[whole:]
        samples = np.frombuffer(data[:whole], "<i2").astype(np.float32) / 32768
        self._received_s += len(samples) / self._given_rate
        if self._received_s > self._service.limits.audio_s:
            raise Refusal(
                413, f"the stream is longer than {self._service.limits.audio_s:g} s; open another"
            )
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=last)
        while len(samples):
            self._progress.clear()
            try:
                stream.feed(samples)
                return
            except OverloadError:
                await self._progress.wait()
            except OptionError:  # it has failed: the failure is sent
                return

    async def _send_updates(self) -> None:
        """Sends updates until the stream has ended."""
        metrics, text = self._service.metrics, []
        while True:
            found, ended = await self._channel.get()
            self._progress.set()
            if isinstance(found, Failure):
                raise refusal_of_failure(found.error, found.kind)
            text.append(found.text)
            metrics.delay(found.ready_s - found.audio_s)
            await self._socket.send_json({"type": "update", **self._update(found)})
            if ended:
                metrics.audio("streams", found.audio_s)
                done = {"type": "done", "text": "".join(text).strip(), "audio_s": found.audio_s}
                await self._socket.send_json(done)
                await self._socket.close()
                return

    def _update(self, found: Update) -> dict[str, Any]:
        words = None
        if found.words is not None:
            words = [vars(word) for word in found.words]
        return {
            "audio_s": round(found.audio_s, 3),
            "delay_s": round(found.ready_s - found.audio_s, 3),
            "waiting_s": round(max(0.0, self._received_s - found.audio_s), 3),
            "committed": found.text,
            "provisional": "".join(found.provisional),
            "words": words,
        }


def _start(message: str | bytes) -> tuple[dict[str, Any], bytes]:
    """Returns the fields of the first message, and its samples if it has none.

    Raises:
        Refusal: A field is unknown, or has another type.
    """
    if isinstance(message, bytes):
        return {}, message
    given = _json(message)
    if given.pop("type", None) != "start":
        raise Refusal(400, f"message {message[:100]!r}; expected samples or 'start'")
    for name, value in given.items():
        if name not in START:
            raise Refusal(400, f"{name[:100]!r} is not known; expected {', '.join(START)}", name)
        kind: Any = (int, float) if START[name] is float else START[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and START[name] is not bool):
            raise Refusal(400, f"{name}={value!r:.100}; expected {START[name].__name__}", name)
        if isinstance(value, str) and not is_text(value):
            raise Refusal(400, f"{name}={value!r:.100} is not UTF-8 text; write it as UTF-8", name)
    if given.get("step_s", LEAST_STEP_S) < LEAST_STEP_S:
        least = f"expected {LEAST_STEP_S:g} or more seconds"
        raise Refusal(400, f"step_s={given['step_s']}; {least}", "step_s")
    if not RATES[0] <= given.get("rate", RATES[0]) <= RATES[1]:
        raise Refusal(400, f"rate={given['rate']}; expected {RATES[0]} to {RATES[1]} Hz", "rate")
    return given, b""


def _json(message: str) -> dict[str, Any]:
    try:
        given = json.loads(message)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise Refusal(400, f"message {message[:100]!r}; expected a JSON object")
    return given
