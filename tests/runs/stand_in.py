"""A transcriber for tests of engines, which load it by its name.

It invents a text from the name of a recording, in batches that it notes as the real one does. What
happens at a recording is said by its name, as ``KIND-NUMBER``, see `FAULTS`. With ``kills``, a
seeded clock ends the process, too.
"""

import ctypes
import os
import random
import resource
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from mmdecode.asr.output.jobs import ResultFolder
from mmdecode.asr.output.manifest import Entry
from mmdecode.asr.results import Failure, Segment, Transcript
from mmdecode.runs.engines import Engine
from mmdecode.runs.items import Failed, each
from mmdecode.runs.work import run

COUNTERS = "calls tokens passes row_passes drafted accepted acceptance_length".split()


class StandIn:
    """The transcriber.

    Args:
        seconds: Time that a batch takes.
        kills: Mean number of times a second that the process is ended; 0: never.
        once: Folder in which each fault is noted when it happens, so that it happens once.
    """

    def __init__(self, seconds=0.0, kills=0.0, once=None):
        self.stats, self.seconds, self.once = self, seconds, once
        if kills:
            delay = random.Random(os.getpid()).expovariate(kills)
            threading.Thread(target=_killed, args=(delay,), daemon=True).start()

    def as_dict(self):
        return dict.fromkeys(COUNTERS, 1) | {"accepted_histogram": [1], "acceptance_rate": 1.0}

    def stream(self, sources, progress=None, *, watch=None, batch_size=None):
        for start in range(0, len(sources), batch_size):
            batch = list(enumerate(sources))[start : start + batch_size]
            name = lambda pair: pair[1].name  # noqa: E731
            for (index, source), found in each(
                batch, self._decoded, hint="", name=name, watch=watch
            ):
                if isinstance(found, Failed):
                    known = {"error": found.error, "kind": found.kind}
                    yield Failure(source=source.name, index=index, **known)
                else:
                    progress(found.duration_s)
                    yield found

    def _decoded(self, batch):
        time.sleep(self.seconds)
        return [self._transcript(index, source.name) for index, source in batch]

    def _transcript(self, index, name):
        kind, _, number = Path(name).stem.rpartition("-")
        text = " ".join(f"word{int(number) * i}" for i in range(int(number) % 40))
        found = Transcript(
            source=name,
            index=index,
            text=text,
            segments=[Segment(start_s=0.5, end_s=9.0, text=text, tokens=[int(number)])],
            language="en",
            duration_s=float(number),
            tokens=[int(number)],
            stats={"windows": 1, "attempts": 1, "looped": 0, "tokens": 1},
        )
        note = Path(self.once or "/nowhere", name)
        if kind not in FAULTS or note.exists():
            return found
        if self.once and kind != "raise":
            note.touch()
        return FAULTS[kind](found) or found


def load(seconds=0.0, kills=0.0, once=None):
    """Loads the stand-in."""
    return StandIn(seconds, kills, once)


def kill(found):
    os.kill(os.getpid(), signal.SIGKILL)


def crash(found):
    ctypes.string_at(0)


def hang(found):
    time.sleep(3_600)


def memory(found):
    """The system ends the process, as it does one that takes too much."""
    resource.setrlimit(resource.RLIMIT_AS, (2**35, 2**35))
    held = []
    try:
        while True:
            held.append(bytes(2**33))
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)


def error(found):
    raise ValueError("as asked")


def device(found):
    """A kernel fails, after which CUDA refuses everything."""
    import torch

    raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def wrong(found):
    """An answer for another recording."""
    return replace(found, source="other-1")


def torn(found):
    """The process ends in the middle of a line."""
    for number in lines_open():
        os.write(number, b'{"source": "clip')
    kill(found)


def full(found):
    """No space is left for lines."""
    for number in lines_open():
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def limited(found):
    """Files may grow no more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


FAULTS = {
    "kill": kill,
    "crash": crash,
    "hang": hang,
    "memory": memory,
    "raise": error,
    "device": device,
    "wrong": wrong,
    "torn": torn,
    "full": full,
    "limited": limited,
}


def lines_open():
    """Descriptors of the files of lines that this process writes."""
    opened = Path("/proc/self/fd")
    for number in opened.iterdir():
        if os.path.exists(number) and os.readlink(number).endswith(".jsonl"):
            yield int(number.name)


def _killed(delay):
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)


def names(count, **special):
    """Names of recordings, of which some do what their name says."""
    kinds = {number: kind for kind, number in special.items()}
    return [f"{kinds.get(number, 'clip')}-{number}" for number in range(count)]


def folder_of(out, clips, batch_size=2, formats=("txt",), **how):
    """Folder of transcripts of recordings that are read by nobody."""
    entries = [Entry(id=name, audio=f"/nowhere/{name}.wav") for name in clips]
    return ResultFolder(out, {"a": 1}, entries, formats, batch_size=batch_size, **how)


def decoded(folder, engine="processes", load=load, workers=2, time_limit_s=60.0, **how):
    """Runs an engine."""
    return run(folder, load, engine=Engine(engine, workers, time_limit_s), **how)
