"""A recogniser and a language model of your own: fit temperatures, keep them, correct a folder.

    python asr/fuse_with_llm.py development.jsonl recordings/ --out corrected
    python asr/fuse_with_llm.py development.jsonl recordings/ --out corrected --method shallow
      --model openai/whisper-small --language en --language-model my-corrector

The first argument is a manifest of recordings with texts (``{"audio": ..., "text": ...}`` a line)
that neither model was trained on, each no longer than a window. Both models are read on what was
said there, and get the temperature at which they are as sure as they are right
(``temperatures.json``; where it is there already, it is used). Then the folder is corrected, and
``words.html`` shows who decided each word; ``results.jsonl`` has them as data. Expected: two
temperatures between 0.1 and 10, then a line per recording; half a minute for six short recordings
to fit by and six to correct, with the models of the zoo on two CPU cores. The zoo's language model
is a toy that shows how it works, and no gain.

With temperatures at hand, ``mmdecode transcribe --correct`` does the rest; the command is printed.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np

from mmdecode import registry
from mmdecode.asr import Failure, TranscribeOptions, Transcriber
from mmdecode.asr.audio.reading import SUFFIXES, blocks
from mmdecode.asr.correction.calibration import calibrate
from mmdecode.asr.correction.fusion import Acoustic
from mmdecode.asr.correction.n_best_lists import lists_of
from mmdecode.asr.output.manifest import opened, read_manifest
from mmdecode.errors import run_script
from mmdecode.evaluation.speech.correction_page import CorrectedText, CorrectedTexts
from mmdecode.guide.fusion import Given
from mmdecode.runs.files import (
    append_line,
    marked_json,
    open_append,
    refuse_foreign,
    to_json,
    write_file,
)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("development", type=Path, help="manifest of recordings with texts")
    parser.add_argument("folder", type=Path, help="folder of recordings to correct")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="zoo:whisper-synth")
    parser.add_argument("--language", help="for a recogniser of several languages")
    parser.add_argument("--language-model", default="zoo:lm-synth")
    parser.add_argument("--method", default="uadf", choices=["uadf", "static", "shallow"])
    parser.add_argument("--limit", type=int, default=40, help="recordings to fit by")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device")
    parser.add_argument("--overwrite", action="store_true", help="files that are not its own")
    return parser.parse_args()


def fitted(hears, entries, args):
    """Temperatures that calibrate both models on the references."""
    sources = [opened(one) for one in entries]
    waves = [np.concatenate([*blocks(one, hears.sampling_rate)]) for one in sources]
    for one, wave in zip(entries, waves, strict=True):
        if len(wave) > hears.window_s * hears.sampling_rate:
            raise SystemExit(f"{one.id} is longer than a window; cut it to {hears.window_s:g} s")
    kind = hears.recognizer
    prompt = tuple(kind.prompt(kind.language_of(sources[0]), ()))
    features = kind.features(waves)
    lists, audio = [], []
    for one, found, own in zip(entries, hears(waves, on_error="raise"), features, strict=True):
        for found_list in lists_of(found)[:1]:  # a silent recording has none
            lists.append(dataclasses.replace(found_list, id=one.id, reference=one.text))
            audio.append(Given(features=own, prompt=prompt))
    recogniser = Acoustic(model=hears.model, tokenizer=hears.processor.tokenizer)
    spec = f"{args.method}:model={args.language_model}"
    method = registry.create("correct", spec, recogniser=recogniser)
    return dataclasses.asdict(calibrate(method.corrector, lists, audio))


def main():
    args = parse_args()
    paths = sorted(p for p in args.folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not paths:
        raise SystemExit(f"no audio in {args.folder}")
    kept, rows, page = (
        args.out / name for name in ("temperatures.json", "results.jsonl", "words.html")
    )
    refuse_foreign([kept, rows, page], args.overwrite)
    options = {"language": args.language, "batch_size": args.batch_size}
    hears = Transcriber.from_pretrained(
        args.model, device=args.device, n_best=5, timestamps=False, **options
    )
    if not kept.exists():
        entries = read_manifest(args.development, args.limit, text=True)
        write_file(kept, marked_json(fitted(hears, entries, args)))
    heat = json.loads(kept.read_text(encoding="utf-8"))
    print(f"temperatures: {heat['main']:.3f} of {args.language_model}, ", end="")
    print(f"{heat['acoustic']:.3f} of {args.model}, from {heat['tokens']} tokens")

    spec = (
        f"{args.method}:model={args.language_model},main_temperature={heat['main']:.4g},"
        f"acoustic_temperature={heat['acoustic']:.4g}"
    )
    corrects = Transcriber(
        hears.model, hears.processor, options=TranscribeOptions(**options), correct=spec
    )
    texts, failed = [], 0
    write_file(rows, "", args.overwrite)
    with open_append(rows) as file:
        for found in corrects.stream(paths):
            append_line(file, to_json(dataclasses.asdict(found)).encode() + b"\n")
            name = Path(found.source).name
            if isinstance(found, Failure):
                failed += 1
                print(f"failed: {found.error}")
                continue
            texts.append(CorrectedText.of_transcript(found, audio=Path(found.source)))
            changed = (
                "" if found.uncorrected in (None, found.text) else f" (was: {found.uncorrected})"
            )
            print(f"{name}: {found.text}{changed}")
    shown = CorrectedTexts(texts).page({"model": args.model, "correct": spec})
    write_file(page, shown, args.overwrite)
    print(page)
    print(f"mmdecode transcribe {args.folder} --model {args.model} --correct {spec}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    run_script(main)
