"""Use a guide inside transformers' own pipeline, without subclassing or lasting changes to it.

    python vlm/pipeline.py picture.png "Is there a ring in the image?" --guide vcd

``mmdecode.attach`` gives the decoder access to the raw image of the pipeline; the decoder with the
guide is passed as ``generate_kwargs={"custom_generate": decoder}``. Prints the plain and the guided
answer, and ``as before: True`` if the pipeline is unchanged after the ``with`` block. Takes a
second on two CPU cores. Guides that change the question (icd, prompt_bias) need its text, which a
pipeline does not pass on: use ``mmdecode.vlm.Answerer`` for them.
"""

import argparse
from pathlib import Path

from PIL import Image
from transformers import pipeline

import mmdecode as mm
from mmdecode import registry
from mmdecode.errors import run_script
from mmdecode.vlm.loading import load


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("image", type=Path)
    parser.add_argument("question")
    parser.add_argument("--model", default="zoo:llava-scenes")
    parser.add_argument("--guide", default="vcd", help="see: mmdecode methods guide")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main():
    args = parse_args()
    model, processor = load(args.model, args.device, None)
    ask = pipeline("image-text-to-text", model=model, processor=processor)
    image_part = {"type": "image", "image": Image.open(args.image).convert("RGB")}
    content = [image_part, {"type": "text", "text": args.question}]
    messages = [{"role": "user", "content": content}]
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    def answer(**more):
        found = ask(text=messages, generate_kwargs={**options, **more}, return_full_text=False)
        return found[0]["generated_text"].strip()

    plain = answer()
    decoder = mm.Decoder(guide=registry.create("guide", args.guide, target=model), seed=0)
    with mm.attach(model):
        guided = answer(custom_generate=decoder)
    print(f"plain:  {plain}")
    print(f"guided: {guided}")
    print(f"as before: {answer() == plain}")


if __name__ == "__main__":
    run_script(main)
