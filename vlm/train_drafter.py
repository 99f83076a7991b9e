"""Train a drafter for a model on your own questions and images, measure it, and answer with it.

    python vlm/train_drafter.py questions.jsonl --test others.jsonl --out my-drafter
    python vlm/train_drafter.py --steps 300 --limit 200 --out my-drafter

The first argument is a table as for ``mmdecode ask --data``; the model answers it itself, and the
drafter is trained to predict these answers. Without a table, rendered scenes are used: 200 of them
and 300 steps take some minutes on two CPU cores; 1,000 with 1,500 steps give a better drafter.
Started again with the same settings, a training is resumed.

Measured on held-out questions: tokens per pass (1 without a drafter), the share of passes that
accepted at least one, two, ... drafted tokens, and the time relative to decoding without a drafter.
The answers are those of the model alone, however good the drafter is. At the end one answer is
printed pass by pass, with drafted tokens in brackets.

``mmdecode train drafter`` and ``mmdecode bench vlm`` do the same with more options.
"""

import argparse
from pathlib import Path

from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.draft_speed import Setting, measure
from mmdecode.train.drafters.recipes import Options
from mmdecode.train.drafters.targets import Texts, scene_requests
from mmdecode.train.drafters.trainer import train
from mmdecode.train.loop import FitOptions
from mmdecode.vlm import Answerer
from mmdecode.vlm.requests import read_requests
from mmdecode.zoo.scene_sets import descriptions

KINDS = {
    "eagle": "eagle",
    "eagle3": "eagle",
    "vispec": "vispec",
    "dream": "dream",
    "flash": "flash",
}
"""Draft option of each kind of drafter."""


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
    answerer = Answerer.from_pretrained(args.model, device=args.device)
    build = answerer.prompts.read
    if args.questions:
        requests, tested = read_requests(args.questions, args.limit), read_requests(args.test, 8)
    else:
        requests, tested = scene_requests(args.limit or 1000), descriptions(8)
    fit = FitOptions(
        steps=args.steps, peak_rate=2e-3, weight_decay=0.01, every=max(args.steps // 10, 1)
    )
    options = Options(
        kind=args.kind,
        max_new_tokens=args.max_new_tokens,
        held_out=args.held_out,
        tested=0,  # measured below
        fit=fit,
    )
    card = train(Texts(answerer.model, build), requests, options, args.out / "state", args.out)
    print(f"{card['what']}, after {card['steps']} steps and {card['minutes']} minutes")

    name = KINDS[args.kind]
    drafts = {
        "lookup": "lookup:length=4",
        f"{name}, chain": f"{name}:path={args.out},length=4",
        f"{name}, tree": f"{name}:path={args.out},depth=4,top_k=4,nodes=16",
    }
    drafts = {
        way: registry.create("draft", spec, target=answerer.model) for way, spec in drafts.items()
    }
    setting = Setting(max_new_tokens=args.max_new_tokens)
    batches = [build([request]) for request in tested]
    for row in measure(answerer.model, batches, drafts, setting):
        depths = " ".join(f"{share:.2f}" for share in row.by_depth)
        print(
            f"{row.way:20s} {row.tokens_per_pass:.2f} tokens a pass ({depths}), "
            f"x{row.decode[0]:.2f} as fast, {row.identical:.0%} of the answers the same"
        )

    *_, draft = drafts.values()
    faster = Answerer(answerer.model, answerer.processor, Decoder(draft))
    [plain] = answerer.answers(tested[:1], max_new_tokens=args.max_new_tokens)
    [drafted] = faster.answers(tested[:1], max_new_tokens=args.max_new_tokens, trace=True)
    decode = answerer.processor.tokenizer.decode
    shown = []
    for turn in drafted.trace:
        ahead = turn.accepted[: turn.kept]
        own = [turn.decided] * (turn.kept > len(ahead))
        shown.append(f"[{decode(ahead)}]{decode(own)}" if ahead else decode(own))
    print(" |".join(shown))
    print(f"{drafted.passes} passes for {plain.passes}; the same: {drafted.text == plain.text}")


if __name__ == "__main__":
    run_script(main)
