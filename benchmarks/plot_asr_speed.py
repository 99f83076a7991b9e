"""Draws docs/asr_speed.svg from a result of asr_speed.py.

python benchmarks/plot_asr_speed.py RESULT
"""

import io
import json
import sys
from pathlib import Path

import matplotlib

from mmdecode.runs.files import write_file

matplotlib.use("svg")
import matplotlib.pyplot as plt

from mmdecode.evaluation.report.layout import drawing

ENGINES = {
    "generate": ("transformers generate", "#9aa0a6"),
    "undrafted": ("mmdecode, no draft", "#4c8bf5"),
    "medusa": ("mmdecode, Medusa heads", "#0b8043"),
    "CTranslate2": ("CTranslate2 (faster-whisper's engine)", "#e8710a"),
}
BATCHES = (1, 8, 32)


def same(found, cases):
    """Part of the title on the ids of all bars; an exact engine with other ids has no bar."""
    shares = [found[*case, engine]["identical_share"] for case in cases for engine in ENGINES]
    return "identical token ids" if min(shares) == 1 else f"{100 * min(shares):.0f} % same windows"


def main(result, out):
    data = json.loads(Path(result).read_text())
    found = {(r["batch"], r["timestamps"], r["engine"]): r for r in data["best"]}
    cases = [(batch, times) for batch in BATCHES for times in (False, True)]
    plt.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10})
    figure, axes = plt.subplots(figsize=(10, 3.6))
    for index, (engine, (label, colour)) in enumerate(ENGINES.items()):
        heights = [found[*case, engine]["ms_per_token_row"] for case in cases]
        positions = [case + (index - 1.5) * 0.21 for case in range(len(cases))]
        bars = axes.bar(positions, heights, 0.2, label=label, color=colour)
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    names = [f"batch {b}\n{'with' if t else 'without'} timestamps" for b, t in cases]
    axes.set_xticks(range(len(cases)), names)
    axes.set_ylabel("ms per step of a row, encoder left out")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    machine = data["machine"]
    axes.set_title(
        f"Decode time, {same(found, cases)}: {machine['model']}, each at the better "
        f"of {' and '.join(map(str, machine['threads']))} CPU threads, {machine['dtype']}, "
        f"{machine['date']}",
        fontsize=9,
    )
    figure.tight_layout()
    made = io.StringIO()
    figure.savefig(made, format="svg")
    write_file(Path(out), drawing(made.getvalue()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "docs/asr_speed.svg")
