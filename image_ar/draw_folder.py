"""Generate the images of a file of classes or prompts into a folder.

    python image_ar/draw_folder.py wanted.txt pictures --mode exact

The file has a class or a prompt on each line. Prints a line per image with its passes; images that
fail are listed at the end, and the exit code is then 1. A run that was stopped, by whatever, goes
on with ``--resume``, and ends with the same images.

``mmdecode generate-image --prompts`` does this from the command line, with pixels to start from.
"""

import argparse
from functools import partial
from pathlib import Path

from mmdecode.errors import run_script
from mmdecode.image_ar import ImageGenerator
from mmdecode.image_ar.jobs import ImageFolder
from mmdecode.image_ar.modes import MODES
from mmdecode.runs.distributed import shard_of
from mmdecode.runs.journal import RESULTS
from mmdecode.runs.tables import read_rows
from mmdecode.runs.work import run


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wanted", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", "--count", type=int, default=1, help="images per line")
    parser.add_argument("--model", default="zoo:llamagen-scenes")
    parser.add_argument("--mode", choices=MODES, default="exact")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="continue the run in the folder")
    parser.add_argument("--engine", default="local", help="local, processes or ray")
    parser.add_argument("--device")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that it did not write"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    wanted = [
        line.strip()
        for line in args.wanted.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    load = {"model_id": args.model, "mode": args.mode, "seed": args.seed}
    how = {name: getattr(args, name) for name in ("batch_size", "resume", "overwrite")}
    folder = ImageFolder(args.folder, load, **how)

    def requests(generator):
        folder.name_by(generator.labels, load, generator.repeatable)
        return generator.requests(wanted, args.count)

    loaded = partial(
        ImageGenerator.from_pretrained, **load, batch=args.batch_size, device=args.device
    )
    shared = {"engine": args.engine, "shard": shard_of(None)}
    tally = run(folder, loaded, items_of=requests, **shared)
    lines = [line for _, line in read_rows(args.folder / RESULTS)]
    for line in sorted(lines, key=lambda line: "error" in line):  # failures last
        what = line["label"] or line["condition"]
        if "error" in line:
            print(f"failed: {what}: {line['error']}")
        else:
            print(f"{line['file']}: {what}, {line['passes']} passes, guarantee: {line['law']}")
    raise SystemExit(0 if tally.fine else 1)


if __name__ == "__main__":
    run_script(main)
