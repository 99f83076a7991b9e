"""Generate an image, remove a part, and complete it as another class.

    python image_ar/in_painting.py ring star --out filled

Writes four images: the generated one; its upper half continued as the same class, which gives the
same image; its upper half continued as the other class; and a hole in the middle filled in as the
other class. The last is locally constrained: a code does not depend on kept codes after it.
"""

import argparse
import io
from pathlib import Path

import torch

from mmdecode.errors import run_script
from mmdecode.image_ar import ImageGenerator
from mmdecode.image_ar.modes import MODES
from mmdecode.runs.files import refuse_foreign, write_file


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("first", help="a class or a prompt")
    parser.add_argument("second", help="another class or prompt")
    parser.add_argument("--out", type=Path, default=Path("filled"))
    parser.add_argument("--model", default="zoo:llamagen-scenes")
    parser.add_argument("--mode", choices=MODES, default="exact")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that it did not write"
    )
    return parser.parse_args()


def main():
    args = parse_args()
    names = ("drawn", "continued", "otherwise", "filled")
    refuse_foreign([args.out / f"{name}.png" for name in names], args.overwrite)
    generator = ImageGenerator.from_pretrained(
        args.model, mode=args.mode, seed=args.seed, device=args.device
    )
    generated = generator(args.first)
    rows, columns = generator.grid
    half = rows // 2 * columns
    hole = torch.ones(rows, columns, dtype=torch.bool)
    hole[rows // 4 : -(rows // 4), columns // 4 : -(columns // 4)] = False
    back = generator(args.first, start=generated.codes, known=half)
    other = generator(args.second, start=generated.codes, known=half)
    filled = generator(args.second, start=generated.codes, known=hole)
    for name, result in zip(names, (generated, back, other, filled), strict=True):
        path, data = args.out / f"{name}.png", io.BytesIO()
        result.image.save(data, "PNG")
        write_file(path, data.getvalue(), args.overwrite)
        given = int((result.commits < 0).sum())
        suffix = f", {given} codes given, {result.completion}" if given else ""
        print(f"{path}: {result.passes} passes{suffix}")
    print(f"continued as it was: {torch.equal(generated.codes, back.codes)}")


if __name__ == "__main__":
    run_script(main)
