"""Clients that vanish, and clients that do not read their answers. See serve.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import websockets
from serve_process import (
    FILES,
    MODEL,
    QUESTIONS,
    RATE,
    Server,
    as_pcm,
    as_wav,
    asking,
    share_of,
    times,
    transcribed,
)

from mmdecode.asr import Transcriber
from mmdecode.zoo.speech import Clip

Row = dict[str, Any]
VANISH_SHARE, PIECES_SHARE = 0.05, 0.25
LEAST_REQUESTS = 200
"""Growth of memory counts after so many requests."""

# ---- vanish


def own_clips(
    transcriber: Transcriber, clips: Sequence[Clip], count: int
) -> list[tuple[bytes, str]]:
    """Recordings with texts that all differ: clips, and pairs of clips."""
    waves = [clip.samples() for clip in clips]
    pairs = [(a, b) for a in range(len(waves)) for b in range(len(waves)) if a != b]
    pairs = random.Random(0).sample(pairs, len(pairs))
    found: dict[str, bytes] = {}
    for wave in [*waves, *(np.concatenate([waves[a], waves[b]]) for a, b in pairs)]:
        if len(found) < count:
            data = as_wav(wave)
            found.setdefault(transcriber(data).text, data)
    return [(data, text) for text, data in found.items()]


async def vanishing(
    server: Server, own: Sequence[tuple[bytes, str]], requests: int, seed: int
) -> Row:
    """Row of clients, some of whose requests are given up at a random moment."""
    counts: Counter[str] = Counter()
    spent: list[float] = []

    async def client(number: int) -> None:
        (data, text), draw = own[number], random.Random(f"{seed}/{number}")
        http = server.client()
        for _ in range(number, requests, len(own)):
            began, pieces = time.perf_counter(), draw.random() < PIECES_SHARE
            call = asyncio.create_task(transcribed(http, data, pieces))
            if draw.random() < VANISH_SHARE:
                usual_s = statistics.median(spent) if spent else 1.0
                await asyncio.wait({call}, timeout=draw.uniform(0, usual_s))
                if not call.done():
                    call.cancel()
                    await asyncio.wait({call})
                    await http.aclose()
                    http = server.client()
                    counts["vanished"] += 1
                    continue
            try:
                status, found = await call
            except httpx.TimeoutException:
                counts["unanswered"] += 1
                continue
            spent.append(time.perf_counter() - began)
            counts["wrong"] += status == 200 and found != text
            counts["refused"] += status == 503
            counts["failed"] += status not in (200, 503)
        await http.aclose()

    await asyncio.gather(*map(client, range(len(own))))
    names = ("vanished", "wrong", "unanswered", "refused", "failed")
    return {name: counts[name] for name in names} | times(spent)


def vanish(
    transcriber: Transcriber,
    clips: Sequence[Clip],
    clients: int,
    requests: int,
    threads: int,
    seed: int,
) -> Iterator[Row]:
    """Yields one row; memory is compared after as many clients have sent their first requests."""
    own = own_clips(transcriber, clips, min(clients, requests))
    with Server(threads) as server:
        asyncio.run(vanishing(server, own, 2 * len(own), seed + 1))
        asyncio.run(server.stuck())
        before = server.memory_mb
        row = {"clients": len(own), "requests": requests}
        row |= asyncio.run(vanishing(server, own, requests, seed))
        row["stuck"] = asyncio.run(server.stuck())
        after = server.memory_mb
        grown = share_of(before, after)
        row |= {"memory_mb": [before, after], "grown_percent": grown, "bugs": server.bugs()}
        yield row | {"grown_counts": requests >= LEAST_REQUESTS}


# ---- slow

TRICKLE, TRICKLE_S = 16, 0.5
"""Bytes that a client reads at a time, and the seconds between two times."""
LEAST_PATIENCE_S = 90.0
"""Connections that nobody reads count as held after so many seconds."""


class Slow:
    """Clients that do not read, or hardly; each keeps its connection until it is told to end.

    Args:
        server: The server.
        clip: A recording.
        question: Question about an image, with the image.

    Attributes:
        over: Set when they end.
        ports: Their ports.
    """

    def __init__(self, server: Server, clip: Clip, question: tuple[str, bytes]) -> None:
        self._server, self._wave, self._question = server, clip.samples(), question
        self.over, self.ports = asyncio.Event(), list[int]()

    @contextlib.asynccontextmanager
    async def _connected(self, method: str, path: str, **body: Any) -> Any:
        """A connection with a small buffer, on which a request was sent."""
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            link.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(link, ("127.0.0.1", self._server.port))
            self.ports.append(link.getsockname()[1])
            await loop.sock_sendall(link, self._request(method, path, **body))
            yield link

    def _request(self, method: str, path: str, **body: Any) -> bytes:
        built = httpx.Request(method, self._server.url + path, **body)
        lines = [f"{name}: {value}" for name, value in built.headers.items()]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + built.read()

    async def events_slowly(self) -> None:
        """Reads a few bytes a second of a file's events."""
        form = {"model": MODEL, "stream": "true"}
        files = {"file": ("a", as_wav(self._wave))}
        async with self._connected("POST", FILES, data=form, files=files) as link:
            with contextlib.suppress(OSError):
                while not self.over.is_set():
                    if not await asyncio.get_running_loop().sock_recv(link, TRICKLE):
                        break
                    await asyncio.sleep(TRICKLE_S)
            await self.over.wait()

    async def events_unread(self) -> None:
        """Reads nothing of an answer's events."""
        body = asking(*self._question, stream=True)
        async with self._connected("POST", QUESTIONS, json=body):
            await self.over.wait()

    async def row_unread(self) -> None:
        """Sends requests in a row, until the connection takes no more, and reads nothing."""
        async with self._connected("GET", "/assets/page.js") as link:
            asked = self._request("GET", "/assets/page.js") * 20
            sending = asyncio.get_running_loop().sock_sendall
            with contextlib.suppress(OSError, TimeoutError):
                while True:
                    await asyncio.wait_for(sending(link, asked), 2)
            await self.over.wait()

    async def stream_unread(self) -> None:
        """Streams a recording over and over, and reads nothing."""
        samples, size = as_pcm(self._wave), RATE // 5
        connecting = websockets.connect(
            self._server.socket_url, open_timeout=60, ping_interval=None, max_queue=1, proxy=None,
            close_timeout=1,
        )  # fmt: skip
        async with connecting as link:
            self.ports.append(link.local_address[1])
            await link.send(json.dumps({"type": "start", "step_s": 0.5}))
            with contextlib.suppress(websockets.WebSocketException, OSError):
                for at in range(0, len(samples) - size, size):
                    await link.send(samples[at : at + size])
                    await asyncio.sleep(0.1)
                await link.send('{"type": "finish"}')
            await self.over.wait()
            link.transport.abort()

    def held(self) -> int:
        """Number of their connections that the server still has."""
        found = self._server.process.net_connections("tcp")
        return sum(bool(one.raddr) and one.raddr.port in self.ports for one in found)


