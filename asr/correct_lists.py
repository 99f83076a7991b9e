"""Correct N-best lists in files with any language model; a stopped run can be resumed.

    python asr/correct_lists.py lists.jsonl --model zoo:lm-synth --out corrected
    python asr/correct_lists.py texts/results.jsonl --model my-corrector --out corrected --resume

Reads HyPoradise's formats, and what ``mmdecode transcribe --n-best 5 --out texts`` writes. The
folder gets ``corrected.jsonl``, a row per list as it comes: what is handed on, the first
hypothesis, the answer, why it was refused if it was, and how much the model prefers it. Answers
are drafted from the hypotheses, which changes no token. Expected: as many rows as lists; hundreds
of short lists a minute with ``zoo:lm-synth`` on two CPU cores. That model knows one little grammar,
so that on other texts nearly every answer is refused.

Lists that say what was said are better given to ``mmdecode evaluate nbest --corrector``, which
counts errors, next to oracles and methods without a model.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

from mmdecode.asr import Correction, Corrector, EditGuard
from mmdecode.asr.correction.n_best_lists import read_lists
from mmdecode.cli.progress import progress_bar
from mmdecode.errors import run_script
from mmdecode.runs.files import claimed, complete_lines
from mmdecode.runs.rows import RowJournal


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lists", type=Path)
    parser.add_argument("--model", default="zoo:lm-synth", help="a causal or seq2seq model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--distance", type=float, help="most word edits, as a share: 0 to 1")
    parser.add_argument("--preferences", action="store_true", help="costs a pass per edited list")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device")
    parser.add_argument("--json", action="store_true", help="print the counts as one object")
    parser.add_argument("--overwrite", action="store_true", help="replace files of other programs")
    return parser.parse_args()


def read(path):
    """Reads the corrections of an earlier run."""
    return [Correction(index=0, **json.loads(line)) for line in complete_lines(path)]


def main():
    args = parse_args()
    lists = read_lists(args.lists)
    options = {"batch_size": args.batch_size}
    if args.distance is not None:
        options["guard"] = EditGuard(distance=args.distance)
    if args.preferences:
        options["copy_below"] = float("-inf")
    digest = hashlib.blake2b(args.lists.read_bytes(), digest_size=8).hexdigest()
    settings = {"lists": digest} | {n: getattr(args, n) for n in ("model", "distance")}
    settings["preferences"] = args.preferences
    with claimed(args.out):
        rows = args.out / "corrected.jsonl"
        journal = RowJournal(rows, read, lambda row: row.id, settings, args.resume, args.overwrite)
        done = {name for name, found in journal.rows.items() if found.error is None}
        todo = [one for one in lists if one.id not in done]
        resumed = len(lists) - len(todo)
        if todo:
            corrector = Corrector.from_pretrained(args.model, args.device, **options)
            with progress_bar() as bar:
                task = bar.add_task(args.model, total=len(todo))
                for found in corrector.corrections(todo):
                    journal.add(found)
                    bar.advance(task)
        journal.close()
        journal.finish_with([journal.rows[one.id] for one in lists])
    found = journal.rows.values()
    counts = {
        "lists": len(lists),
        "resumed": resumed,
        "edited": sum(one.edited for one in found),
        "refused": sum(one.refused is not None for one in found),
        "failed": sum(one.error is not None for one in found),
        "file": str(rows),
    }
    if args.json:
        print(json.dumps(counts))
    else:
        print(f"{len(lists)} lists, {resumed} done before; ", end="")
        print(f"{counts['edited']} edited, {counts['refused']} refused, {counts['failed']} failed")
        print(rows)
    if counts["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
