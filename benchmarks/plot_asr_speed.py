"""The README's picture from a result of asr_speed.py: python benchmarks/plot_asr_speed.py RESULT"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

ENGINES = {
    "generate": ("transformers generate", "#9aa0a6"),
    "undrafted": ("mmdecode, no draft", "#4c8bf5"),
    "medusa": ("mmdecode, Medusa heads", "#0b8043"),
}


def main(result, out):
    data = json.loads(Path(result).read_text())
    cases = [(batch, times) for batch in (1, 8) for times in (False, True)]
    plt.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10})
    figure, axes = plt.subplots(figsize=(8, 3.4))
    for index, (engine, (label, colour)) in enumerate(ENGINES.items()):
        heights = []
        for batch, times in cases:
            (row,) = [
                r
                for r in data["best"]
                if (r["batch"], r["timestamps"], r["engine"]) == (batch, times, engine)
            ]
            heights.append(row["ms_per_token_row"])
        places = [case + (index - 1) * 0.27 for case in range(len(cases))]
        bars = axes.bar(places, heights, 0.25, label=label, color=colour)
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    names = [f"batch {b}\n{'with' if t else 'without'} timestamps" for b, t in cases]
    axes.set_xticks(range(len(cases)), names)
    axes.set_ylabel("ms per step of a row, encoder left out")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    machine = data["machine"]
    axes.set_title(
        f"Decode time, identical token ids: {machine['model']}, each at the better "
        f"of {' and '.join(map(str, machine['threads']))} CPU threads, {machine['dtype']}, "
        f"{machine['date']}",
        fontsize=9,
    )
    figure.tight_layout()
    Path(out).parent.mkdir(exist_ok=True)
    figure.savefig(out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "docs/asr_speed.svg")
