"""Rows of real_sizes.py: ratios with intervals, bars, the path that ran, and what came of it.

Every ratio is ours over the reference, so that less is better and a bar is the most that is
allowed.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peak_memory
import torch
from pages import table

from mmdecode.evaluation.speed.stopwatch import interleaved, load

CPU = torch.device("cpu")
RAN_OUT = "ran out of memory"

Row = dict[str, Any]
"""Keys: part, name, what, threads, measure, reference, unit, theirs, ours, ratio, interval, bar,
absolute (whether the bar is for ours and not for the ratio), same_ids, expects, paths, note,
error (why our way did not come to its end), load, and verdict."""


def row(part: str, name: str, what: str, **more: Any) -> Row:
    """A row with its verdict; see `Row`."""
    found: Row = {"part": part, "name": name, "what": what, "threads": torch.get_num_threads()}
    found |= {"measure": "", "reference": "generate", "unit": "ms", "theirs": None, "ours": None}
    found |= {"ratio": None, "interval": None, "bar": None, "absolute": False, "same_ids": None}
    found |= {"expects": [], "paths": None, "note": "", "error": ""}
    found["load"] = load()
    unknown = more.keys() - found.keys()
    assert not unknown, unknown
    found |= more
    if found["ratio"] is None and found["ours"] is not None and found["theirs"]:
        found["ratio"] = round(found["ours"] / found["theirs"], 3)
    return found | {"verdict": verdict(found)}


def verdict(found: Row) -> str:
    """Result of a row: ``met``, ``missed`` with the reason, or why it is neither."""
    if found["error"]:
        return f"missed: {found['error']}"
    if found["ours"] is None:
        return "not measured"
    if found["same_ids"] is False:
        return "missed: other ids"
    strange = fell_back(found["paths"], found["expects"])
    if strange:
        return f"missed: fell back, {strange}"
    value = found["ours"] if found["absolute"] else found["ratio"]
    if found["bar"] is not None and (value is None or value > found["bar"]):
        return "missed"
    if found["expects"] and found["paths"] is None:
        return "not decided: the path was not counted"
    return "met" if found["bar"] is not None or found["expects"] else "no bar"


def fell_back(paths: Mapping[str, int] | None, expects: Sequence[str]) -> str:
    """The paths that ran and were not expected; empty if there are none, or nothing was counted.

    Args:
        paths: Counter of paths, by names whose first word is the kind of work; ``None``: the
            decoder has none.
        expects: Paths that may run; each kind of work among them has to be counted.
    """
    found = []
    for kind in dict.fromkeys(name.split()[0] for name in expects if paths is not None):
        ran = [name for name, count in paths.items() if name.split()[0] == kind and count]
        found += (
            [name for name in ran if name not in expects] if ran else [f"no {kind} was counted"]
        )
    return ", ".join(found)


def paths_of(decoder: Any) -> dict[str, int] | None:
    """Counter of the paths that a decoder ran; ``None`` if it has none."""
    found = getattr(decoder.stats, "paths", None)
    return None if found is None else dict(found)


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Any]:
    """Ratio of medians over paired repeats with a bootstrap's 95 %; of fewer than three: none."""
    pairs = np.array([ours, theirs])
    value = round(float(np.divide(*np.median(pairs, 1))), 3)
    if pairs.shape[1] < 3:
        return value, None
    picked = np.random.default_rng(0).integers(pairs.shape[1], size=(2000, pairs.shape[1]))
    low, high = np.quantile(np.divide(*np.median(pairs[:, picked], -1)), [0.025, 0.975])
    return value, [round(float(low), 3), round(float(high), 3)]


class Clock:
    """Seconds between one run of a layer and the next: passes with all that is done between them.

    Args:
        layer: The first decoder layer, which runs once a pass.
        tail: Passes at the end that are left out, since less is drafted there.
    """

    def __init__(self, layer: torch.nn.Module, tail: int = 0) -> None:
        self.layer, self.tail, self.marks = layer, tail, list[float]()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Notes the passes inside the context."""
        self.marks = []
        hook = self.layer.register_forward_pre_hook(
            lambda *_: self.marks.append(time.perf_counter())
        )
        try:
            yield
        finally:
            hook.remove()

    def median(self) -> float:
        """Median seconds from pass to pass, the prompt's left out."""
        passed = np.diff(self.marks)[1:]
        passed = passed[: max(len(passed) - self.tail, 1)]
        return float(np.median(passed)) if len(passed) else float("nan")


