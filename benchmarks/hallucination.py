"""Every hallucination method on the zoo's vision-language model, next to the controls.

    python benchmarks/hallucination.py tune        # grids, on the development scenes
    python benchmarks/hallucination.py report      # the cards' settings and tuned ones, on the test
    python benchmarks/hallucination.py page        # docs/hallucination.md, .svg

``tune`` decodes greedily and keeps, per method, the setting with the best mean accuracy over the
three POPE splits of the development scenes; ties go to the earlier one, which is the card's.
``report`` runs ``mmdecode evaluate`` for POPE (greedy, and five seeds), captions, MME's pairs and
relations, each method in both settings, and continues where it was interrupted; it takes about four
hours on one core. Nothing of the test scenes enters a choice. Of the results, the summaries and
tables are kept in the project; the rows (``items.jsonl``) stay where they were made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from hallucination_tables import read, tables
from pages import parsed, write_page, write_result
from plot_hallucination import draw

from mmdecode.errors import run_script
from mmdecode.evaluation import YesNoReport
from mmdecode.evaluation.vision.benchmarks import read_questions
from mmdecode.evaluation.vision.modes import INERT, modes_of
from mmdecode.evaluation.vision.runs import Recorder
from mmdecode.runs.console import only_our_output, progress_bar
from mmdecode.runs.files import run_of
from mmdecode.vlm.loading import load

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "hallucination"
PAGE = HERE.parent / "docs" / "hallucination.md"
CHOSEN = "tuned.json"
TASKS = {
    "pope": ["--seeds", "5", "--max-new-tokens", "1"],
    "chair": ["--greedy", "--max-new-tokens", "80"],
    "mme": ["--greedy", "--max-new-tokens", "1"],
    "spatial": ["--greedy", "--max-new-tokens", "4"],
}
"""Options of ``mmdecode evaluate`` for each task."""

GRIDS: dict[str, list[str]] = {
    "vcd": ["vcd", "vcd:alpha=0.5", "vcd:step=700", "vcd:step=900", "vcd:alpha=0.5,step=900"],
    "icd": ["icd", "icd:alpha=0.5", "icd:alpha=0.25"],
    "m3id": ["m3id", "m3id:rate=0.1", "m3id:rate=0.3"],
    "ritual": ["ritual", "ritual:normalize=true", "ritual:normalize=true,alpha=1"],
    "agla": ["agla", "agla:alpha=1", "agla:keep=0.75", "agla:alpha=1,keep=0.75"],
    "cfg_image": [
        "cfg_image",
        "cfg_image:gamma=1.2",
        "cfg_image:gamma=2",
        "cfg_image:without=mean",
    ],
    "rbd": ["rbd", "rbd:a=0.5", "rbd:a=0.5,keep=0.75", "rbd:a=0.5,b=1,keep=0.75"],
    "damro": ["damro", "damro:alpha=1", "damro:alpha=0.5", "damro:alpha=0.5,k=4"],
    "causalmm": [
        "causalmm",
        "causalmm:gamma=0.5",
        "causalmm:level=language",
        "causalmm:level=language,gamma=0.5",
        "causalmm:level=both,gamma=0.5",
    ],
    "pai": ["pai", "pai:gamma=1.3", "pai:alpha=0.5", "pai:alpha=0.5,gamma=1.5"],
    "dola": ["dola", "dola:bucket=low", "dola:alpha=0.5"],
    "dcla": ["dcla", "dcla:tau=0.9", "dcla:tau=0.9,alpha=0.9", "dcla:first=0.75"],
    "scalingvis": ["scalingvis", "scalingvis:weight=1.2", "scalingvis:weight=0.8"],
    "adaptvis": [
        "adaptvis",
        "adaptvis:threshold=0.7",
        "adaptvis:unsure=0.8,sure=1.2,threshold=0.7",
    ],
    "conscious_gaze": [
        "conscious_gaze",
        "conscious_gaze:alpha=0.2",
        "conscious_gaze:threshold=0.2",
    ],
    "dagcd": ["dagcd", "dagcd:alpha=2", "dagcd:alpha=1"],
    "dfd": ["dfd"],  # for sampling only, so that there is nothing to tune greedily
}
"""Settings that are tried for each method, the card's setting first."""


