"""Every hallucination method on the zoo's vision-language model, beside the controls.

    python benchmarks/hallucination.py tune        # grids, on the development scenes
    python benchmarks/hallucination.py report      # the cards' settings and tuned ones, on the test

``tune`` decodes greedily and keeps, per method, the setting with the best mean accuracy over the
three POPE splits of the development scenes; ties go to the earlier one, which is the card's.
``report`` runs ``mmdecode evaluate`` for POPE (greedy, and five seeds), captions and relations,
each method in both settings, and continues where it was interrupted. Nothing of the test scenes
enters a choice. ``--limit`` is the number of questions; of a report it is for trying it out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from mmdecode.cli.progress import only_our_output, progress_bar
from mmdecode.evaluation import YesNoReport
from mmdecode.evaluation.vlm_data import read_questions
from mmdecode.evaluation.vlm_runs import INERT, Recorder, modes_of
from mmdecode.vlm.answerer import load

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "hallucination"
CHOSEN = "tuned.json"

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
"""Per method what is tried, the card's setting first."""


def tune(arguments: argparse.Namespace) -> None:
    """Chooses a setting per method and writes all that were tried."""
    questions = read_questions("pope", ["zoo"], part="development").limited(arguments.limit)
    model, processor = load(arguments.model, arguments.device, "float32")
    guides = [spec for name, grid in GRIDS.items() if name not in INERT for spec in grid]
    modes = modes_of(guides, seeds=[], controls=False)
    recorder = Recorder(
        model,
        processor,
        questions.items,
        modes,
        questions.image,
        max_new_tokens=2,
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
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = {
        "model": arguments.model,
        "questions": len(questions.items),
        "limit": arguments.limit,
        "greedy": accuracy["greedy"],
        "accuracy": {spec: accuracy[spec] for spec in guides},
        "tuned": chosen,
    }
    (arguments.out / CHOSEN).write_text(json.dumps(found, indent=1) + "\n")
    for name, spec in chosen.items():
        print(f"{name:16s} {spec:44s} {accuracy.get(spec, float('nan')):.4f}")


def mean_accuracy(report: YesNoReport) -> dict[str, float]:
    """Accuracy by mode, on average over the splits."""
    found = {}
    for mode, scores in report.summary["modes"].items():
        values = [split["accuracy"]["value"] for split in scores["sets"].values()]
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
    tasks = {
        "pope": ["--seeds", "5", "--max-new-tokens", "2"],
        "chair": ["--greedy", "--max-new-tokens", "80"],
        "spatial": ["--greedy", "--max-new-tokens", "4"],
    }
    for task, options in tasks.items():
        named = [argument for spec in guides for argument in ("--guide", spec)]
        folder = arguments.out / task
        resume = ["--resume"] if folder.exists() else []
        command = [sys.executable, "-m", "mmdecode", "evaluate", task, *common, *options, *named]
        print(task, flush=True)
        subprocess.run([*command, "--output", str(folder), *resume], check=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=["tune", "report"])
    parser.add_argument("--model", default="zoo:llava-scenes")
    parser.add_argument("--device")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--limit", type=int, help="only so many questions: a try")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    only_our_output()
    (tune if arguments.step == "tune" else evaluate)(arguments)


if __name__ == "__main__":
    main()
