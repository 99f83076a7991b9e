"""Time and memory that results in a folder cost for each item, without decoding. See scale.py.

Each stage of each size runs in a process of its own, forked after all imports, so that its peak
memory is that of the stage: the most resident memory (Linux's VmHWM) over that before it began.

*write* is a whole run with a recogniser that takes no time: units, lines, files, notes, and merging
at the end. *merge* merges the lines of two parts, *resume* continues a run that is complete, and
*status* is what ``mmdecode results`` reads. All begin with the items in memory, but for *status*.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from peak_memory import STATUS, resident
from simulated import folder_of, loader, recordings

from mmdecode.runs.journal import PARTS, RESULTS
from mmdecode.runs.status import status_of
from mmdecode.runs.work import run

SYNCED = 2_000
"""The most items that are written with ``fsync``, which is constant for each line."""
STAGES = ("items", "write", "merge", "resume", "status")
Stage = Callable[[], object]


def stage(name: str, out: Path, count: int, formats: Sequence[str]) -> tuple[Stage, Stage]:
    """What a stage needs, and the stage.

    Args:
        name: One of `STAGES`.
        out: Folder of the results.
        count: Number of items.
        formats: Formats written for each item.
    """
    entries: list[Any] = []
    made: Stage = lambda: entries.extend(recordings(count))  # noqa: E731
    split: Stage = lambda: (made(), in_two_parts(out))  # noqa: E731
    complete = lambda: folder_of(out, entries, formats, resume=True)  # noqa: E731
    return {
        "items": (lambda: None, made),
        "write": (made, lambda: run(folder_of(out, entries, formats), loader())),
        "merge": (split, lambda: complete().merge()),
        "resume": (made, lambda: run(complete(), loader())),
        "status": (lambda: None, lambda: status_of(out).missing),
    }[name]


def in_two_parts(out: Path) -> None:
    """Moves the lines of a folder to the parts of two workers, as if these had just ended."""
    parts = out / PARTS
    parts.mkdir()
    with (
        (out / RESULTS).open("rb") as lines,
        (parts / "rank-0-1.jsonl").open("wb") as first,
        (parts / "rank-0-2.jsonl").open("wb") as second,
    ):
        for number, line in enumerate(lines):
            (second if number // 64 % 2 else first).write(line)
    (out / RESULTS).unlink()


def _measured(link: Connection, synced: bool, *what: Any) -> None:
    """Runs a stage in a forked process, and sends its numbers."""
    if not synced:
        os.fsync = lambda handle: None
    prepare, call = stage(*what)
    prepare()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, began, worked = resident("VmRSS"), time.perf_counter(), time.process_time()
    call()
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    link.send({"s": seconds, "cpu_s": worked, "mb": (resident("VmHWM") - before) * 1024 / 1e6})


def measured(name: str, out: Path, count: int, formats: Sequence[str], synced: bool) -> Any:
    """Seconds, seconds of the processor, and megabytes of a stage."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with ours, theirs:
        what = (theirs, synced, name, out, count, formats)
        process = context.Process(target=_measured, args=what)
        process.start()
        theirs.close()
        found = ours.recv()
        process.join()
    return {n: round(value, 4) for n, value in found.items()}


def measure(sizes: Sequence[int], with_files: Sequence[int], folder: Path | None) -> list[Any]:
    """A row for each size, with files for each item or without.

    Args:
        sizes: Numbers of items without files.
        with_files: Numbers of items with a file each.
        folder: Where results are written; ``None``: the folder for temporary files.
    """
    if not STATUS.exists():
        print("the cost of results is left out: memory is read from Linux's /proc")
        return []
    rows = []
    for count, formats in [*((n, ()) for n in sizes), *((n, ("txt",)) for n in with_files)]:
        row: dict[str, Any] = {"items": count, "formats": list(formats), "stages": {}}
        out = Path(tempfile.mkdtemp(dir=folder))
        if count <= SYNCED:
            row["synced"] = measured("write", out, count, formats, True)
            shutil.rmtree(out)
            out.mkdir()
        for name in STAGES:
            row["stages"][name] = measured(name, out, count, formats, False)
        row["line_bytes"] = round((out / RESULTS).stat().st_size / count)
        shutil.rmtree(out)
        rows.append(row)
        print(f"  {json.dumps(row)}", flush=True)
    return rows