def tune(arguments: argparse.Namespace) -> None:
    """Chooses a setting per method and writes all that were tried."""
    questions = read_questions("pope", ["zoo"], part="development")
    scenes = list(dict.fromkeys(item.image for item in questions.items))[: arguments.scenes]
    items = [item for item in questions.items if item.image in scenes]  # of all three splits
    model, processor = load(arguments.model, arguments.device, "float32")
    guides = [spec for name, grid in GRIDS.items() if name not in INERT for spec in grid]
    modes = modes_of(guides, seeds=[], controls=False)
    recorder = Recorder(
        model,
        processor,
        items,
        modes,
        questions.image,
        max_new_tokens=1,
        batch_size=arguments.batch_size,
    )
    with progress_bar() as bar:
        task = bar.add_task("development", total=recorder.total)
        rows = recorder.run(progress=lambda row: bar.advance(task))
    report = YesNoReport(rows, task="pope", resamples=200)
    accuracy = mean_accuracy(report)
    chosen = {
        name: max(grid, key=lambda spec: accuracy.get(spec, 0.0)) for name, grid in GRIDS.items()
    }
    found = {
        "model": arguments.model,
        "questions": len(items),
        "scenes": len(scenes),
        "greedy": accuracy["greedy"],
        "accuracy": {spec: accuracy[spec] for spec in guides},
        "tuned": chosen,
    }
    write_result(arguments.out / CHOSEN, found)
    for name, spec in chosen.items():
        print(f"{name:16s} {spec:44s} {accuracy.get(spec, float('nan')):.4f}")


def mean_accuracy(report: YesNoReport) -> dict[str, float]:
    """Accuracy by mode, on average over the splits."""
    found = {}
    for mode, scores in report.summary["modes"].items():
        values = [split["accuracy"] for split in scores["sets"].values()]
        found[mode] = round(sum(values) / len(values), 5)
    return found


def evaluate(arguments: argparse.Namespace) -> None:
    """Runs the command for each task."""
    chosen = json.loads((arguments.out / CHOSEN).read_text())["tuned"]
    guides = [spec for name in GRIDS for spec in dict.fromkeys([name, chosen[name]])]
    common = ["--model", arguments.model, "--data", "zoo", "--part", "test"]
    common += ["--batch-size", str(arguments.batch_size)]
    if arguments.limit:
        common += ["--limit", str(arguments.limit)]
    for task in arguments.task or TASKS:
        sampled = "--greedy" not in TASKS[task]
        kept = [spec for spec in guides if sampled or spec.partition(":")[0] not in INERT]
        named = [argument for spec in kept for argument in ("--guide", spec)]
        folder = arguments.out / task
        resume = ["--resume"] if run_of(folder).exists() else []
        resume += ["--overwrite"] if arguments.overwrite else []
        command = [sys.executable, "-m", "mmdecode", "evaluate", task, *common, *TASKS[task]]
        print(task, flush=True)
        subprocess.run([*command, *named, "--out", str(folder), *resume], check=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=["tune", "report", "page"])
    parser.add_argument("--model", default="zoo:llava-scenes")
    parser.add_argument("--device")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--limit", type=int, help="questions of a report: a try")
    parser.add_argument("--scenes", type=int, default=60, help="to tune on, all splits of each")
    parser.add_argument("--task", action="append", choices=TASKS, help="of a report; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parsed(parser)
    only_our_output()
    if arguments.step == "page":
        found = read(arguments.out)
        write_page(arguments.page, tables(found))
        draw(found["pope"], arguments.page.with_suffix(".svg"))
    else:
        (tune if arguments.step == "tune" else evaluate)(arguments)


if __name__ == "__main__":
    run_script(main)
