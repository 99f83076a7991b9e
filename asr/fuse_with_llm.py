"""A recogniser and a language model of your own: fit temperatures, keep them, correct a folder.

    python asr/fuse_with_llm.py development.jsonl recordings/ --out corrected
    python asr/fuse_with_llm.py development.jsonl recordings/ --out corrected --method shallow
      --model openai/whisper-small --language en --language-model my-corrector

The first argument is a manifest of recordings with texts (``{"audio": ..., "text": ...}`` a line)
that neither model was trained on, each no longer than a window. Both models get the temperature at
which they are as sure as they are right there, kept in ``temperatures.json``. Then ``mmdecode
transcribe --correct`` corrects the folder; the command is printed. ``words.html`` shows who decided
each word. Half a minute for six short recordings to fit by and six to correct, with the zoo's
models on two CPU cores, which show how it works, and no gain.
"""

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

from mmdecode.asr import Transcriber
from mmdecode.asr.correction.calibration import calibrate_on
from mmdecode.asr.output.manifest import read_manifest
from mmdecode.errors import run_script
from mmdecode.runs.files import marked_json, refuse_foreign, write_file


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
    parser.add_argument("--device", default="auto")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--overwrite", action="store_true", help="files that are not its own")
    return parser.parse_args()


def main():
    args = parse_args()
    kept, spec = args.out / "temperatures.json", f"{args.method}:model={args.language_model}"
    refuse_foreign([kept], args.overwrite)
    if not kept.exists():
        options = {"language": args.language, "n_best": 5, "timestamps": False}
        transcriber = Transcriber.from_pretrained(args.model, device=args.device, **options)
        entries = read_manifest(args.development, args.limit, text=True)
        found = calibrate_on(transcriber, entries, spec)
        write_file(kept, marked_json(dataclasses.asdict(found)))
    heat = json.loads(kept.read_text(encoding="utf-8"))
    print(f"temperatures: {heat['main']:.3f} of {args.language_model}, ", end="")
    print(f"{heat['acoustic']:.3f} of {args.model}, from {heat['tokens']} tokens", flush=True)
    spec += f",main_temperature={heat['main']:.4g},acoustic_temperature={heat['acoustic']:.4g}"
    command = ["mmdecode", "transcribe", args.folder, "--out", args.out, "--format", "txt"]
    command += ["--correct", spec, "--report", args.out / "words.html"]
    command += ["--model", args.model, "--device", args.device]
    command += ["--language", args.language] if args.language else []
    command += [f"--{name}" for name in ("resume", "overwrite") if getattr(args, name)]
    words = [*map(str, command)]
    print(shlex.join(words), flush=True)
    raise SystemExit(subprocess.run([sys.executable, "-m", *words]).returncode)


if __name__ == "__main__":
    run_script(main)
