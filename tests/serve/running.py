"""A server in a thread of the test, and what clients of it need."""

import contextlib
import functools
import threading
import time

import httpx

from mmdecode.asr.transcriber import Transcriber
from mmdecode.serve.answers import AnswerWorker
from mmdecode.serve.limits import Gate, Limits
from mmdecode.serve.media import MediaDecoder
from mmdecode.serve.metrics import Metrics
from mmdecode.serve.server import bound, serve
from mmdecode.serve.service import Service
from mmdecode.serve.speech import SpeechWorker
from mmdecode.vlm.answerer import Answerer

SPEECH, CHAT = "zoo:whisper-synth", "zoo:llava-scenes"


@functools.cache
def transcriber():
    return Transcriber.from_pretrained(SPEECH, draft="medusa", device="cpu")


@functools.cache
def answerer():
    return Answerer.from_pretrained(CHAT, device="cpu")


class Running:
    """A server that runs.

    Attributes:
        url: Its address.
        service: Its models.
        gate: Its gate.
        stop: Function that ends it, as a signal does.
    """

    def __init__(self, url, service, gates, stop):
        self.url, self.service, self._gates, self.stop = url, service, gates, stop

    @property
    def gate(self):
        return self._gates[0]

    @property
    def socket_url(self):
        return self.url.replace("http", "ws") + "/v1/audio/stream"

    def paths(self):
        """Paths of the application, those of websockets not counted."""
        return set(self.gate.app.openapi()["paths"])

    def values(self):
        """Metrics by name and labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
                for line in lines if not line.startswith("#")}  # fmt: skip

    def is_idle(self, seconds=10):
        """Whether nothing is left, at the latest after some seconds."""
        until = time.monotonic() + seconds
        speech, answers = self.service.speech, self.service.answers
        while time.monotonic() < until:
            busy = [self.gate.active, speech.waiting, speech.decoding, speech.streams]
            busy += [answers.waiting, answers.decoding] if answers else []
            if not any(busy):
                return True
            time.sleep(0.02)
        return False


@contextlib.contextmanager
def running(limits=None, key=None, hosts=None, chat=True, batch_size=8, ours=None):
    """Runs a server, and ends it."""
    limits, metrics = limits or Limits(), Metrics()
    service = Service(
        limits=limits,
        metrics=metrics,
        media=MediaDecoder(longest_s=limits.audio_s, most_pixels=limits.pixels),
        speech=SpeechWorker(ours or transcriber(), limits, metrics, batch_size),
        answers=AnswerWorker(answerer(), limits, metrics) if chat else None,
        speech_names=[SPEECH, "whisper-1"],
        answer_names=[CHAT] if chat else [],
    )
    listener, gates, ready = bound("127.0.0.1", 0), [], threading.Event()
    stops = []

    def gate_of(app):
        gates.append(Gate(app, limits, key, hosts, metrics.answered))
        return gates[0]

    args = service, listener, gate_of, ready.set, stops.append
    thread = threading.Thread(target=serve, args=args)
    thread.start()
    assert ready.wait(20)
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield Running(url, service, gates, stops[0].stop)
    finally:
        if not gates[0].draining:
            stops[0].stop()
        thread.join(20)
        assert not thread.is_alive()
