"""A server that is sent what is broken or made to do harm. See serve.py and serve_uploads.py."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import websockets
from serve_process import FILES, MODEL, QUESTIONS, Server, asking, share_of, transcribed
from serve_uploads import LONGEST_S, MIX, Upload, uploads

from mmdecode.asr import Transcriber
from mmdecode.zoo.speech import Clip

Row = dict[str, Any]
CHUNK = 500
"""Uploads after which the server is looked at."""
CLIENTS = 8
PROMPTS = 16 << 20
"""Bytes of read images that the server keeps, so few that the first uploads fill them."""
STREAM_S = 60.0
LOOK_S = 0.25
WARM_UP = 4
"""Looks after which memory has to be flat: caches of shapes and the heap fill with new uploads."""
SETTLE_S = 3.0
"""Seconds before its memory is read: it returns what requests have left every other second."""
KILLED = re.compile("takes more than|ends the process|needs more than the")
"""Words of the server about an upload whose process was ended."""
NO_ANSWER, CLOSED = "no answer", "closed"


class Children:
    """Processes of the server that decode uploads, while the context is open.

    Args:
        server: The server.

    Attributes:
        started: Those that were seen.
    """

    def __init__(self, server: Server) -> None:
        self._server, self.started = server, set[tuple[int, float]]()

    async def __aenter__(self) -> Children:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _look(self) -> None:
        while True:
            for child in self._server.process.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.started.add((child.pid, child.create_time()))
            await asyncio.sleep(LOOK_S)


async def sent(server: Server, http: httpx.AsyncClient, upload: Upload) -> tuple[str, str]:
    """Status of an upload, and the server's words."""
    if upload.way == "stream":
        return await streamed(server, upload)
    kind = {"content-type": upload.header or "application/json"}
    how: dict[str, Any] = {
        "file": lambda: {
            "files": {"file": ("a", upload.data)},
            "data": {"model": MODEL},
        },
        "image": lambda: {"json": asking("Is there a ring?", upload.data, max_completion_tokens=1)},
        "form": lambda: {"content": upload.data, "headers": kind},
        "json": lambda: {"content": upload.data, "headers": kind},
    }[upload.way]()
    try:
        answer = await http.post(FILES if upload.way in ("file", "form") else QUESTIONS, **how)
    except httpx.TimeoutException:
        return NO_ANSWER, ""
    except httpx.TransportError:
        return CLOSED, ""
    return str(answer.status_code), answer.text


async def streamed(server: Server, upload: Upload) -> tuple[str, str]:
    """Close code of a stream, and the last message."""
    last: str | bytes = ""

    async def talk(link: Any) -> None:
        nonlocal last
        with contextlib.suppress(websockets.ConnectionClosed):
            for message in upload.messages:
                await link.send(message)
        with contextlib.suppress(websockets.ConnectionClosed):
            async for message in link:
                last = message

    try:
        async with websockets.connect(server.socket_url, open_timeout=60, proxy=None) as link:
            await asyncio.wait_for(talk(link), STREAM_S)
            return f"closed with {link.close_code}", str(last)
    except TimeoutError:
        return NO_ANSWER, ""
    except (OSError, websockets.WebSocketException):
        return CLOSED, ""


async def hostile(
    server: Server, made: Iterator[Upload], clip: Clip, text: str, seen: list[int]
) -> Iterator[Row]:
    """Rows of all kinds, and of all of them together.

    Args:
        server: The server.
        made: The uploads.
        clip: A recording that is sent now and then.
        text: Its text.
        seen: Connections to the address that uploads name.
    """
    statuses: dict[str, Counter[str]] = {kind: Counter() for kind in MIX}
    memory_mb, examples = [server.memory_mb], list[Row]()
    wrong, killed, stuck = 0, 0, 0
    async with Children(server) as children:
        while chunk := list(itertools.islice(made, CHUNK)):
            left = iter(chunk)

            async def client(left: Iterator[Upload] = left) -> None:
                nonlocal killed
                async with server.client() as http:
                    for upload in left:
                        status, answer = await sent(server, http, upload)
                        statuses[upload.kind][status] += 1
                        killed += bool(KILLED.search(answer))
                        if is_fault(status) or status in (NO_ANSWER, "closed with 1011"):
                            content = upload.data or repr(upload.messages).encode()
                            examples.append(
                                {
                                    "kind": upload.kind,
                                    "status": status,
                                    "begin": repr(content[:200]),
                                }
                            )

            await asyncio.gather(*(client() for _ in range(CLIENTS)))
            stuck = max(stuck, await server.stuck())
            await asyncio.sleep(SETTLE_S)
            async with server.client() as http:
                good = await transcribed(http, clip.path.read_bytes())
            wrong += good != (200, text)
            memory_mb.append(server.memory_mb)
            row = {"uploads": len(chunk), "memory_mb": memory_mb[-1], "stuck": stuck}
            print("hostile", json.dumps(row | {"wrong": wrong}), flush=True)
    rows = [
        {"kind": kind, "uploads": n.total(), "statuses": dict(n)} for kind, n in statuses.items()
    ]
    total = sum(statuses.values(), Counter())
    count, settled = total.total(), memory_mb[1:][WARM_UP - 1 :] or memory_mb
    rows.append(
        {
            "kind": "all", "uploads": count, "statuses": dict(total),
            "faults": sum(n for status, n in total.items() if is_fault(status)),
            "unanswered": total[NO_ANSWER], "wrong": wrong, "stuck": stuck, "killed": killed,
            "children": len(children.started), "opened": len(seen), "memory_mb": memory_mb,
            "grown_percent": share_of(settled[0], max(settled)), "bugs": server.bugs(),
            "grown_counts": count >= 2 * WARM_UP * CHUNK, "settled": WARM_UP,
            "examples": examples[:20],
        }
    )  # fmt: skip
    return iter(rows)


def is_fault(status: str) -> bool:
    """Whether a status is one of a server's fault; 503 asks to come again."""
    return status.startswith("5") and status != "503"


async def with_listener(
    server: Server, clip: Clip, text: str, count: int, image: Any, seed: int
) -> Iterator[Row]:
    """Rows; uploads name an address at which this process notes who comes."""
    seen: list[int] = []

    async def note(reader: Any, writer: Any) -> None:
        seen.append(1)
        writer.close()

    listener = await asyncio.start_server(note, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    addresses = [f"{scheme}://127.0.0.1:{port}/a" for scheme in ("http", "tcp", "rtsp", "hls+http")]
    addresses += ["/etc/passwd", "file:/etc/passwd", "a.wav", "concat:a.wav|b.wav"]
    async with listener:
        made = uploads(count, clip, image, addresses, seed)
        return await hostile(server, made, clip, text, seen)


def measure(
    transcriber: Transcriber, clip: Clip, image: Any, count: int, threads: int, seed: int
) -> Iterator[Row]:
    """Yields the rows.

    Args:
        transcriber: The recogniser of the server, in this process.
        clip: A recording.
        image: An image.
        count: Number of uploads.
        threads: Threads of the server.
        seed: Seed of the uploads.
    """
    text = transcriber(str(clip.path)).text
    limits = ("--max-duration", f"{LONGEST_S:g}", "--prompt-cache", str(PROMPTS))
    with Server(threads, *limits) as server:
        yield from asyncio.run(with_listener(server, clip, text, count, image, seed))
