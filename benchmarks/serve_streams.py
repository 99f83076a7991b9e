"""Streams over the websocket that are fed at real time, beside each stream alone. See serve.py."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import websockets
from serve_process import RATE, Server, as_pcm, from_pcm
from streaming import Speaker, Speech, Times, delays, mean, speaker

from mmdecode.asr import Transcriber
from mmdecode.asr.streaming import Stream
from mmdecode.asr.streaming.commits import bare
from mmdecode.evaluation.speed.latency import percentile

Row = dict[str, Any]
POLICY, STEP_S = "agreement", 1.0
BLOCK = RATE // 10
"""Samples of a message."""
MOST_S = 1200.0
"""Seconds after its last sample in which a stream has to end."""


@dataclass
class Session:
    """A stream of a client.

    Attributes:
        sent_s: When each block was sent, in seconds since all streams began.
        late_s: The longest that sending a block was held up, in seconds.
        words: Committed words, and when they came.
        text: All committed words.
        done: Text of the server's last message; ``None``: there was none.
        waiting_s: Audio that waited at each update, in seconds.
        decoded: Seconds of audio that were decoded at each update, and when it came.
        end_s: When the last message came.
        error: Why the stream ended without its last message.
    """

    sent_s: list[float] = field(default_factory=list)
    late_s: float = 0.0
    words: Times = field(default_factory=list)
    text: str = ""
    done: str | None = None
    waiting_s: list[float] = field(default_factory=list)
    decoded: list[tuple[float, float]] = field(default_factory=list)
    end_s: float = 0.0
    error: str | None = None

    def decoded_at(self, now_s: float) -> float:
        """Seconds of audio that were decoded at a time."""
        return max((audio_s for at_s, audio_s in self.decoded if at_s <= now_s), default=0.0)


async def send(socket: Any, one: Speaker, until_s: float, began_s: float, session: Session) -> None:
    """Sends audio as a microphone would bring it, and then the end."""
    samples, size = as_pcm(one.wave), 2 * BLOCK
    for number in range(-(-len(samples) // size)):
        due_s = began_s + one.start_s + (number + 1) * BLOCK / RATE
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        now_s = time.monotonic()
        if now_s - began_s > until_s:
            break  # a server that is overloaded has held it up
        session.late_s = max(session.late_s, now_s - due_s)
        session.sent_s.append(now_s - began_s)
        await socket.send(samples[number * size : (number + 1) * size])
    await socket.send('{"type": "finish"}')


async def receive(socket: Any, began_s: float, session: Session) -> None:
    """Notes the words."""
    async for message in socket:
        found, now_s = json.loads(message), time.monotonic() - began_s
        session.end_s = now_s
        if found["type"] == "update":
            session.words += [(bare(word), now_s) for word in found["committed"].split()]
            session.text += found["committed"]
            session.waiting_s.append(found["waiting_s"])
            session.decoded.append((now_s, found["audio_s"]))
        elif found["type"] == "done":
            session.done = found["text"]
        else:
            session.error = found.get("message", found["type"])


async def stream(url: str, one: Speaker, until_s: float, began_s: float) -> Session:
    """Runs one stream to its end."""
    session = Session()
    try:
        # a server that holds the stream up reads no pings, and answers none
        connecting = websockets.connect(
            url, open_timeout=60, ping_interval=None, max_queue=None, proxy=None
        )
        async with connecting as socket:
            start = {"type": "start", "policy": POLICY, "step_s": STEP_S}
            await socket.send(json.dumps(start))
            both = asyncio.gather(
                send(socket, one, until_s, began_s, session), receive(socket, began_s, session)
            )
            await asyncio.wait_for(both, until_s + MOST_S)
    except (OSError, TimeoutError, websockets.WebSocketException) as error:
        session.error = session.error or f"{type(error).__name__}: {error}"
    return session


async def all_of(url: str, speakers: Sequence[Speaker], until_s: float) -> list[Session]:
    """Runs streams at the same time."""
    began_s = time.monotonic()
    return await asyncio.gather(*(stream(url, one, until_s, began_s) for one in speakers))


class Alone:
    """Texts of streams alone, each of which is decoded once.

    Args:
        transcriber: The recogniser of the server, in this process.
    """

    def __init__(self, transcriber: Transcriber) -> None:
        self._transcriber, self._known = transcriber, dict[bytes, str]()

    def __call__(self, samples: bytes) -> str:
        """Returns the text of samples."""
        if samples not in self._known:
            own = Stream(self._transcriber, POLICY, STEP_S)
            updates = [*own.feed(from_pcm(samples)), own.finish()]
            self._known[samples] = "".join(update.text for update in updates).strip()
        return self._known[samples]


def row_of(speakers: Sequence[Speaker], sessions: Sequence[Session], alone: Alone) -> Row:
    """Row of streams that ran at the same time."""
    lags, wrong, lost, words = list[float](), 0, 0, 0
    errors = [one.error for one in sessions if one.done is None]
    for one, session in zip(speakers, sessions, strict=True):
        expected = alone(as_pcm(one.wave)[: 2 * BLOCK * len(session.sent_s)])
        wrong += session.done != expected or session.text.strip() != expected
        final = expected.split()[-1:]
        lost += bool(final) and session.text.split()[-1:] != final
        last_block = len(session.sent_s) - 1
        blocks = [(word, int(end_s * RATE) // BLOCK) for word, end_s in one.ends]
        ends = [(word, session.sent_s[at]) for word, at in blocks if at <= last_block]
        words += len(ends)
        lags += delays(session.words, ends)
    stop_s = max((at_s for one in sessions for at_s in one.sent_s[-1:]), default=0.0)
    waiting = [waiting_s for one in sessions for waiting_s in one.waiting_s]
    audio_s = sum(len(one.sent_s) for one in sessions) * BLOCK / RATE
    return {
        "streams": len(speakers), "words": words, "matched": len(lags), "delay_s": mean(lags),
        "delay_p95_s": mean([percentile(lags, 0.95)]), "waiting_s": mean(waiting),
        "waiting_most_s": max(waiting, default=0.0),
        "late_s": round(max(one.late_s for one in sessions), 2), "sent_s": round(audio_s, 1),
        "decoded_s": round(sum(one.decoded_at(stop_s) for one in sessions), 1),
        "drain_s": round(max(one.end_s for one in sessions) - stop_s, 2),
        "equal": round(1 - wrong / len(sessions), 4), "wrong": wrong, "lost": lost,
        "ended_early": len(errors), "errors": sorted({str(error) for error in errors})[:5],
    }  # fmt: skip


def measure(
    transcriber: Transcriber,
    clips: Sequence[Speech],
    ends: Sequence[Times],
    counts: Sequence[int],
    seconds: float,
    threads: int,
    seed: int,
) -> Iterator[Row]:
    """Yields a row for each number of streams.

    Args:
        transcriber: The recogniser of the server, in this process.
        clips: Recordings that are spoken one after the other.
        ends: Their words, and when these end.
        counts: Numbers of streams.
        seconds: Audio of each stream, and how long it is sent.
        threads: Threads of the server.
        seed: Seed of orders and beginnings.
    """
    alone = Alone(transcriber)
    make = functools.partial(speaker, list(clips), list(ends))
    with Server(threads) as server:
        warm = [make(min(seconds, 2.0), seed)]
        asyncio.run(all_of(server.socket_url, warm, seconds))
        for count in counts:
            speakers = [make(seconds, 1000 * seed + number) for number in range(count)]
            sessions = asyncio.run(all_of(server.socket_url, speakers, seconds + 1))
            stuck = asyncio.run(server.stuck())
            row = {"seconds": seconds} | row_of(speakers, sessions, alone)
            yield row | {"stuck": stuck, "bugs": server.bugs()}
