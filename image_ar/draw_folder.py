"""Generate the images of a file of classes or prompts into a folder.

    python image_ar/draw_folder.py wanted.txt pictures --mode exact

The file has a class or a prompt on each line. Prints a line per image with its passes; images that
fail are listed at the end, and the exit code is then 1.

``mmdecode generate-image --prompts`` can be resumed, and writes the settings into every PNG.
"""

import argparse
import io
from pathlib import Path

from mmdecode.errors import run_script
from mmdecode.image_ar import ImageGenerator
from mmdecode.image_ar.modes import MODES
from mmdecode.runs.files import refuse_foreign, write_file


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wanted", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", "--count", type=int, default=1, help="images per line")
    parser.add_argument("--model", default="zoo:llamagen-scenes")
    parser.add_argument("--mode", choices=MODES, default="exact")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8)
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
    generator = ImageGenerator.from_pretrained(
        args.model, mode=args.mode, seed=args.seed, batch=args.batch_size, device=args.device
    )
    requests = generator.requests(wanted, args.count)
    paths = [args.folder / f"{number:04d}.png" for number in range(len(requests))]
    refuse_foreign(paths, args.overwrite)
    failed = []
    for image in generator.images(requests):
        if image.error:
            failed.append(image)
            continue
        path, data = paths[image.index], io.BytesIO()
        image.image.save(data, "PNG")
        write_file(path, data.getvalue(), args.overwrite)
        print(
            f"{path}: {image.label or image.condition}, {image.passes} passes for "
            f"{len(image.tokens)} tokens, guarantee: {image.guarantee}"
        )
    for image in failed:
        print(f"failed: {image.condition}: {image.error}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    run_script(main)
