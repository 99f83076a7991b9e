"""`run`: serves an application until it is asked to end, and then what was begun."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from mmdecode.errors import InputError, MissingExtraError

with MissingExtraError.instead("the server needs uvicorn", extra="serve"):
    import uvicorn

from mmdecode.runs.console import console, print_line
from mmdecode.runs.memory import return_freed
from mmdecode.serve.app import make_app, watch
from mmdecode.serve.limits import Gate
from mmdecode.serve.service import Service

MOST_IDLE = 1000
"""Connections that may be open without a request."""
_LOOK_S = 0.1  # seconds between two looks at what is still being served
_MOST_HEADERS = 64 << 10
_TIDY_TICKS = 20
"""Ticks of uvicorn, ten a second, after which memory is returned that requests have left."""


class DrainingServer(uvicorn.Server):
    """A server that ends what was begun before it ends, on SIGTERM or Ctrl-C.

    New requests are refused meanwhile, and open streams are finished: what was said is transcribed.
    A second signal ends the server at once.

    Connections on which nothing happens are closed: those that bring no whole request in time, and
    those whose clients do not read what is left for them, for which uvicorn waits for ever.

    Args:
        config: Configuration of uvicorn.
        gate: Counts what is being served.
        service: The models, which are told to finish streams.
    """

    def __init__(self, config: uvicorn.Config, gate: Gate, service: Service) -> None:
        super().__init__(config)
        self._gate, self._service = gate, service
        self._tasks: set[asyncio.Task[None]] = set()
        self._still: dict[tuple[Any, Any], float] = {}

    async def on_tick(self, counter: int) -> bool:
        """Looks after connections and memory; called by uvicorn ten times a second."""
        if counter % 10 == 0:
            self._abort_still(time.monotonic())
        if counter % _TIDY_TICKS == 0:
            gc.collect()  # milliseconds: what was loaded before is frozen
            return_freed()
        return await super().on_tick(counter)

    def _abort_still(self, now_s: float) -> None:
        """Aborts connections that have been in the same state for too long.

        A connection waits for its client to read, as long as there is something left to send;
        and one that has answered its last request, or had none, for the next one to be whole.
        """
        limits, before, self._still = self._service.limits, self._still, {}
        for connection in list(self.server_state.connections):
            transport, state = connection.transport, getattr(connection, "cycle", True)
            most_s = limits.receive_s + 1  # uvicorn itself ends many of these a second earlier
            if unsent := transport.get_write_buffer_size():
                state, most_s = unsent, limits.send_s
            elif state is not None and not getattr(state, "response_complete", False):
                continue
            since_s = self._still[connection, state] = before.get((connection, state), now_s)
            if now_s - since_s > most_s:
                transport.abort()

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
        print_line("ending after what was begun; again ends at once", console)
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY where the protocol is said; without it each answer takes 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
        limit_concurrency=limits.connections + MOST_IDLE,
        proxy_headers=False,  # else a client of this machine could say that it is another
        server_header=False,
        ws_max_size=1 << 20,
        # a client whose stream waits is not read, and neither is its answer to a ping; one that has
        # gone is noticed since it sends nothing for receive_s
        ws_ping_interval=None,
        ws_ping_timeout=None,
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
