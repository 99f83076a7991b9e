"""Transcribe a folder with the library's Python interface, and measure what a draft saves.

    python asr/transcribe_batch.py tests/data/speech --draft lookup

Runs every recording twice, without and with the draft, checks that the text is the same, and prints
the text, the tokens per decoder pass and the wall times. About a minute on two CPU cores. Expected
with ``zoo:whisper-synth``: ``same text: True``; the clips are real speech, which that model was not
trained on, so the words are not to be expected. ``--model moonshine:tiny-en`` hears them, where it
is installed.

For files in, files out, ``mmdecode transcribe`` needs no script.
"""

import argparse
import time
from pathlib import Path

from mmdecode.asr import FALLBACK, Failure, Transcriber
from mmdecode.asr.audio.reading import SUFFIXES
from mmdecode.errors import run_script


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="zoo:whisper-synth")
    parser.add_argument("--draft", default="lookup", help="see: mmdecode methods draft")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--fallback", action="store_true", help="Whisper's temperatures")
    parser.add_argument("--device")
    return parser.parse_args()


def run(paths, args, draft):
    """Transcripts in order, seconds of work, and the decoder's counters."""
    transcriber = Transcriber.from_pretrained(
        args.model,
        draft=draft,
        device=args.device,
        batch_size=args.batch_size,
        **(FALLBACK if args.fallback else {}),
    )
    started = time.perf_counter()
    results = transcriber(paths)
    return results, time.perf_counter() - started, transcriber.stats


def main():
    args = parse_args()
    paths = sorted(p for p in args.folder.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not paths:
        raise SystemExit(f"no audio in {args.folder}")
    plain, plain_s, plain_stats = run(paths, args, None)
    drafted, drafted_s, stats = run(paths, args, args.draft)

    for one in drafted:
        if isinstance(one, Failure):
            print(f"failed: {one.error}")
        else:
            print(f"{Path(one.source).name} ({one.duration_s:.1f} s): {one.text}")
    audio_s = sum(one.duration_s for one in drafted if not isinstance(one, Failure))
    texts = [[getattr(one, "tokens", None) for one in results] for results in (plain, drafted)]
    print(f"same text: {texts[0] == texts[1]}")
    print(f"audio: {audio_s:.1f} s in {len(paths)} recordings")
    for name, seconds, counters in (
        ("plain", plain_s, plain_stats),
        (args.draft, drafted_s, stats),
    ):
        print(
            f"{name:>12}: {seconds:6.2f} s, {audio_s / seconds:6.1f} s of audio per second, "
            f"{counters.acceptance_length:.2f} tokens per row and pass"
        )


if __name__ == "__main__":
    run_script(main)
