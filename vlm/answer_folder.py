"""Ask one question about each image of a folder, without and with a guide, side by side.

    python vlm/answer_folder.py pictures/ "Is there a ring in the image?" answers --guide vcd
    python vlm/answer_folder.py pictures/ "Is there a ring in the image?" answers --resume

Writes the answers into the folders ``plain`` and ``guided``, a line of ``results.jsonl`` each, and
prints both answers to each image. Takes some seconds for ten images of 64 pixels on two CPU cores.
A run that was stopped, by whatever, goes on with ``--resume``. Images that cannot be read are
listed at the end, and the exit code is then 1.

``mmdecode ask`` does this from the command line, with or without a guide.
"""

import argparse
from functools import partial
from pathlib import Path

from mmdecode.errors import run_script
from mmdecode.runs.distributed import shard_of
from mmdecode.runs.inputs import find_files
from mmdecode.runs.journal import RESULTS
from mmdecode.runs.tables import read_rows
from mmdecode.runs.work import run
from mmdecode.vlm import Answerer
from mmdecode.vlm.images import SUFFIXES
from mmdecode.vlm.jobs import AnswerFolder
from mmdecode.vlm.requests import asked_of


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="folder of images")
    parser.add_argument("question")
    parser.add_argument("out", type=Path, help="folder of the answers")
    parser.add_argument("--model", default="zoo:llava-scenes")
    parser.add_argument("--guide", default="vcd", help="see: mmdecode methods guide")
    parser.add_argument("--draft", help="see: mmdecode methods draft; answers stay as they are")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--resume", action="store_true", help="continue the run in OUT")
    parser.add_argument("--engine", default="local", help="local, processes or ray")
    parser.add_argument("--device")
    parser.add_argument("--overwrite", action="store_true", help="replace files of other programs")
    return parser.parse_args()


def answered(out, requests, guide, args):
    """Answers what has no answer yet, and returns all lines of the folder by id."""
    load = {"model_id": args.model, "draft": args.draft, "guide": guide}
    options = {"max_new_tokens": args.max_new_tokens}
    how = {name: getattr(args, name) for name in ("batch_size", "resume", "overwrite")}
    folder = AnswerFolder(out, load | options, requests, options, **how)
    loaded = partial(Answerer.from_pretrained, **load, device=args.device)
    run(folder, loaded, engine=args.engine, shard=shard_of(None))
    return {row["id"]: row for _, row in read_rows(out / RESULTS)}


def main():
    args = parse_args()
    requests = asked_of(find_files([args.folder], SUFFIXES, "image"), [args.question])
    plain = answered(args.out / "plain", requests, None, args)
    guided = answered(args.out / "guided", requests, args.guide, args)
    pairs = [(plain[one.id], guided[one.id]) for one in requests]
    good = [pair for pair in pairs if not any("error" in line for line in pair)]
    for one, other in good:
        print(f"{Path(one['images'][0]).name}: {one['text']!r} -> {other['text']!r}")
    print(f"{sum(a['text'] != b['text'] for a, b in good)} of {len(good)} answers changed")
    for _, line in (pair for pair in pairs if pair not in good):
        print(f"failed: {line['error']}")
    raise SystemExit(0 if len(good) == len(pairs) else 1)


if __name__ == "__main__":
    run_script(main)
