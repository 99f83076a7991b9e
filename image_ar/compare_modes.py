"""Generate images of the same seeds in every mode, and compare speed and results.

    python image_ar/compare_modes.py ring star -n 4

Prints a row per mode: tokens per pass, seconds per image (without decoding pixels, after a
warm-up), how many images are those of ``ar``, and bits per token under the guided distribution with
its spread over images. ``exact`` gives the images of ``ar``. ``fast`` has the same distribution,
which a few images can neither prove nor refute: `mmdecode.evaluation.images.samples` has tests for
that. ``relaxed`` has another distribution.
"""

import argparse
import math
from statistics import mean, stdev

import torch

from mmdecode.errors import run_script
from mmdecode.image_ar import ImageGenerator
from mmdecode.image_ar.loading import load
from mmdecode.image_ar.modes import MODES, decoder_of


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("conditions", nargs="+", help="classes or prompts")
    parser.add_argument("-n", "--count", type=int, default=2, help="images per condition")
    parser.add_argument("--model", default="zoo:llamagen-scenes")
    parser.add_argument("--guidance", type=float)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--device")
    return parser.parse_args()


def main():
    args = parse_args()
    model = load(args.model, args.device)
    print("| mode | guarantee | tokens per pass | seconds | as ar | bits per token |")
    print("|---|---|---|---|---|---|")
    plain = []
    for mode in MODES:
        generator = ImageGenerator(
            model,
            decoder_of(mode, None, "auto", adapter=model.adapter),
            guidance=args.guidance,
            temperature=args.temperature,
            batch=args.batch_size,
        )
        generator(args.conditions[0])  # warm-up
        images = generator(args.conditions, args.count, likelihood=True)
        plain = plain or images
        rate = (generator.tokens - 1) / mean(image.passes for image in images)
        same = sum(torch.equal(a.codes, b.codes) for a, b in zip(images, plain, strict=True))
        bits = [-i.log_likelihood / i.codes.numel() / math.log(2) for i in images]
        spread = f" ± {stdev(bits):.2f}" if len(bits) > 1 else ""
        print(
            f"| {mode} | {generator.guarantee} | {rate:.2f} "
            f"| {mean(i.seconds for i in images):.2f} "
            f"| {same} of {len(images)} | {mean(bits):.2f}{spread} |"
        )


if __name__ == "__main__":
    run_script(main)
