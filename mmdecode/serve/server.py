"""`run`: serves an application until it is asked to end, and then what was begun."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from mmdecode.errors import InputError, MissingExtraError

with MissingExtraError.instead("the server needs uvicorn", extra="serve"):
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

from mmdecode.serve.app import make_app, watch
from mmdecode.serve.limits import Gate
from mmdecode.serve.service import Service

MOST_IDLE = 1000
"""Connections that may be open without a request."""
_LOOK_S = 0.1  # seconds between two looks at what is still being served
_MOST_HEADERS = 64 << 10


class Connection(H11Protocol):
    """A connection, which is closed if it brings no request, or no whole head of one, in time."""

    _cycle: object = None  # at the last look
    _unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to look at whether it is used."""
        super().connection_made(transport)
        if len(self.connections) > MOST_IDLE + self.config.backlog:
            transport.abort()
            return
        self._cycle = self
        self._look()

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        unread = self.transport.get_write_buffer_size()
        if unread and unread == self._unread:  # the client does not read
            self.transport.abort()
            return
        if self.transport.get_protocol() is self:  # else it is a websocket
            serving = self.cycle is not None and not self.cycle.response_complete
            if self._cycle is self.cycle and not serving:
                self.transport.close()
                return
            self._cycle = self.cycle
        self._unread = unread
        self.loop.call_later(self.timeout_keep_alive, self._look)


class DrainingServer(uvicorn.Server):
    """A server that ends what was begun before it ends, on SIGTERM or Ctrl-C.

    New requests are refused meanwhile, and open streams are finished: what was said is transcribed.
    A second signal ends the server at once.

    Args:
        config: Configuration of uvicorn.
        gate: Counts what is being served.
        service: The models, which are told to finish streams.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, service: Service) -> None:
        super().__init__(config)
        self._gate, self._service = gate, service
        self._tasks: set[asyncio.Task[None]] = set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to end; called by uvicorn's handler of signals."""
        self.stop()

    def stop(self) -> None:
        """Begins to end; the second time, ends at once. May be called from any thread."""
        if self._gate.draining:
            self.force_exit = self.should_exit = True
            threading.Thread(target=self._service.media.close, daemon=True).start()
            return
        self._gate.draining = True
        self._loop.call_soon_threadsafe(self._begin_to_end)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Remembers the event loop, which `handle_exit` needs."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def _begin_to_end(self) -> None:
        self._service.drained.set()
        task = self._loop.create_task(self._end())
        self._tasks.add(task)

    async def _end(self) -> None:
        while self._gate.active:
            await asyncio.sleep(_LOOK_S)
        self.should_exit = True


def bound(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address.

    Raises:
        InputError: It cannot.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InputError(
            f"cannot listen at {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from error
    listener.set_inheritable(False)
    return listener


def serve(
    service: Service,
    listener: socket.socket,
    gate_of: Callable[[Any], Gate],
    on_start: Callable[[], None] = lambda: None,
    hand_on: Callable[[DrainingServer], None] = lambda server: None,
) -> None:
    """Serves until a signal ends it, or `DrainingServer.stop`.

    Args:
        service: The models.
        listener: Socket that listens.
        gate_of: Makes the gate before an application.
        on_start: Called once connections are accepted.
        hand_on: Called with the server before it starts.
    """
    gate = gate_of(make_app(service))
    service.knows_key, service.budget = gate.knows, gate.budget
    watch(service, gate)
    limits = service.limits
    config = uvicorn.Config(
        gate,
        log_level="warning",
        access_log=False,
        http=Connection,
        proxy_headers=False,  # else a client of this machine could say that it is another
        server_header=False,
        ws_max_size=1 << 20,
        ws_ping_interval=limits.receive_s,
        ws_ping_timeout=limits.send_s,
        timeout_keep_alive=int(max(1, limits.receive_s)),
        h11_max_incomplete_event_size=_MOST_HEADERS,
        backlog=limits.connections,
        timeout_graceful_shutdown=5,
    )
    server = DrainingServer(config, gate, service)
    hand_on(server)
    asyncio.run(_serve(server, listener, on_start))


async def _serve(
    server: DrainingServer, listener: socket.socket, on_start: Callable[[], None]
) -> None:
    async def announce() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        on_start()

    announcing = asyncio.create_task(announce())
    try:
        await server.serve(sockets=[listener])
    finally:
        announcing.cancel()
