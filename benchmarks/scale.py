"""What results in a folder cost, from a hundred items to a million, and what the engines do.

    python benchmarks/scale.py --page docs/scale.md      # a quarter of an hour
    python benchmarks/scale.py --result benchmarks/results/scale-DATE.json --page docs/scale.md

Results and engines are measured without a model: a batch is decoded by sleeping, so that the number
of cores is no limit. What they cost for each item is constant if they are to serve a large job. The
last table is about real decoding by the recogniser of the zoo. Rows of Ray are left out where it is
not installed. Parts: scale_journal.py, scale_engines.py and simulated.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import scale_engines
import scale_journal
import torch
from pages import parsed, table, warn_if_busy, write_page, write_result
from scale_engines import LOCAL

from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import load, machine

HERE = Path(__file__).parent
SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
FILES = (1_000, 10_000, 100_000)
SHOWN = ("write", "merge", "resume", "status")


def per_item(row: dict[str, Any], stage: str) -> str:
    """Microseconds and bytes of a stage for each item."""
    found, items = row["stages"][stage], row["items"]
    return f"{1e6 * found['s'] / items:.0f} µs, {1e3 * found['mb'] / items:.2f} kB"


def of_journal(rows: list[dict[str, Any]]) -> str:
    """The table of what results cost, and the share of syncing."""
    lines = [
        [f"{row['items']:,}", "a text" if row["formats"] else "none"]
        + [per_item(row, stage) for stage in SHOWN]
        for row in rows
    ]
    header = ["items", "files of an item", "write", "merge", "resume", "status"]
    synced = [row for row in rows if "synced" in row]
    largest = max(rows, key=lambda row: row["items"])
    size = 1e3 * largest["stages"]["items"]["mb"] / largest["items"]
    below = (
        f"A line has {largest['line_bytes']} bytes. Memory is what a stage takes at most beyond "
        f"the list of items, which has {size:.2f} kB each. What a run takes once shows in the "
        "first rows."
    )
    if synced:
        row = max(synced, key=lambda row: (not row["formats"], row["items"]))
        seconds, plain = row["synced"]["s"], row["stages"]["write"]["s"]
        below += (
            " Above, lines are not synced to disk. A run does that after each line (`fsync`), "
            f"which takes {1e3 * (seconds - plain) / row['items']:.1f} ms on this disk: "
            f"{1 - plain / seconds:.0%} of the time of writing {row['items']:,} items."
        )
    return f"{table(header, lines)}\n\n{below}"


def name_of(row: dict[str, Any]) -> list[str]:
    """Engine and workers."""
    return [row["engine"], "none" if row["engine"] == LOCAL else str(row["workers"])]


def decoding_s(row: dict[str, Any]) -> float:
    """Seconds of a run after its start."""
    return float(row["wall_s"] - row["start_s"])


def of_engines(found: dict[str, Any]) -> str:
    """The tables of engines."""
    rows = found["engines"]
    alone = next(row for row in rows if row["engine"] == LOCAL)
    lines = [
        [
            *name_of(row),
            f"{row['wall_s']:.1f}",
            f"{decoding_s(alone) / decoding_s(row):.2f}",
            f"{row['start_s']:.1f}",
            f"{row['overhead_ms']:.2f}",
            str(row["mb"]),
        ]
        for row in rows
    ]
    header = ["engine", "workers", "seconds", "times as fast, after the start", "start, s"]
    shown = table([*header, "overhead, ms an item", "memory, MB"], lines)
    shown += (
        f"\n\n{alone['batches']} batches of eight items, each {alone['seconds']} s of sleep, with "
        "a line for each item, which is synced. The start loads libraries, here without a model; "
        "memory is that of all processes, most of it the libraries'."
    )
    undisturbed = {tuple(name_of(row)): decoding_s(row) for row in rows}
    lines = []
    for row in found["killed"]:
        plain, disturbed = undisturbed[tuple(name_of(row))], decoding_s(row)
        times = (f"{seconds:.1f}" for seconds in (plain, disturbed, disturbed - plain))
        lines.append([*name_of(row), *times, str(row["again"]), f"{row['done']} of {row['items']}"])
    header = ["engine", "workers", "after the start, s", "with a killed worker, s", "lost, s"]
    shown_killed = table([*header, "items decoded twice", "items done"], lines)
    shown += (
        f"\n\nThe same, where a worker is killed when almost half is done:\n\n{shown_killed}\n\n"
        "Lost are the start of another worker, and the batch that was being decoded, whose items "
        "are decoded again one by one; complete batches of its unit are decoded again, too, "
        "since batches must not depend on what was done."
    )
    if not found["real"]:
        return shown
    lines = [
        [*name_of(row), f"{row['rtfx']:.0f}", f"{row['start_s']:.1f}", str(row["mb"])]
        for row in found["real"]
    ]
    header = ["engine", "workers", "seconds of audio a second", "start, s", "memory, MB"]
    one = found["real"][0]
    return (
        f"{shown}\n\nReal decoding: `zoo:whisper-synth` without a drafter on {one['items']} "
        f"shipped clips, {one['audio_s']:.0f} s, in batches of eight, one thread for each "
        "process:\n\n"
        f"{table(header, lines)}"
    )


def shown(result: dict[str, Any]) -> str:
    """What is put into the page."""
    facts = result["machine"]
    engines = {row["engine"] for row in result["engines"]}
    below = (
        f"{facts['cores']} CPU cores, {facts['date']}, load {facts['load_at_start']} at the start"
        f" and {facts['load_at_end']} at the end."
    )
    below += "" if "ray" in engines else " Ray was not installed, so that it was not measured."
    parts = [of_journal(result["journal"]), of_engines(result), below]
    return "\n\n".join(parts)


def main() -> None:
    """Measures, and shows the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--items", type=int, nargs="*", default=SIZES, help="without files")
    parser.add_argument("--with-files", type=int, nargs="*", default=FILES, help="with a text")
    parser.add_argument("--batches", type=int, default=64, help="simulated batches of eight items")
    parser.add_argument("--seconds", type=float, default=0.5, help="sleep of a batch")
    parser.add_argument("--clips", type=int, default=16, help="repeats of the shipped clips")
    parser.add_argument("--folder", type=Path, help="of what is written")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    parser.add_argument("--result", type=Path, help="show this earlier result, measure nothing")
    arguments = parsed(parser)
    if arguments.result:
        result = json.loads(arguments.result.read_text(encoding="utf-8"))
    else:
        facts = machine(torch.device("cpu"), "float32")
        warn_if_busy(facts)
        found = scale_engines.measure(arguments.batches, arguments.seconds, arguments.clips)
        rows = scale_journal.measure(arguments.items, arguments.with_files, arguments.folder)
        facts["load_at_end"] = load()
        result = {"machine": facts, "journal": rows, **found}
        path = arguments.out / f"scale-{facts['date']}.json"
        write_result(path, result)
        print(f"written: {path}")
    print(shown(result))
    if arguments.page:
        write_page(arguments.page, shown(result))


if __name__ == "__main__":
    run_script(main)
