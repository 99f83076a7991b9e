"""Streams over a websocket: each client has the words that its audio has alone."""

import asyncio
import contextlib
import json
import time

import httpx
import numpy as np
import pytest
import soxr
import websockets
from fastapi import WebSocketDisconnect

from mmdecode.asr.streaming import Stream
from mmdecode.serve.limits import KNOWN, Limits
from mmdecode.serve.live import routes
from mmdecode.serve.speech import SpeechWorker
from mmdecode.zoo.speech import speech_test
from tests.serve.running import running, transcriber

WAYS = [
    {"step_s": 0.5},
    {"policy": "agreement:n=3", "step_s": 1.0},
    {"policy": "alignatt:s=0.8", "step_s": 0.5, "word_timestamps": True},
    {"rate": 48_000, "language": "en"},
]


@pytest.fixture(scope="module")
def server():
    with running(chat=False) as found:
        yield found


def wave(number, seconds=4.0):
    return speech_test()[number].samples()[: round(seconds * 16_000)]


def pcm(samples):
    return (np.clip(samples, -1, 1) * 32767).round().astype("<i2").tobytes()


def words_of(samples, **options):
    """Text of a stream alone, of the same samples as a client sends."""
    rate = options.pop("rate", 16_000)
    language = options.pop("language", None)
    ours = transcriber() if language is None else transcriber().with_options(language=language)
    if options.pop("word_timestamps", False):
        ours = ours.with_options(word_timestamps=True)
    sent = np.frombuffer(samples, "<i2").astype(np.float32) / 32768
    if rate != 16_000:
        resampler = soxr.ResampleStream(rate, 16_000, 1, dtype="float32")
        sent = np.concatenate(
            [resampler.resample_chunk(sent), resampler.resample_chunk(sent[:0], last=True)]
        )
    stream = Stream(ours, **options)
    return "".join(u.text for u in [*stream.feed(sent), stream.finish()]).strip()


async def all_of(socket):
    """Messages until the server closes the connection."""
    found = []
    with contextlib.suppress(websockets.ConnectionClosed):
        while True:
            found.append(json.loads(await socket.recv()))
    return found


