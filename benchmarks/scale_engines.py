"""Time and memory of the engines of `mmdecode.runs.engines`. A part of scale.py.

Each run is a process of its own. *Start* ends with the first batch, or for real decoding when the
first worker has loaded the model. *Overhead* is what is left of a run without its start and the
decoding of its busiest worker. *Memory* is the most proportional set size (Linux's PSS, in which
shared memory counts once) of all processes of a run, found by their environment.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import simulated

from mmdecode.asr.output.manifest import Entry
from mmdecode.errors import run_script
from mmdecode.runs.engines import LOCAL, Engine
from mmdecode.runs.work import run

HERE = Path(__file__).parent
MARK = "MMDECODE_SCALE"
"""Variable of the environment of all processes of a run."""
EVERY_S = 0.5


class Noted(NamedTuple):
    """A line of `simulated.note`."""

    what: str
    process: int
    count: int
    began: float
    ended: float


def noted(log: Path) -> list[Noted]:
    """What the workers of a run have done so far."""
    if not log.exists():
        return []
    words = [line.split() for line in log.read_text().splitlines()]
    return [Noted(w[0], int(w[1]), int(w[2]), float(w[3]), float(w[4])) for w in words]


def engines() -> list[tuple[str, int]]:
    """Engines that can be used here, and numbers of their workers."""
    found = [(LOCAL, 1), ("processes", 1), ("processes", 2)]
    if importlib.util.find_spec("ray"):
        return [*found, ("ray", 1), ("ray", 2)]
    print("ray is not installed: its rows are left out")
    return found


def child(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A run, in this process and its workers."""
    log = folder / "log"
    entries: list[Entry] = (
        simulated.clips(arguments.clips)
        if arguments.clips
        else simulated.recordings(8 * arguments.batches)
    )
    load: Any = simulated.loader(arguments.seconds, log)
    if arguments.clips:
        load = functools.partial(simulated.recogniser, log)
    workers = None if arguments.engine == LOCAL else arguments.workers
    out = folder / "out"
    out.mkdir()
    if arguments.kill:
        some = 7 * len(entries) // 16  # not where units end
        threading.Thread(target=kill_one, args=(log, some), daemon=True).start()
    began = time.time()
    tally = run(simulated.folder_of(out, entries), load, engine=Engine(arguments.engine, workers))
    wall = time.time() - began
    lines = noted(log)
    batches = [line for line in lines if line.what == "batch"]
    start = min(line.began for line in batches or lines) - began
    found = {"items": len(entries), "done": tally.done, "wall_s": wall, "start_s": start}
    if arguments.clips:
        return found | {"audio_s": tally.audio_s, "rtfx": tally.audio_s / (wall - start)}
    busy: Counter[int] = Counter()
    for line in batches:
        busy[line.process] += line.ended - line.began  # type: ignore[assignment]
    overhead = (wall - start - max(busy.values())) / len(entries)
    again = sum(line.count for line in batches) - len(entries)
    return found | {"overhead_ms": 1000 * overhead, "again": again}


def kill_one(log: Path, items: int) -> None:
    """Kills a worker as soon as so many items are decoded."""
    while sum(line.count for line in noted(log)) < items:
        time.sleep(0.05)
    os.kill(noted(log)[-1].process, signal.SIGKILL)


def processes(mark: str) -> Iterator[Path]:
    """Folders in /proc of the processes of a run."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                yield folder


def megabytes(mark: str) -> float:
    """Proportional set size of all processes of a run."""
    total = 0
    for folder in processes(mark):
        with contextlib.suppress(OSError):
            lines = (folder / "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024 / 1e6


def measured(engine: str, workers: int, **how: float) -> dict[str, Any]:
    """The numbers of one run.

    Args:
        engine: Name of the engine.
        workers: Number of its workers.
        **how: Further options of this script.
    """
    words = ["--engine", engine, "--workers", str(workers)]
    words += [word for name, value in how.items() for word in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {MARK: folder, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *words, "--folder", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        most = 0.0
        while process.poll() is None:
            most = max(most, megabytes(folder))
            time.sleep(EVERY_S)
        assert process.stdout is not None
        text = process.stdout.read()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    found = json.loads(text.splitlines()[-1])
    rounded = {n: round(v, 3) if isinstance(v, float) else v for n, v in found.items()}
    row = {"engine": engine, "workers": workers, **how, **rounded, "mb": round(most)}
    print(f"  {json.dumps(row)}", flush=True)
    return row


def measure(batches: int, seconds: float, clips: int) -> dict[str, Any]:
    """Rows of all engines: simulated, with a killed worker, and real decoding.

    Args:
        batches: Number of simulated batches of eight items.
        seconds: Seconds that each takes.
        clips: How often the shipped clips are repeated for real decoding; 0: none is done.
    """
    slept = {"batches": batches, "seconds": seconds}
    found = engines()
    rows = [measured(*one, **slept) for one in found]
    killed = [measured(*one, **slept, kill=1) for one in found if one[1] > 1]
    real = [measured(*one, clips=clips) for one in found] if clips else []
    return {"engines": rows, "killed": killed, "real": real}


def main() -> None:
    """Measures one run, and prints it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--clips", type=int, default=0)
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    found = child(arguments, arguments.folder)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run_script(main)
