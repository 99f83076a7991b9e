"""Recognisers for scale.py, of which one sleeps in place of decoding, and recordings.

Workers import it by its name, so that it is a module of its own.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mmdecode.asr import Transcriber
from mmdecode.asr.output.jobs import ResultFolder
from mmdecode.asr.output.manifest import Entry
from mmdecode.asr.results import Failure, Segment, Transcript
from mmdecode.engine.stats import Stats
from mmdecode.runs.items import Watch, each
from mmdecode.zoo.speech import speech_test

TEXT = "the doctor measured a golden crystal in the laboratory last evening"


class Simulated:
    """A transcriber that takes a time of its own for each batch.

    Args:
        seconds: Seconds that a batch takes, of one recording too.
        log: File to which a line is added for loading, and for each batch; ``None``: none.
    """

    def __init__(self, seconds: float = 0.0, log: Path | None = None) -> None:
        self.stats = Stats()
        self._seconds, self._log = seconds, log
        note(log, "loaded")

    def stream(
        self,
        sources: Sequence[Any],
        progress: Callable[[float], None],
        *,
        watch: Watch,
        batch_size: int,
    ) -> Iterator[Transcript | Failure]:
        """Yields a transcript for each recording; see `mmdecode.asr.Transcriber.stream`."""
        for start in range(0, len(sources), batch_size):
            batch = list(enumerate(sources))[start : start + batch_size]
            for _, found in each(batch, self._decoded, hint="", name=_name, watch=watch):
                progress(found.duration_s)
                yield found

    def _decoded(self, batch: Sequence[tuple[int, Any]]) -> list[Transcript]:
        began = time.time()
        if self._seconds:
            time.sleep(self._seconds)
        note(self._log, "batch", len(batch), began)
        return [transcript(index, source.name) for index, source in batch]


def note(log: Path | None, what: str, count: int = 0, began: float | None = None) -> None:
    """Adds a line to a file: what was done by this process, on how many recordings, and when."""
    if log is not None:
        ended = time.time()
        with log.open("a") as file:
            file.write(f"{what} {os.getpid()} {count} {began or ended} {ended}\n")


def _name(pair: tuple[int, Any]) -> str:
    return str(pair[1].name)


def transcript(index: int, name: str) -> Transcript:
    """A short transcript."""
    tokens = list(range(100, 112))
    return Transcript(
        source=name,
        index=index,
        text=TEXT,
        segments=[Segment(start_s=0.5, end_s=4.0, text=TEXT, tokens=tokens)],
        language="en",
        duration_s=4.0,
        tokens=tokens,
        stats={"windows": 1, "attempts": 1, "looped": 0, "tokens": len(tokens)},
    )


def recordings(count: int) -> list[Entry]:
    """Recordings that are nowhere, of ids of the length that paths have."""
    names = (f"recordings/2026/{number // 1000:04d}/call-{number:07d}" for number in range(count))
    return [Entry(id=name, audio=f"/nowhere/{name}.wav", duration_s=4.0) for name in names]


def folder_of(
    out: Path, entries: Sequence[Entry], formats: Sequence[str] = (), **how: Any
) -> ResultFolder:
    """A folder for results."""
    how = {"batch_size": 8} | how
    return ResultFolder(out, {"model": "simulated"}, entries, formats, **how)


def loader(seconds: float = 0.0, log: Path | None = None) -> Callable[[], Simulated]:
    """A function that workers can be given, too."""
    return functools.partial(Simulated, seconds, log)


def recogniser(log: Path) -> Transcriber:
    """Loads the recogniser of the zoo, without a drafter."""
    found = Transcriber.from_pretrained("zoo:whisper-synth", device="cpu", draft=None)
    note(log, "loaded")
    return found


def clips(times: int) -> list[Entry]:
    """The shipped clips, repeated."""
    shipped = [clip.path for clip in speech_test()]
    return [
        Entry(id=f"{number}/{path.name}", audio=str(path))
        for number in range(times)
        for path in shipped
    ]