async def streamed(url, samples, block=6400, wait_s=0.0, key=None, **options):
    """Messages of the server to a client that sends samples in blocks."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with websockets.connect(url, additional_headers=headers) as socket:
        if options:
            await socket.send(json.dumps({"type": "start", **options}))

        async def send():
            for start in range(0, len(samples), block):
                await socket.send(samples[start : start + block])
                await asyncio.sleep(wait_s)
            await socket.send('{"type": "finish"}')

        sending = asyncio.create_task(send())
        found = await all_of(socket)
        with contextlib.suppress(websockets.ConnectionClosed):
            await sending
        return found


async def together(server, kinds, waves):
    return await asyncio.gather(
        *(streamed(server.socket_url, one, **kind) for kind, one in zip(kinds, waves, strict=True))
    )


def all_words(server, count=8):
    kinds = [WAYS[number % len(WAYS)] for number in range(count)]
    waves = []
    for number, kind in enumerate(kinds):
        samples = wave(number % 14, 5.0)  # ten steps of the longest: ten rounds at least
        if kind.get("rate"):
            samples = soxr.resample(samples, 16_000, kind["rate"])
        waves.append(pcm(samples))
    for found, kind, one in zip(
        asyncio.run(together(server, kinds, waves)), kinds, waves, strict=True
    ):
        *updates, done = found
        assert done["type"] == "done" and {u["type"] for u in updates} == {"update"}
        text = "".join(update["committed"] for update in updates).strip()
        assert text == done["text"] == words_of(one, **kind)
        assert updates[-1]["provisional"] == ""
        assert (updates[0]["words"] is None) != kind.get("word_timestamps", False)
    assert server.is_idle()


@pytest.mark.slow
def test_streams_have_the_words_that_they_have_alone(server):
    all_words(server)
    values = server.values()
    assert values['mmdecode_audio_seconds_total{endpoint="streams"}'] > 16
    assert values["mmdecode_round_streams_count"] > 8


@pytest.mark.slow
def test_a_server_that_mixes_streams_up_is_noticed(server, monkeypatch):
    pool, rounds = server.service.speech._pool, type(server.service.speech._pool).round

    def mixed(self):
        streams, updates = zip(*found, strict=True) if (found := rounds(self)) else ((), ())
        return list(zip(streams, updates[1:] + updates[:1], strict=True))

    monkeypatch.setattr(type(pool), "round", mixed)
    with pytest.raises(AssertionError):
        all_words(server)


@pytest.mark.slow
def test_samples_may_be_cut_anywhere_and_need_no_start(server):
    samples = pcm(wave(3, 2.5))
    *_, done = asyncio.run(streamed(server.socket_url, samples, block=3201))
    assert done["text"] == words_of(samples)


@pytest.mark.slow
def test_a_client_that_goes_leaves_nothing(server):
    async def leave():
        async with websockets.connect(server.socket_url) as socket:
            await socket.send(pcm(wave(0)))
            await socket.recv()
            socket.transport.abort()

    asyncio.run(leave())
    assert server.is_idle()
    all_words(server, 2)


@pytest.mark.parametrize(
    ("first", "words", "code"),
    [
        ('{"type": "start", "colour": "red"}', "'colour' is not known", 1007),
        ('{"type": "start", "step_s": "1"}', "expected float", 1007),
        ('{"type": "start", "step_s": 60}', "half of the audio", 1007),
        ('{"type": "start", "rate": 4000}', "8000 to 48000", 1007),
        ('{"type": "start", "policy": "never"}', "no policy named 'never'", 1007),
        ('{"type": "start", "model": "other"}', "no speech model 'other'", 1007),
        ('{"type": "start", "language": "xx"}', "'xx'", 1007),
        ('{"type": "start", "\\ud800": 1}', "is not known", 1007),
        ('{"type": "start", "prompt": "\\ud800"}', "not UTF-8 text", 1007),
        ("[1]", "expected a JSON object", 1007),
        ("{" * 100_000, "expected a JSON object", 1007),
        ('{"type": "finish"}', "expected samples or 'start'", 1007),
    ],
)
def test_what_is_wrong_is_named(server, first, words, code):
    async def ask():
        async with websockets.connect(server.socket_url) as socket:
            await socket.send(first)
            found = json.loads(await socket.recv())
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await socket.recv()
            return found, closed.value.rcvd.code

    found, got = asyncio.run(ask())
    assert found["type"] == "error" and words in found["message"], found
    assert got == code and server.is_idle()


@pytest.mark.parametrize("leaves", ["accept", "send_json", "close"])
def test_a_client_that_goes_while_it_is_refused_is_no_error(leaves, server):
    class Gone:
        """A websocket whose client sends nothing of use, and goes."""

        @property
        def scope(self):
            return {KNOWN: True}

        async def receive(self):
            return {"type": "websocket.receive", "text": "[]"}

        async def answer(self, name):
            if name == leaves:
                raise WebSocketDisconnect(1006)

        def __getattr__(self, name):
            return lambda *args: self.answer(name)

    [route] = routes(server.service).routes
    asyncio.run(route.endpoint(Gone()))


def test_a_message_of_another_kind_in_the_middle_is_refused(server):
    async def ask():
        async with websockets.connect(server.socket_url) as socket:
            await socket.send(pcm(wave(0, 0.2)))
            await socket.send('{"type": "start"}')
            return await all_of(socket)

    *_, error = asyncio.run(ask())
    assert "expected samples or 'finish'" in error["message"] and server.is_idle()


@pytest.mark.slow
def test_limits_of_streams():
    limits = Limits(streams=1, audio_s=3.0, receive_s=1.0)
    with running(limits, chat=False) as server:

        async def silent():
            """The words so far are committed where nothing more comes."""
            async with websockets.connect(server.socket_url) as socket:
                await socket.send(pcm(wave(3, 2.5)))
                await asyncio.sleep(0.3)
                second = await streamed(server.socket_url, b"ab")
                return second, await all_of(socket)

        second, found = asyncio.run(silent())
        assert second[-1]["code"] == "overloaded" and "1 streams are open" in second[-1]["message"]
        assert found[-1]["text"] == words_of(pcm(wave(3, 2.5)))
        *_, error = asyncio.run(streamed(server.socket_url, pcm(wave(2, 6.0))))
        assert "longer than 3 s" in error["message"]
        assert server.is_idle()


@pytest.mark.slow
def test_audio_that_comes_faster_than_it_is_decoded_waits_and_is_not_lost(monkeypatch):
    rounds, waiting = SpeechWorker._round, []

    def slowly(self):
        waiting.append(self.delay_s)
        rounds(self)

    monkeypatch.setattr(SpeechWorker, "_round", slowly)
    samples = pcm(np.concatenate([wave(number, 3.0) for number in range(4)]))
    with running(Limits(waiting_s=2.0), chat=False) as server:
        found = asyncio.run(streamed(server.socket_url, samples, block=8000))
        assert found[-1]["text"] == words_of(samples)
        assert max(waiting) <= 2.0 + 0.25
        assert max(update.get("waiting_s", 0) for update in found) > 1.0  # which is said


def test_keys_come_as_a_header_or_first(server):
    key = "a-key-of-the-test"
    with running(key=key, chat=False) as server:
        samples = pcm(wave(3, 1.0))
        assert asyncio.run(streamed(server.socket_url, samples, key=key))[-1]["type"] == "done"
        assert asyncio.run(streamed(server.socket_url, samples, **{"step_s": 1.0}))[-1]["code"] == (
            "invalid_api_key"
        )
        with pytest.raises(websockets.InvalidStatus) as error:
            asyncio.run(streamed(server.socket_url, samples, key=key + "x"))
        assert error.value.response.status_code == 401

        async def first():
            async with websockets.connect(server.socket_url) as socket:
                await socket.send(json.dumps({"type": "start", "key": key}))
                await socket.send('{"type": "finish"}')
                return await all_of(socket)

        assert asyncio.run(first())[-1]["type"] == "done"
        assert httpx.get(f"{server.url}/v1/models").status_code == 401


@pytest.mark.slow
def test_a_stream_that_waits_for_longer_than_any_answer_is_not_given_up(monkeypatch):
    rounds = SpeechWorker._round

    def slowly(self):
        time.sleep(0.3)
        rounds(self)

    monkeypatch.setattr(SpeechWorker, "_round", slowly)
    samples = pcm(np.concatenate([wave(number) for number in range(4)]))
    with running(Limits(waiting_s=2.0, receive_s=1.0, send_s=1.0), chat=False) as server:
        found = asyncio.run(streamed(server.socket_url, samples))
        assert found[-1]["text"] == words_of(samples)
