"""`Metrics`: counters of the server, in Prometheus' format."""

from __future__ import annotations

from collections.abc import Callable

from mmdecode.errors import MissingExtraError

with MissingExtraError.instead("the server needs prometheus-client", extra="serve"):
    from prometheus_client import (
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        ProcessCollector,
        generate_latest,
    )

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)


class Metrics:
    """Counters of one server; none of them holds anything that a client sent."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "mmdecode_requests",
            "Requests by endpoint and status.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "mmdecode_request_seconds",
            "Seconds until a request was answered.",
            ["endpoint"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._audio = Counter(
            "mmdecode_audio_seconds",
            "Seconds of audio that were transcribed.",
            ["endpoint"],
            registry=self.registry,
        )
        self._tokens = Counter(
            "mmdecode_tokens", "Tokens of answers about images.", ["kind"], registry=self.registry
        )
        self._batches = Histogram(
            "mmdecode_batch_files",
            "Files that were decoded at once.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self._rounds = Histogram(
            "mmdecode_round_streams",
            "Streams that were decoded at once.",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self._delays = Histogram(
            "mmdecode_stream_delay_seconds",
            "Seconds from the end of a step's audio to its words.",
            buckets=SECONDS,
            registry=self.registry,
        )

    def watch(self, name: str, about: str, read: Callable[[], float]) -> None:
        """Adds a gauge whose value is read when it is asked for."""
        Gauge(f"mmdecode_{name}", about, registry=self.registry).set_function(read)

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """Counts a request."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def audio(self, endpoint: str, seconds: float) -> None:
        """Counts audio that was transcribed."""
        self._audio.labels(endpoint).inc(seconds)

    def tokens(self, prompt: int, completion: int) -> None:
        """Counts tokens of an answer."""
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("completion").inc(completion)

    def batch(self, files: int) -> None:
        """Counts a step of files."""
        self._batches.observe(files)

    def round(self, streams: int) -> None:
        """Counts a step of streams."""
        self._rounds.observe(streams)

    def delay(self, seconds: float) -> None:
        """Counts the delay of a step of a stream."""
        self._delays.observe(seconds)

    def text(self) -> bytes:
        """Returns all values in Prometheus' text format."""
        return generate_latest(self.registry)
