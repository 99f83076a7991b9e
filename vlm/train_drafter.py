"""Train a drafter for a model on your own questions and images, measure it, and answer with it.

    python vlm/train_drafter.py questions.jsonl --test others.jsonl --out my-drafter
    python vlm/train_drafter.py --steps 300 --limit 200 --out my-drafter

The first argument is a table as for ``mmdecode ask --data``; the model answers it itself, and the
drafter is trained to predict these answers. Without a table, rendered scenes are used: 200 of them
and 300 steps take some minutes on two CPU cores; 1,000 with 1,500 steps give a better drafter.
Started again with the same settings, a training is resumed.

Measured on held-out questions: tokens per pass (1 without a drafter), and the time relative to
decoding without one. The answers are those of the model alone, however good the drafter is.
``mmdecode train drafter`` and ``mmdecode bench vlm`` do the same with more options.
"""

import argparse
from pathlib import Path

from mmdecode import registry
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.draft_speed import Setting, measure
from mmdecode.train.drafters.recipes import Options
from mmdecode.train.drafters.targets import SCENES
from mmdecode.train.drafters.trainer import train_from
from mmdecode.train.loop import FitOptions
from mmdecode.vlm import Answerer
from mmdecode.vlm.requests import read_requests
from mmdecode.zoo.scene_sets import descriptions

KINDS = {"eagle3": "eagle"} | {name: name for name in ("eagle", "vispec", "dream", "flash")}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("questions", nargs="?", help="a table; default: rendered scenes")
    parser.add_argument("--test", help="a table of held-out questions")
    parser.add_argument("--out", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--model", default="zoo:llava-scenes")
    parser.add_argument("--kind", default="eagle", choices=KINDS)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--limit", type=int, help="number of training questions")
    parser.add_argument("--held-out", type=int, default=32, help="of these, for early stopping")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--device")
    args = parser.parse_args()
    if (args.questions is None) != (args.test is None):
        parser.error("give a table to learn from and --test with another, or neither")
    return args


def main():
    args = parse_args()
    fit = FitOptions(
        steps=args.steps, peak_rate=2e-3, weight_decay=0.01, every=max(args.steps // 10, 1)
    )
    names = ("kind", "max_new_tokens", "held_out")
    options = Options(**{name: getattr(args, name) for name in names}, tested=0, fit=fit)
    where = {"limit": args.limit, "device": args.device}
    card = train_from(args.model, args.questions or SCENES, args.out, options, **where)
    print(f"{card['what']}, after {card['steps']} steps and {card['minutes']} minutes")

    answerer = Answerer.from_pretrained(args.model, device=args.device)
    tested = read_requests(args.test, 8) if args.test else descriptions(8)
    drafter = f"{KINDS[args.kind]}:path={args.out}"
    specs = {
        "lookup": "lookup:length=4",
        f"{args.kind}, chain": f"{drafter},length=4",
        f"{args.kind}, tree": f"{drafter},depth=4,top_k=4,nodes=16",
    }
    drafts = {way: registry.create("draft", s, target=answerer.model) for way, s in specs.items()}
    batches = [answerer.prompts.read([request]) for request in tested]
    setting = Setting(max_new_tokens=args.max_new_tokens)
    for row in measure(answerer.model, batches, drafts, setting):
        print(f"{row.way:20s} {row.tokens_per_pass:.2f} tokens a pass, ", end="")
        print(f"x{row.decode[0]:.2f} as fast, {row.identical:.0%} of the answers the same")


if __name__ == "__main__":
    run_script(main)
