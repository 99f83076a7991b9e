"""`Limits` of the server, and `Gate`, the middleware that enforces them on every request.

The gate is plain ASGI, before any framework: a request that is refused costs no parsing. It checks
the key in constant time, the address of the page a browser request comes from, the rate and number
of connections of each client, and the size and pace of what is received and sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmdecode.errors import OptionError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

LOG = logging.getLogger("mmdecode.serve")

FAILED = "the server failed; its log says where"
"""Text of the answer to a request that meets a bug of the server."""
OPEN = re.compile(r"/|/healthz|/assets/[^/]+")
"""Paths that need no key: the page, which sends one itself, and what a load balancer asks."""
POLICY_VIOLATION, INTERNAL, TRY_AGAIN = 1008, 1011, 1013
"""Close codes of a websocket that is refused (RFC 6455, and IANA's registry)."""
KNOWN, ADMIT = "mmdecode.key_known", "mmdecode.admit"
"""Keys of a scope: whether the key is known, and the function to call once it is."""
UNTIL, LATER = "mmdecode.until_s", "mmdecode.later"
"""Keys of a scope: the end of its time on the monotonic clock, and functions called at its end."""
LINGER_S = 2.0
"""Seconds in which the rest of a refused request is read: before, browsers read no answer."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Most of everything that a client, or all together, may ask of the server.

    Attributes:
        upload_bytes: Size of a request.
        audio_s: Seconds of audio in a file after decoding, and in a stream.
        pixels: Pixels of an image.
        images: Images of a conversation.
        queue: Requests that wait or are decoded.
        streams: Streams that are open.
        connections: Requests and streams at the same time, of all clients.
        connections_of_client: Requests and streams at the same time, of one address.
        rate: Requests a minute of one address, on average; as many may come at once.
        receive_s: Seconds in which a client sends its next part.
        send_s: Seconds in which a client reads what was sent.
        request_s: Seconds until a request has to be answered.
        waiting_s: Seconds of audio of a stream that wait for decoding, before it is read on.
        memory_bytes: Bytes of uploads and decoded audio of all requests.
        answer_tokens: Tokens of an answer.
        prompt_cache: Bytes of prompts that are kept after their answers.
        text: Characters of a conversation.
        strangers: Websockets whose key is not known yet.

    Raises:
        OptionError: A limit is not positive.
    """

    upload_bytes: int = 100 << 20
    audio_s: float = 4 * 3600.0
    pixels: int = 50_000_000
    images: int = 16
    queue: int = 128
    streams: int = 64
    connections: int = 256
    connections_of_client: int = 128
    rate: float = 1200.0
    receive_s: float = 30.0
    send_s: float = 30.0
    request_s: float = 900.0
    waiting_s: float = 30.0
    memory_bytes: int = 4 << 30
    answer_tokens: int = 4096
    prompt_cache: int = 0
    text: int = 200_000
    strangers: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value > 0 or name == "prompt_cache"):
                raise OptionError(f"{name}={value}; expected more than 0")