async def normal(
    server: Server, clips: Sequence[Clip], texts: Sequence[str]
) -> tuple[list[float], int]:
    """Seconds of a client that sends clips one after the other, and how many texts are wrong."""
    wrong, spent = 0, list[float]()
    async with server.client() as http:
        for clip, text in zip(clips, texts, strict=True):
            began = time.perf_counter()
            wrong += await transcribed(http, clip.path.read_bytes()) != (200, text)
            spent.append(time.perf_counter() - began)
    return spent, wrong


async def slowly(
    server: Server,
    clips: Sequence[Clip],
    texts: Sequence[str],
    question: tuple[str, bytes],
    clients: int,
    patience_s: float,
) -> Row:
    """Row of slow clients, a quarter of them of each kind, beside one that is not."""
    await normal(server, clips, texts)
    alone, wrong = await normal(server, clips, texts)
    slow = Slow(server, max(clips, key=lambda clip: clip.duration_s), question)
    kinds = (slow.events_slowly, slow.events_unread, slow.row_unread, slow.stream_unread)
    tasks = [asyncio.create_task(kinds[number % 4]()) for number in range(clients)]
    began, meanwhile, closed_s = time.monotonic(), list[float](), None
    while time.monotonic() - began < patience_s and closed_s is None:
        await asyncio.sleep(1)
        found, more = await normal(server, clips, texts)
        meanwhile += found
        wrong += more
        if len(slow.ports) == clients and not slow.held():
            closed_s = round(time.monotonic() - began, 1)
    long_enough = patience_s >= LEAST_PATIENCE_S
    held, stuck = slow.held(), await server.stuck(5) if long_enough else None
    slow.over.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    row: Row = {"clients": clients, "patience_s": patience_s}
    row |= times(alone, "alone_") | times(meanwhile, "meanwhile_")
    row |= {"meanwhile_most_s": round(max(meanwhile), 4), "meanwhile": len(meanwhile)}
    row |= {"closed": len(slow.ports) - held, "closed_s": closed_s, "held": held, "wrong": wrong}
    row |= {"errors": sorted({type(one).__name__ for one in ended if one is not None})}
    return row | {"stuck": stuck, "held_counts": long_enough}


def slow(
    transcriber: Transcriber,
    clips: Sequence[Clip],
    question: tuple[str, bytes],
    clients: int,
    patience_s: float,
    threads: int,
) -> Iterator[Row]:
    """Yields one row."""
    texts = [transcriber(str(clip.path)).text for clip in clips]
    with Server(threads) as server:
        row = asyncio.run(slowly(server, clips, texts, question, clients, patience_s))
        yield row | {"bugs": server.bugs()}
