"""Tables and figure of the page on streaming."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
from pages import table

from mmdecode.evaluation.report.layout import drawing
from mmdecode.runs.files import write_file

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = {
    "agreement": "#202124",
    "hold": "#9aa0a6",
    "delay": "#e8710a",
    "alignatt": "#1a73e8",
    "ending": "#a142f4",
    "adaptive-wait": "#0b8043",
    "wait": "#c5221f",
}
"""Colour of each policy."""
Row = Mapping[str, Any]


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return "" if value is None else f"{100 * value:.{digits}f} %"


def seconds(value: float | None) -> str:
    """A time in seconds."""
    return "" if value is None else f"{value:.2f} s"


def latencies(row: Row) -> list[str]:
    """Cells of a row's latency."""
    names = ("al", "laal", "dal")
    cells = [seconds(row[name]) for name in names]
    cells += [percent(row["ap"], 0), seconds(row["lag_s"]), seconds(row["lag_p95_s"])]
    return [*cells, percent(row["changed"], 0)]


LATENCY = ["AL", "LAAL", "DAL", "AP", "behind the word's end", "95 % of words within", "changed"]


def tables(result: Mapping[str, Any], name: str) -> str:
    """Tables of the page, from the result file called ``name``."""
    facts = result["machine"]
    parts = [
        f"Written by `{facts['command']}` from `benchmarks/results/{name}`: {facts['model']}, "
        f"{facts['device']} with {facts['cores']} cores, {facts['threads']} thread, "
        f"{facts['dtype']}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"{facts['date']}; load {facts['load_at_start']} at the start, {facts['load_at_end']} at "
        "the end."
    ]
    if "curves" in result:
        parts += curves(result)
    if "costs" in result:
        parts += costs_and_long(result)
    return "\n\n".join(parts + (capacity(result) if "capacity" in result else []))


def curves(result: Mapping[str, Any]) -> list[str]:
    """Tables and figure of policies."""
    rows = [
        [row["policy"], f"{row['step_s']:g} s", percent(row["wer"]), *latencies(row)]
        for row in result["curves"]
    ]
    parts = [
        f"**Policies on {result['clips']} clips** ({result['seconds']:.0f} s; transcribed as a "
        f"whole: WER {percent(result['offline_wer'])})",
        "![Word error rate against the seconds from a word's end to its commit](streaming.svg)",
        table(["policy", "step", "WER", *LATENCY], rows),
        best(result["curves"]),
    ]
    if result["real"]:
        cells = [
            [row["policy"], percent(row["wer"]), *latencies(row)[:4], latencies(row)[-1]]
            for row in result["real"]
        ]
        parts += [
            f"**{result['real_model']} on 11 real clips** (transcribed as a whole: WER "
            f"{percent(result['real_offline_wer'])}), steps of half a second",
            table(["policy", "WER", "AL", "LAAL", "DAL", "AP", "changed"], cells),
        ]
    return parts


def costs_and_long(result: Mapping[str, Any]) -> list[str]:
    """Tables of passes and time, and of the recording of three minutes."""
    rows = [
        [
            row["policy"],
            f"{row['step_s']:g} s",
            percent(row["wer"]),
            *latencies(row),
            seconds(row["seconds_per_second"]),
        ]
        for row in result["long"]
    ]
    return [
        f"**Cost, one stream at a time, {result['few']} clips, steps of half a second**",
        costs(result["costs"]),
        "**The recording of three minutes** (transcribed as a whole: WER "
        f"{percent(result['long_offline_wer'])})",
        table(["policy", "step", "WER", *LATENCY, "compute per second"], rows),
    ]


def costs(rows: Sequence[Row]) -> str:
    """Table of passes and time, each against the row of the same drafter alone."""
    alone = {row["draft"]: row for row in rows if not row["redraft"]}
    cells = []
    for row in rows:
        before = alone[row["draft"]]
        drafts = ["last hypothesis"] * row["redraft"] + [row["draft"]] * bool(row["draft"])
        same = "yes" if row["texts"] == before["texts"] else "no"
        cells.append(
            [
                row["policy"],
                ", then ".join(drafts) or "none",
                str(row["passes"]),
                f"{row['passes'] / before['passes']:.2f}",
                same if row["policy"] == before["policy"] else "",
                f"{1000 * row['seconds_per_second']:.0f} ms",
                f"{row['seconds_per_second'] / before['seconds_per_second']:.2f}",
            ]
        )
    header = ["policy", "draft", "passes", "ratio", "same text", "compute per second", "ratio"]
    return table(header, cells)


def best(rows: Sequence[Row]) -> str:
    """Says for each policy the shortest mean lag at which few words are wrong."""
    limits = (0.056, 0.1)
    cells = []
    for name in COLOURS:
        own = [row for row in rows if row["policy"].split(":")[0] == name]
        found = []
        for limit in limits:
            able = [row for row in own if row["wer"] <= limit and row["lag_s"] is not None]
            row = min(able, key=lambda row: row["lag_s"], default=None)
            found.append(
                "never"
                if row is None
                else f"{row['lag_s']:.2f} s ({row['policy']}, {row['step_s']:g} s)"
            )
        cells.append([name, *found])
    header = ["policy", *(f"shortest lag at a WER of {percent(limit)} or less" for limit in limits)]
    return table(header, cells)


def capacity(result: Mapping[str, Any]) -> list[str]:
    """Table of how many streams fit."""
    half = f", every second one by {result['real_model']}" if result["real_model"] else ""
    title = (
        f"**Streams at once**, steps of 1 s, agreement{half}; delay from the end of a word to its "
        "commit, on the wall"
    )
    rows = [
        [
            str(row["streams"]),
            seconds(row["delay_s"]),
            seconds(row["delay_p95_s"]),
            f"{row['waiting_s']:.1f} s",
            f"{1000 * row['seconds_per_second']:.0f} ms",
            f"{row['seconds_per_second'] * row['streams']:.2f}",
        ]
        for row in result["capacity"]
    ]
    header = ["streams", "mean delay", "95 % of words within", "most audio waiting"]
    header += ["compute per second of audio", "of one machine"]
    return [title, table(header, rows)]


def draw(result: Mapping[str, Any], out: Path) -> None:
    """Draws word errors against the lag of words; a line joins the settings of a policy.

    Args:
        result: Content of the result file.
        out: An SVG file.
    """
    plt.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9})
    figure, axes = plt.subplots(figsize=(8, 4.5))

    def family(row: Row) -> tuple[str, float]:
        return row["policy"].split(":")[0], row["step_s"]

    for (name, step), group in groupby(sorted(result["curves"], key=family), family):
        rows = sorted(group, key=lambda row: row["lag_s"])
        style = {0.25: ":", 0.5: "-", 1.0: "--", 2.0: "--"}[step]
        line = axes.plot(
            [row["lag_s"] for row in rows],
            [100 * row["wer"] for row in rows],
            style,
            marker="o",
            markersize=3.5,
            color=COLOURS[name],
        )[0]
        line.set_label(f"{name}, steps of {step:g} s")
    offline = 100 * result["offline_wer"]
    axes.axhline(offline, color="#dadce0", zorder=0)
    axes.annotate("as a whole", (axes.get_xlim()[0], offline), va="bottom")
    axes.set_xlabel("mean time from a word's end in the audio to its commit, in s")
    axes.set_ylabel("word error rate in %")
    axes.set_ylim(0, 40)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, ncols=2)
    figure.tight_layout()
    made = io.StringIO()
    figure.savefig(made, format="svg")
    write_file(out, drawing(made.getvalue()))
    plt.close(figure)