class Refusal(Exception):
    """An answer other than success, in the form of OpenAI's interface.

    Args:
        status: HTTP status.
        message: Text that says what was given, what is expected and what to do.
        param: Name of the parameter that is wrong; ``None``: none is.
        code: Short name of the reason.
        retry_s: Seconds after which the client may try again; ``None``: it should not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_s = status, param, code, retry_s

    @property
    def body(self) -> dict[str, Any]:
        """The answer as a JSON object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        text, param = encodable(" ".join(str(self).split())), self.param and encodable(self.param)
        return {"error": {"message": text, "type": kind, "param": param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        found = {} if self.retry_s is None else {"Retry-After": str(max(1, round(self.retry_s)))}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def close_reason(refusal: Refusal) -> str:
    """Returns the reason of a close frame, which has room for 123 bytes."""
    return str(refusal).encode(errors="replace")[:120].decode(errors="ignore")


def encodable(text: str) -> str:
    """Returns a text that UTF-8 can encode: half of a surrogate pair, which JSON can hold, is ?."""
    return text.encode("utf-8", "replace").decode()


def is_text(value: str) -> bool:
    """Whether UTF-8 can encode a text."""
    return encodable(value) == value


class Budget:
    """Memory that requests may hold together.

    Args:
        most: Bytes of all of them.

    Attributes:
        held: Bytes that are held.
    """

    def __init__(self, most: int) -> None:
        self._most, self.held = most, 0

    def take(self, count: int) -> None:
        """Takes bytes; called in the event loop alone.

        Raises:
            Refusal: There are not as many.
        """
        if self.held + count > self._most:
            raise Refusal(
                503,
                "the server has no memory for this now; send it again later, or less at once",
                code="overloaded",
                retry_s=5,
            )
        self.held += count

    def give_back(self, count: int) -> None:
        """Gives bytes back."""
        self.held -= count


class Rates:
    """Token buckets by client; clients whose bucket is full again are forgotten.

    Args:
        rate: Tokens a minute.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._most, self._clock = rate / 60, max(1.0, rate), clock
        self._used: dict[str, tuple[float, float]] = {}  # tokens that are missing, and when
        self._swept_s = clock()

    def take(self, client: str) -> float:
        """Takes a token; returns 0, or the seconds until there is one again."""
        now_s = self._clock()
        if now_s - self._swept_s > 60:
            self._swept_s = now_s
            self._used = {
                name: (used, at)
                for name, (used, at) in self._used.items()
                if used > (now_s - at) * self._per_s
            }
        used, at = self._used.get(client, (0.0, now_s))
        used = max(0.0, used - (now_s - at) * self._per_s)
        if used + 1 > self._most:
            return (used + 1 - self._most) / self._per_s
        self._used[client] = used + 1, now_s
        return 0.0


class Gate:
    """ASGI middleware that lets a request in, or answers it itself.

    Args:
        app: The application.
        limits: The limits.
        key: Key that clients send as ``Authorization: Bearer KEY``; ``None``: none is demanded.
        hosts: Values of the Host header that are served; ``None``: any. On loopback this keeps
            pages of other sites out, whose names are made to point here.
        count: Called with the endpoint, status and seconds of each answer.

    Attributes:
        active: Number of requests and websockets that are being served.
        draining: Whether new requests are refused, since the server ends.
    """

    def __init__(
        self,
        app: App,
        limits: Limits,
        key: str | None = None,
        hosts: frozenset[str] | None = None,
        count: Callable[[str, int, float], None] = lambda *_: None,
    ) -> None:
        self.app, self.limits, self.hosts, self._count = app, limits, hosts, count
        self._key = None if key is None else key.encode()
        self.active, self.draining = 0, False
        self.budget = Budget(limits.memory_bytes)
        self._strangers = 0
        self._of_client: Counter[str] = Counter()
        self._rates = Rates(limits.rate)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serves a request or websocket."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        began, status = time.monotonic(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._admitted(scope, receive, noted)
        finally:
            if scope["type"] == "http":
                self._count(_endpoint(scope), status, time.monotonic() - began)

    async def _admitted(self, scope: Any, receive: Receive, send: Send) -> None:
        client = (scope.get("client") or ("unknown",))[0]
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        try:
            self._check(scope, client, headers)
        except Refusal as refusal:
            return await _refuse(scope, receive, send, refusal)
        stranger = scope.get(KNOWN) is False
        self.active += 1
        self._strangers += stranger
        self._of_client[client] += 1

        def admit() -> None:
            nonlocal stranger
            self._strangers -= stranger
            stranger = False

        scope[ADMIT], scope[LATER] = admit, [admit]
        try:
            await self._serve(scope, receive, send)
        finally:
            for call in scope[LATER]:
                call()
            self.active -= 1
            self._of_client[client] -= 1
            if not self._of_client[client]:
                del self._of_client[client]

    def knows(self, key: bytes | None) -> bool:
        """Whether a key is that of the server, or none is demanded; takes the same time always."""
        return self._key is None or hmac.compare_digest(key or b"", self._key)

    def _check(self, scope: Any, client: str, headers: dict[str, bytes]) -> None:
        path = scope["path"]
        host = headers.get("host", b"").decode("latin-1").lower()
        if self.hosts is not None and _without_port(host) not in self.hosts:
            raise Refusal(
                403, f"Host {host[:100]!r} is not served here; use 127.0.0.1 or localhost"
            )
        origin = headers.get("origin", b"").decode("latin-1").lower()
        if origin and origin.partition("://")[2] != host:
            raise Refusal(
                403, f"pages of {origin[:100]!r} may not call this server (CORS is closed)"
            )
        if OPEN.fullmatch(path) and scope["type"] == "http":
            return
        if self.draining:
            raise Refusal(503, "the server ends and takes nothing new; try again", retry_s=10)
        scheme, _, given = headers.get("authorization", b"").partition(b" ")
        bearer = given.strip() if scheme.lower() == b"bearer" else b""
        # a page cannot set headers of a websocket: its first message may bring the key
        later = scope["type"] == "websocket" and "authorization" not in headers
        if not (later or self.knows(bearer)):
            raise Refusal(
                401,
                "no valid key; send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
            )
        scope[KNOWN] = not later or self._key is None
        if not scope[KNOWN] and self._strangers >= self.limits.strangers:
            raise Refusal(503, "too many clients without a key; send the header", retry_s=1)
        if wait_s := self._rates.take(client):
            raise Refusal(429, "too many requests a minute from this address", retry_s=wait_s)
        if self._of_client[client] >= self.limits.connections_of_client:
            raise Refusal(
                429,
                f"{self.limits.connections_of_client} requests of this address are being served, "
                "which is the limit; wait for one to end",
                retry_s=1,
            )
        if self.active >= self.limits.connections:
            raise Refusal(503, "too many requests are being served; try again", retry_s=1)
        length = headers.get("content-length", b"0")
        if not length.isdigit() or int(length) > self.limits.upload_bytes:
            raise self._too_large()

    def _too_large(self) -> Refusal:
        most = self.limits.upload_bytes / (1 << 20)
        return Refusal(
            413, f"the request is larger than {most:g} MiB; send a smaller or compressed file"
        )

    async def _serve(self, scope: Any, receive: Receive, send: Send) -> None:
        """Runs the application, with limits on what is received and sent."""
        limits, socket = self.limits, scope["type"] == "websocket"
        received, whole, answered = 0, False, False
        until_s = scope[UNTIL] = time.monotonic() + limits.request_s

        async def limited_receive() -> Message:
            nonlocal received, whole
            if whole or socket:  # after the body, only the end of the connection is waited for
                return await receive()
            left_s = max(0.0, until_s - time.monotonic())
            try:
                message = await asyncio.wait_for(receive(), min(limits.receive_s, left_s))
            except TimeoutError:
                problem = f"nothing was received for {limits.receive_s:g} s"
                if left_s < limits.receive_s:
                    problem = f"the body did not end within {limits.request_s:g} s"
                raise Refusal(408, f"{problem}; send the body at once") from None
            self.budget.take(len(message.get("body", b"")))
            received += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if received > limits.upload_bytes:
                raise self._too_large()
            return message

        async def limited_send(message: Message) -> None:
            nonlocal answered
            answered = answered or message["type"] == "http.response.start"
            # the server's own send returns when the client has read enough of what came before
            await asyncio.wait_for(send(message), limits.send_s)

        try:
            await self.app(scope, limited_receive, limited_send)
        except Refusal as refusal:
            if not answered:
                await _refuse(scope, receive, send, refusal)
        except (TimeoutError, ConnectionError):  # a client that does not read, or has gone
            return
        except Exception as error:
            # not raised again: uvicorn would log its message, which may be a client's
            name, where = type(error).__name__, _lines_of(error)
            LOG.error("%s at %s: a bug of the server, in %s", name, _endpoint(scope), where)
            if socket:
                with contextlib.suppress(Exception):  # it is closed already
                    await limited_send({"type": "websocket.close", "code": INTERNAL})
            elif not answered:
                await _refuse(scope, receive, send, Refusal(500, FAILED, code="internal_error"))
        finally:
            self.budget.give_back(received)


def _endpoint(scope: Any) -> str:
    return getattr(scope.get("route"), "path", "none")


def _lines_of(error: Exception) -> str:
    """Returns the lines of code that an error came through, the last one first."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[:8])


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


async def _refuse(scope: Any, receive: Receive, send: Send, refusal: Refusal) -> None:
    """Answers with a refusal; a websocket is answered in HTTP, where the server can."""
    body = json.dumps(refusal.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
    headers.append((b"connection", b"close"))
    kind = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            code = TRY_AGAIN if refusal.retry_s else POLICY_VIOLATION
            await send({"type": "websocket.close", "code": code, "reason": close_reason(refusal)})
            return
        kind = "websocket.http"
    await send({"type": f"{kind}.response.start", "status": refusal.status, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": body, "more_body": kind == "http"})
    if kind == "http":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_skip(receive), LINGER_S)
        await send({"type": f"{kind}.response.body", "body": b""})


async def _skip(receive: Receive) -> None:
    """Receives the rest of a request, and drops it."""
    while (await receive()).get("more_body", False):
        pass
