"""Figure of the hallucination report: which methods do more than shift the margin."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib

from mmdecode.runs.files import write_file

matplotlib.use("svg")
import matplotlib.pyplot as plt
from hallucination_tables import HARDEST, Summary, greedy_verdict, settings

from mmdecode.evaluation.report.layout import drawing

CROWD = 0.95  # points from the plain model; those nearer are not named
HELPS, OTHERS, CURVE = "#0b8043", "#4c8bf5", "#9aa0a6"


def draw(pope: Summary, out: Path) -> None:
    """Accuracy against the share of yes on the adversarial split, the most likely token taken.

    Args:
        pope: Summary of the run on POPE.
        out: An SVG file.
    """
    modes = pope["modes"]

    def point(name: str) -> tuple[float, float]:
        scores = modes[name]["sets"][HARDEST]
        return 100 * scores["yes_ratio"], 100 * scores["accuracy"]

    named = settings(pope)
    plt.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9})
    figure, axes = plt.subplots(figsize=(9, 5))
    curve = sorted(point(f"greedy shifted to {name}") for name in named)
    axes.plot(*zip(*curve, strict=True), color=CURVE, zorder=1, label="plain model, margin shifted")
    axes.plot(*point("greedy"), "D", color="black", label="plain model")
    for control in ("prompt_bias", "near_ties"):
        axes.plot(*point(control), "x", color="black")
        axes.annotate(control, point(control), xytext=(4, -9), textcoords="offset points")
    for name in named:
        colour = HELPS if greedy_verdict(pope, name).startswith("**") else OTHERS
        axes.plot(*point(name), "o", color=colour, markersize=5)
        if max(abs(a - b) for a, b in zip(point(name), point("greedy"), strict=True)) > CROWD:
            axes.annotate(
                name, point(name), xytext=(4, 3), textcoords="offset points", fontsize=7
            ).set_color(colour)
    axes.set_xlabel(f"answers yes in %, {HARDEST} questions (half of the right answers are yes)")
    axes.set_ylabel("accuracy in %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower center")
    figure.tight_layout()
    made = io.StringIO()
    figure.savefig(made, format="svg")
    write_file(out, drawing(made.getvalue()))
    plt.close(figure)
