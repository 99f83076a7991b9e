"""A server in a process of its own, and what its clients need. See serve.py."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil
import soundfile

from mmdecode.errors import InputError
from mmdecode.evaluation.speed.latency import percentile

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
MODEL, DRAFT, CHAT, RATE = "zoo:whisper-synth", "medusa", "zoo:llava-scenes", 16_000
FILES, QUESTIONS = "/v1/audio/transcriptions", "/v1/chat/completions"
GAUGES = ("files_waiting", "files_decoding", "streams", "questions_waiting", "questions_decoding")
ANSWER_S = 300.0
"""Seconds after which a request that has no answer counts as stuck."""


class Server:
    """``mmdecode serve`` on a free port of this machine, while the context is open.

    Args:
        threads: Threads of its processes.
        *words: More of its options.

    Attributes:
        url: Its address.
        process: Its process.
    """

    def __init__(self, threads: int, *words: str) -> None:
        self._threads, self._words = threads, words

    def __enter__(self) -> Server:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads), "PYTHONPATH": path}
        environment.pop("MMDECODE_API_KEY", None)
        command = [sys.executable, "-m", "mmdecode", "serve", "--device", "cpu", "--port", "0"]
        command += ["--model", MODEL, "--draft", DRAFT, "--chat-model", CHAT, "--json"]
        command += ["--rate-limit", "1000000", *self._words]
        self._log = tempfile.TemporaryFile("w+")
        self._started = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self._started.stdout is not None
        line = self._started.stdout.readline()
        if not line:
            raise InputError(f"the server does not start: {self.log()[-2000:]}")
        self.url = json.loads(line)["url"]
        self.process = psutil.Process(self._started.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self._started.send_signal(signal.SIGTERM)
        try:
            self._started.wait(60)
        except subprocess.TimeoutExpired:
            self._started.kill()
            raise InputError("the server does not end on SIGTERM within 60 s") from None
        finally:
            self._started.communicate()
            self._log.close()

    @property
    def socket_url(self) -> str:
        """Address of streams."""
        return self.url.replace("http", "ws") + "/v1/audio/stream"

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.url.rpartition(":")[2])

    @property
    def memory_mb(self) -> float:
        """Resident memory of its process, without those that decode uploads."""
        return round(self.process.memory_info().rss / 1e6, 1)

    def log(self) -> str:
        """All that it wrote to standard error."""
        self._log.seek(0)
        return self._log.read()

    def bugs(self) -> int:
        """Number of errors in its log that are no answers to clients."""
        log, words = self.log(), ("a bug of the server", "Traceback (most recent call last)")
        found = sum(log.count(word) for word in words)
        if found:
            first = min(log.find(word) for word in words if word in log)
            print(log[max(0, first - 500) : first + 5000], file=sys.stderr)
        return found

    def client(self) -> httpx.AsyncClient:
        """A client of its HTTP endpoints, with a connection of its own."""
        return httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S, trust_env=False)

    async def values(self) -> dict[str, float]:
        """Its metrics by name and labels."""
        async with self.client() as http:
            lines = (await http.get("/metrics")).text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    async def stuck(self, seconds: float = 60.0) -> int:
        """Number of requests and streams that are left after some seconds at most."""
        until = time.monotonic() + seconds
        while True:
            values = await self.values()
            left = [values[f"mmdecode_{name}"] for name in GAUGES]
            left.append(values["mmdecode_active_requests"] - 1)  # this one
            if not any(left) or time.monotonic() > until:
                return int(max(left))
            await asyncio.sleep(0.1)


async def transcribed(
    http: httpx.AsyncClient, data: bytes, stream: bool = False, **options: Any
) -> tuple[int, str]:
    """Status and text of a file, as a client asks for it, whole or in pieces."""
    files, form = {"file": ("a", data)}, {"model": MODEL, **options}
    if not stream:
        answer = await http.post(FILES, files=files, data=form)
        return answer.status_code, answer.json()["text"] if answer.is_success else answer.text
    text = ""
    async with http.stream("POST", FILES, files=files, data={**form, "stream": "true"}) as answer:
        async for event in events(answer):
            text += event.get("delta", "")
        return answer.status_code, text


async def events(answer: httpx.Response) -> Any:
    """Yields server-sent events."""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def asking(question: str, image: bytes | None, kind: str = "png", **options: Any) -> dict[str, Any]:
    """Body of a question about an image."""
    content: list[Any] = [{"type": "text", "text": question}]
    if image is not None:
        url = f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    return {"model": CHAT, "messages": [{"role": "user", "content": content}], **options}


def as_wav(samples: np.ndarray) -> bytes:
    """A recording as a file."""
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV")
    return file.getvalue()


def as_pcm(samples: np.ndarray) -> bytes:
    """A recording as the messages of a stream have it."""
    return (np.clip(samples, -1, 1) * 32767).round().astype("<i2").tobytes()


def from_pcm(data: bytes) -> np.ndarray:
    """The samples that the server decodes."""
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


async def in_turn(
    items: Iterable[T], clients: int, call: Callable[[int, T], Awaitable[Any]]
) -> tuple[float, list[float]]:
    """Clients that send one item after the other; seconds in all, and of each item.

    Args:
        items: The items; each client takes the next one.
        clients: Number of clients.
        call: Sends an item; its first argument is the number of the client.
    """
    left, spent = iter(list(items)), list[float]()

    async def client(number: int) -> None:
        for item in left:
            began = time.perf_counter()
            await call(number, item)
            spent.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*map(client, range(clients)))
    return time.perf_counter() - began, spent


def times(spent: list[float], name: str = "") -> dict[str, float | None]:
    """Median and 95th percentile of some seconds."""
    found = {f"{name}median_s": percentile(spent, 0.5), f"{name}p95_s": percentile(spent, 0.95)}
    return {key: None if value is None else round(value, 4) for key, value in found.items()}


def share_of(before: float, after: float) -> float:
    """Growth in percent."""
    return round(100 * (after / before - 1), 2)