class Pair:
    """Times calls against each other, interleaved, after one warm-up of each.

    Args:
        calls: Calls by name, which return ids.
        repeats: How often each is repeated.
        clock: Medians of passes are compared; ``None``: whole calls are.
        done: Called after the warm-up.
    """

    def __init__(
        self,
        calls: Mapping[str, Callable[[], Any]],
        repeats: int,
        clock: Clock | None = None,
        done: Callable[[], object] = lambda: None,
    ) -> None:
        passes: dict[str, list[float]] = {name: [] for name in calls}

        def noted(name: str) -> Callable[[int, int], Any]:
            def call(item: int, repeat: int) -> Any:
                if clock is None:
                    return calls[name]()
                with clock.running():
                    result = calls[name]()
                passes[name].append(clock.median())
                return result

            return call

        ways = {name: noted(name) for name in calls}
        interleaved(ways, 1, 1, CPU)
        for found in passes.values():
            found.clear()
        done()
        seconds, results = interleaved(ways, 1, repeats, CPU)
        self.ids = {name: found[0] for name, found in results.items()}
        self.seconds = passes if clock else {n: [r[0] for r in s] for n, s in seconds.items()}

    def between(self, ours: str, theirs: str, per: int = 1) -> Row:
        """Milliseconds of both, ``per`` units a call, and their ratio: keys of a `Row`."""
        mine, other = self.seconds[ours], self.seconds[theirs]
        value, interval = ratio_of_medians(mine, other)
        return {
            "ours": round(1e3 * statistics.median(mine) / per, 3),
            "theirs": round(1e3 * statistics.median(other) / per, 3),
            "ratio": value,
            "interval": interval,
        }

    def same(self, ours: str, theirs: str) -> bool:
        """Whether both gave the same ids."""
        return bool(torch.equal(self.ids[ours], self.ids[theirs]))


def child_peak(warm: Callable[[], Any], call: Callable[[], Any]) -> Row:
    """The most megabytes that a call held over what a warmed process held before it."""
    warm()
    before = peak_memory.now(CPU)
    peak_memory.reset(CPU)
    call()
    return {"peak_mb": round(peak_memory.peak(CPU) - before, 1)}


def limited(gigabytes: float) -> None:
    """Lets this process fail, and not the machine, if it needs more than so much memory."""
    size = int(gigabytes * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def peaks(script: Path, words: Sequence[str], repeats: int) -> Row:
    """Runs a script's child process some times; medians, or ``error`` where it did not finish."""
    found = []
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, str(script), *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:160]
            out = "alloc" in done.stderr or "emory" in done.stderr or done.returncode < 0
            return {"error": RAN_OUT if out else last}
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return found[0] | {"peak_mb": statistics.median(one["peak_mb"] for one in found)}


def number(value: float | None) -> str:
    """A number of three digits or more, or nothing."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def shown(found: Row) -> list[str]:
    """Cells of a row of the page."""
    over = ""
    if found["ratio"] is not None:
        over = f"{found['ratio']:.2f}"
        if found["interval"]:
            over += " [{:.2f}, {:.2f}]".format(*found["interval"])
    bar = ""
    if found["bar"] is not None:
        own = found["absolute"]
        bar = f"{number(found['bar'])} {found['unit']}" if own else f"{found['bar']:.2f}"
    ran = found["paths"]
    path = "not counted" if ran is None else ", ".join(f"{n} ({c})" for n, c in ran.items())
    same = {True: "same", False: "DIFFERENT", None: ""}[found["same_ids"]]
    result = (
        found["verdict"] if found["verdict"] in ("met", "no bar") else f"**{found['verdict']}**"
    )
    theirs = f"{number(found['theirs'])} {found['unit']}" if found["theirs"] is not None else ""
    ours = f"{number(found['ours'])} {found['unit']}" if found["ours"] is not None else ""
    what = f"{found['name']}: {found['what']}" + (f" ({found['note']})" if found["note"] else "")
    reference = found["reference"]
    cells = [
        what,
        str(found["threads"]),
        found["measure"],
        f"{theirs} ({reference})" * bool(theirs),
    ]
    return [*cells, ours, over, bar, path, same, result]


HEAD = ("what", "threads", "measure", "reference", "ours", "ours over it", "bar", "path", "ids", "")


def line(found: Row) -> str:
    """One line for the terminal."""
    cells = [cell for cell in shown(found) if cell]
    return "  " + " | ".join(cells)


def tables(result: Mapping[str, Any], name: str, titles: Mapping[str, str]) -> str:
    """The generated section of the page.

    Args:
        result: With ``machine``, ``rows`` and ``warning``.
        name: Name of its file.
        titles: Headings of the parts, in order.
    """
    facts, parts = result["machine"], []
    if result["warning"]:
        parts.append(f"**{result['warning']}**\n")
    counted = [found["verdict"].partition(":")[0] for found in result["rows"]]
    listed = ", ".join(f"{counted.count(one)} {one}" for one in dict.fromkeys(counted))
    parts.append(f"Rows: {listed}.\n")
    for part, title in titles.items():
        rows = [shown(found) for found in result["rows"] if found["part"] == part]
        if rows:
            parts.append(f"### {title}\n\n{table(HEAD, rows)}\n")
    parts.append(
        f"{facts['device']}, {facts['cores']} cores, {facts['dtype']}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}, {facts['date']}, load {facts['load_at_start']} to "
        f"{facts['load_at_end']}; `benchmarks/results/{name}`."
    )
    return "\n".join(parts)


def warning(start: float, highest: float, threads: int, quick: bool) -> str:
    """Reasons not to quote the numbers; empty if there are none.

    Args:
        start: Load before, of which other processes are the only cause.
        highest: The highest load while rows ran.
        threads: The most threads that rows ran with.
        quick: Whether there were few repeats.
    """
    why = []
    if start > 0.7:
        why.append(f"the load was {start} before anything ran")
    if highest > threads + 0.7:
        why.append(f"the load rose to {highest} with {threads} threads of ours")
    if quick:
        why.append("--quick repeats little and shortens outputs")
    return f"Not to be quoted: {'; '.join(why)}." if why else ""
