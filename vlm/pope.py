"""POPE on your own images: evaluate whether a guide reduces object hallucination.

    python vlm/pope.py pope/coco val2014/ --model llava-hf/llava-1.5-7b-hf --guide vcd --out run
    python vlm/pope.py --zoo --guide vcd --guide ritual --limit 60

The first argument is a folder with POPE's files, one per split (``coco_pope_random.json`` and so
on; of github.com/AoiDragon/POPE, the folder ``output/coco``), the second the folder of the images
that they name (``COCO_val2014_000000310196.jpg``). ``--zoo`` uses the shipped scenes instead, which
takes some seconds for 60 questions on two CPU cores. Prints a row per mode and split, for guides
and controls, and the answers that differ from the plain model shifted to the same yes-ratio. A
guide that does not beat that row only changes how often the model says yes.

``mmdecode evaluate pope`` does the same from the command line, and samples with several seeds.
"""

import argparse
from pathlib import Path

from mmdecode.errors import run_script
from mmdecode.evaluation import evaluate

OPTIONS = (
    *("images", "prefix", "model", "limit", "batch_size", "device", "dtype", "quantize"),
    *("resume", "overwrite"),
)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("questions", nargs="?", help="folder with a file per split")
    parser.add_argument("images", nargs="?", type=Path, help="folder of the images")
    parser.add_argument("--zoo", action="store_true", help="use the shipped scenes")
    parser.add_argument("--prefix", default="", help="prefix of the file names")
    parser.add_argument("--model", default="zoo:llava-scenes")
    parser.add_argument("--guide", action="append", help="see: mmdecode methods guide")
    parser.add_argument("--limit", type=int, help="maximum number of questions")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, help="folder for the report")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", choices=["int8"], help="round the weights; on a CPU only")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that it did not write"
    )
    args = parser.parse_args()
    if args.zoo == bool(args.questions and args.images):
        parser.error("give the folders of questions and of images, or --zoo")
    return args


def main():
    args = parse_args()
    report = evaluate(
        "pope",
        data="zoo" if args.zoo else args.questions,
        guide=args.guide or "vcd",
        sample=False,
        output=args.out,
        **{name: getattr(args, name) for name in OPTIONS},
    )
    print(report.table())
    for found in report.comparisons:
        print(found)
    if args.out:
        print(args.out / "report.html")


if __name__ == "__main__":
    run_script(main)
