"""Files and questions through the server, beside the same in this process. See serve.py."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from serve_process import QUESTIONS, Server, as_wav, asking, events, in_turn, times, transcribed

from mmdecode.asr import Transcriber
from mmdecode.vlm import Answerer
from mmdecode.zoo.speech import Clip

Row = dict[str, Any]
TOKENS = 24
"""Most tokens of an answer."""
TINY_S = 0.2


def here(transcriber: Transcriber, clips: Sequence[Clip], batch: int) -> Row:
    """Row of the recogniser in this process."""
    paths, began = [str(clip.path) for clip in clips], time.perf_counter()
    spent: list[float] = []
    if batch == 1:
        for path in paths:
            at = time.perf_counter()
            transcriber(path)
            spent.append(time.perf_counter() - at)
    else:
        list(transcriber.stream(paths, batch_size=batch))
    wall_s = time.perf_counter() - began
    way = "this process, one at a time" if batch == 1 else f"this process, batches of {batch}"
    return {"way": way, "clients": None} | speed(clips, wall_s, spent)


def speed(clips: Sequence[Clip], wall_s: float, spent: list[float]) -> Row:
    """Cells of a row."""
    audio_s = sum(clip.duration_s for clip in clips)
    row = {"requests": len(clips), "audio_per_s": round(audio_s / wall_s, 2)}
    return row | times(spent)


async def by_clients(
    server: Server, clips: Sequence[Clip], texts: dict[str, str], count: int
) -> Row:
    """Row of some clients that send clips one after the other."""
    wrong = 0
    data = {clip.name: clip.path.read_bytes() for clip in clips}
    async with AsyncExitStack() as stack:
        https = [await stack.enter_async_context(server.client()) for _ in range(count)]

        async def send(number: int, clip: Clip) -> None:
            nonlocal wrong
            found = await transcribed(https[number], data[clip.name])
            wrong += found != (200, texts[clip.name])

        wall_s, spent = await in_turn(clips, count, send)
    row = {"way": "server", "clients": count} | speed(clips, wall_s, spent)
    return row | {"wrong": wrong, "stuck": await server.stuck()}


async def overhead(server: Server, transcriber: Transcriber, clip: Clip, repeats: int) -> Row:
    """Row of a clip so short that decoding takes almost nothing, alternately here and there."""
    samples = clip.samples()[: round(TINY_S * transcriber.sampling_rate)]
    data = as_wav(samples)
    mine: list[float] = []
    theirs: list[float] = []
    async with server.client() as http:
        for _ in range(repeats):
            began = time.perf_counter()
            await transcribed(http, data)
            middle = time.perf_counter()
            transcriber(samples)
            theirs.append(middle - began)
            mine.append(time.perf_counter() - middle)
    return {
        "way": "overhead",
        "requests": repeats,
        **times(theirs, "server_"),
        **times(mine, "here_"),
    }


async def questions(
    server: Server,
    asked: Sequence[tuple[str, bytes]],
    texts: Sequence[str],
    count: int,
    whole: bool,
) -> Row:
    """Row of clients that ask one question after the other."""
    first, wrong = list[float](), 0
    async with AsyncExitStack() as stack:
        https = [await stack.enter_async_context(server.client()) for _ in range(count)]

        async def send(number: int, item: int) -> None:
            nonlocal wrong
            body = asking(*asked[item], max_completion_tokens=TOKENS, stream=not whole)
            began, text = time.perf_counter(), ""
            if whole:
                answer = await https[number].post(QUESTIONS, json=body)
                text = (
                    answer.json()["choices"][0]["message"]["content"] if answer.is_success else ""
                )
            else:
                async with https[number].stream("POST", QUESTIONS, json=body) as answer:
                    async for event in events(answer):
                        piece = (
                            event["choices"][0]["delta"].get("content")
                            if event.get("choices")
                            else None
                        )
                        if piece and not text:
                            first.append(time.perf_counter() - began)
                        text += piece or ""
            wrong += text.strip() != texts[item].strip()

        wall_s, spent = await in_turn(range(len(asked)), count, send)
    row: Row = {"way": "answers" if whole else "answers in pieces", "clients": count}
    row |= {"requests": len(asked), "answers_per_s": round(len(asked) / wall_s, 2), **times(spent)}
    if not whole:
        row |= times(first, "first_")
    return row | {"wrong": wrong, "stuck": await server.stuck()}


def scenes(count: int) -> list[tuple[str, Any, bytes]]:
    """Questions, each with its image, also as a file."""
    from PIL import Image

    from mmdecode.zoo.scene_sets import scene_of, scene_rows
    from mmdecode.zoo.scenes import render

    found = []
    for row in scene_rows("test", "chair")[:count]:
        image, file = Image.fromarray(render(scene_of(row["image"]))), io.BytesIO()
        image.save(file, "PNG")
        found.append((row["question"], image, file.getvalue()))
    return found


def measure(
    transcriber: Transcriber,
    answerer: Answerer,
    clips: Sequence[Clip],
    clients: Sequence[int],
    repeats: int,
    threads: int,
) -> Iterator[Row]:
    """Yields the rows.

    Args:
        transcriber: The recogniser of the server, in this process.
        answerer: Its vision-language model.
        clips: Recordings.
        clients: Numbers of clients.
        repeats: How often each clip is sent; a tiny one is sent ten times as often.
        threads: Threads of the server.
    """
    texts = {clip.name: transcriber(str(clip.path)).text for clip in clips}
    shown = scenes(len(clips))
    answers = [answerer(image, text, max_new_tokens=TOKENS).text for text, image, _ in shown]
    asked = [(text, data) for text, _, data in shown]
    with Server(threads) as server:
        asyncio.run(by_clients(server, clips, texts, max(clients)))  # all is loaded before
        many = [*clips] * repeats
        yield here(transcriber, many, 1)
        yield here(transcriber, many, 8)
        for count in clients:
            yield asyncio.run(by_clients(server, many, texts, count))
        yield asyncio.run(overhead(server, transcriber, clips[0], 10 * repeats))
        asyncio.run(questions(server, asked, answers, 1, True))
        for count in (1, 8):
            for whole in (True, False):
                row = asyncio.run(
                    questions(server, asked * repeats, answers * repeats, count, whole)
                )
                yield row | ({"bugs": server.bugs()} if (count, whole) == (8, False) else {})
