"""Transcribe a folder into another, from Python; a run that was stopped goes on with ``--resume``.

    python asr/transcribe_batch.py tests/data/speech texts --draft lookup
    python asr/transcribe_batch.py tests/data/speech texts --draft lookup --resume

Writes a text file and subtitles for each recording, and a line of ``results.jsonl`` with all about
it; prints the texts, the decoder's tokens per pass and the time. Some seconds on two CPU cores. The
draft changes no text (``mmdecode bench asr`` measures what it saves). The clips are real speech,
which ``zoo:whisper-synth`` was not trained on, so the words are not to be expected;
``--model moonshine:tiny-en`` knows them, where it is installed. Recordings that cannot be read are
printed as failed, and the exit code is then 1.

``mmdecode transcribe`` does this from the command line, with more options.
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path

from mmdecode.asr import FALLBACK, TranscribeOptions, Transcriber
from mmdecode.asr.output.inputs import gathered
from mmdecode.asr.output.jobs import ResultFolder
from mmdecode.errors import run_script
from mmdecode.runs.distributed import shard_of
from mmdecode.runs.journal import RESULTS
from mmdecode.runs.tables import read_rows
from mmdecode.runs.work import run

FORMATS = ("txt", "srt")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="folder of recordings")
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--model", default="zoo:whisper-synth")
    parser.add_argument("--draft", help="see: mmdecode methods draft")
    parser.add_argument("--language", help="for a recogniser of several languages")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--fallback", action="store_true", help="Whisper's temperatures")
    parser.add_argument("--resume", action="store_true", help="continue the run in OUT")
    parser.add_argument("--engine", default="local", help="local, processes or ray")
    parser.add_argument("--device")
    parser.add_argument("--overwrite", action="store_true", help="replace files of other programs")
    return parser.parse_args()


def main():
    args = parse_args()
    options = {"language": args.language} | (FALLBACK if args.fallback else {})
    load = {"model_id": args.model, "draft": args.draft}
    settings = dataclasses.asdict(TranscribeOptions(**options)) | load
    del settings["batch_size"]  # it changes no text
    how = {name: getattr(args, name) for name in ("batch_size", "resume", "overwrite")}
    load = partial(Transcriber.from_pretrained, **load, device=args.device, **options)
    with gathered([args.folder]) as entries:
        folder = ResultFolder(args.out, settings, entries, FORMATS, **how)
        tally = run(folder, load, engine=args.engine, shard=shard_of(None))
    for _, line in read_rows(args.out / RESULTS):
        if "error" in line:
            print(f"failed: {line['error']}")
        else:
            print(f"{Path(line['source']).name} ({line['duration_s']:.1f} s): {line['text']}")
    print(f"{tally.audio_s:.1f} s of audio in {tally.wall_s:.1f} s")
    if tally.stats:  # not if all was done before
        print(f"{tally.stats['acceptance_length']:.2f} tokens per row and pass")
    raise SystemExit(0 if tally.fine else 1)


if __name__ == "__main__":
    run_script(main)
