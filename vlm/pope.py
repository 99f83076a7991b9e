"""POPE on your own images: evaluate whether a guide reduces object hallucination.

    python vlm/pope.py pope/coco val2014/ --model llava-hf/llava-1.5-7b-hf --guide vcd --out run
    python vlm/pope.py --zoo --guide vcd --guide ritual --limit 60

The first argument is a folder with POPE's files, one per split (``coco_pope_random.json`` and so
on; of github.com/AoiDragon/POPE, the folder ``output/coco``), the second the folder of the images
that they name (``COCO_val2014_000000310196.jpg``). ``--zoo`` uses the shipped scenes instead, which
takes some seconds for 60 questions on two CPU cores. Prints a row per mode and split, for guides
and controls, and the answers that differ from the plain model shifted to the same yes-ratio. A
guide that does not beat that row only changes how often the model says yes.

``mmdecode evaluate pope`` does the same from the command line; it can be resumed, and samples with
several seeds.
"""

import argparse
from pathlib import Path

from mmdecode.errors import run_script
from mmdecode.evaluation import YesNoReport
from mmdecode.evaluation.vision.benchmarks import read_questions
from mmdecode.evaluation.vision.data import ZOO
from mmdecode.evaluation.vision.items import ITEMS
from mmdecode.evaluation.vision.modes import comparisons_of, modes_of
from mmdecode.evaluation.vision.runs import Recorder
from mmdecode.runs.rows import refuse_taken
from mmdecode.vlm.loading import load


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
    parser.add_argument("--device")
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
    if args.out:
        refuse_taken(args.out, ITEMS, resume=False, overwrite=args.overwrite, resumable=False)
    source = (ZOO,) if args.zoo else (args.questions,)
    data = read_questions("pope", source, images=args.images, prefix=args.prefix)
    data = data.limited(args.limit)
    data.check_images()
    modes = modes_of(args.guide or ["vcd"])
    model, processor = load(args.model, args.device, args.dtype, quantize=args.quantize)
    recorder = Recorder(model, processor, data.items, modes, data.image, batch_size=args.batch_size)
    report = YesNoReport(
        recorder.run(),
        task="pope",
        against=comparisons_of(modes),
        controls=[mode.name for mode in modes if mode.control],
        conditions={"limit": args.limit},
        images=data.report_images,
    )
    print(report.table())
    for found in report.comparisons:
        print(found)
    if args.out:
        for path in report.save(args.out, args.overwrite):
            print(path)


if __name__ == "__main__":
    run_script(main)
