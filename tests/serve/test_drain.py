"""The command: it starts, ends what was begun on SIGTERM, and at once on a second signal."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest
import websockets

from mmdecode.zoo.speech import speech_test
from tests.serve.running import SPEECH
from tests.serve.test_live import all_of, pcm, wave, words_of
from tests.support.commands import invoke

CLIPS = speech_test()


@pytest.fixture
def start(tmp_path):
    """Starts ``mmdecode serve``, and ends what is left of it."""
    started = []

    def call(*words, **environment):
        command = [sys.executable, "-m", "mmdecode", "serve", "--model", SPEECH, "--device", "cpu"]
        process = subprocess.Popen(
            [*command, "--port", "0", "--json", *words],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return process, json.loads(line)

    yield call
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_what_was_begun_ends_and_nothing_new_begins(start):
    process, ready = start("--draft", "medusa", MMDECODE_API_KEY="a-key-of-the-test")
    assert ready["key"] is True and ready["models"] == [SPEECH]
    url, key = ready["url"], {"Authorization": "Bearer a-key-of-the-test"}
    socket_url = url.replace("http", "ws") + "/v1/audio/stream"
    import io

    import soundfile

    long = np.concatenate([clip.samples() for clip in CLIPS])
    file = io.BytesIO()
    soundfile.write(file, long, 16_000, format="WAV")

    async def serve():
        async with (
            httpx.AsyncClient(headers=key, timeout=120) as http,
            websockets.connect(socket_url, additional_headers=key) as socket,
        ):
            await socket.send(pcm(wave(0)))
            await socket.recv()
            request = http.post(
                f"{url}/v1/audio/transcriptions",
                files={"file": file.getvalue()},
                data={"model": SPEECH},
            )
            asked = asyncio.create_task(request)
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            refused = await http.get(f"{url}/v1/models")
            health = await http.get(f"{url}/healthz")
            messages = await all_of(socket)
            return (await asked).json(), refused.status_code, health.status_code, messages

    answer, refused, health, messages = asyncio.run(serve())
    assert (refused, health) == (503, 503)
    assert "closing" in [message["type"] for message in messages]
    assert messages[-1]["text"] == words_of(pcm(wave(0)))  # what was said, to the last word
    assert len(answer["text"].split()) > 80
    assert process.wait(20) == 0
    assert "ending after what was begun" in process.stderr.read()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(start):
    process, ready = start()

    async def hold():
        url = ready["url"].replace("http", "ws") + "/v1/audio/stream"
        async with websockets.connect(url) as socket:
            await socket.send(pcm(wave(0)))
            await socket.recv()
            process.send_signal(signal.SIGSTOP)  # so that both signals come in its time
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            while process.poll() is None and time.monotonic() - began < 15:
                await asyncio.sleep(0.05)
            socket.transport.abort()

    asyncio.run(hold())
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--host", "0.0.0.0"], "a key is needed"),
        (["--host", "192.0.2.1"], "a key is needed"),
        (["--key-file", "missing"], "missing"),
        (["--chat-draft", "lookup"], "--chat-draft does nothing without --chat-model"),
        (["--port", "70000"], "65535"),
        (["--host", "no.such.host.invalid", "--key-file", "key"], "cannot listen"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(
    words, problem, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MMDECODE_API_KEY", raising=False)
    (tmp_path / "key").write_text("k" * 30)
    done = invoke("serve", "--model", "no-such-model", *words)
    assert done.exit_code and problem in " ".join(f"{done.output} {done.exception}".split())


def test_a_key_that_is_too_short_is_refused(monkeypatch, tmp_path):
    from mmdecode.cli.serve import read_key
    from mmdecode.errors import InputError, OptionError

    monkeypatch.setenv("MMDECODE_API_KEY", "short")
    with pytest.raises(OptionError, match="openssl rand"):
        read_key(None)
    path = tmp_path / "key"
    path.write_text("a-key-of-the-test\nmore\n")
    assert read_key(path) == "a-key-of-the-test"
    path.write_text("")
    with pytest.raises(OptionError, match="0 characters"):
        read_key(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_key(tmp_path)
    monkeypatch.delenv("MMDECODE_API_KEY")
    assert read_key(None) is None
