"""Correct N-best lists in files with any language model; a stopped run can be resumed.

    python asr/correct_lists.py lists.jsonl --model zoo:lm-synth --out corrected
    python asr/correct_lists.py texts/results.jsonl --model my-corrector --out corrected --resume

Reads HyPoradise's formats, and what ``mmdecode transcribe --n-best 5 --out texts`` writes. The
folder gets ``corrected.jsonl``, a row per list: what is handed on, the first hypothesis, the
answer, why it was refused if it was, and how much the model prefers it. Answers are drafted from
the hypotheses, which changes no token. Expected: hundreds of short lists a minute on two CPU cores
with ``zoo:lm-synth``. It knows one little grammar: elsewhere nearly every answer is refused.

Lists that say what was said are better given to ``mmdecode evaluate nbest --corrector``, which
counts errors, next to oracles and methods without a model.
"""

import argparse
import hashlib
import json
from pathlib import Path

from mmdecode.asr import Correction, Corrector, EditGuard
from mmdecode.asr.correction.n_best_lists import read_lists
from mmdecode.errors import run_script
from mmdecode.runs.console import progress_bar
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
    lists, rows = read_lists(args.lists), args.out / "corrected.jsonl"
    options = {"copy_below": float("-inf")} if args.preferences else {}
    if args.distance is not None:
        options["guard"] = EditGuard(distance=args.distance)
    settings = {name: getattr(args, name) for name in ("model", "distance", "preferences")}
    settings["lists"] = hashlib.blake2b(args.lists.read_bytes(), digest_size=8).hexdigest()
    with claimed(args.out):
        journal = RowJournal(rows, read, lambda row: row.id, settings, args.resume, args.overwrite)
        todo = [one for one in lists if one.id not in journal.rows or journal.rows[one.id].error]
        if todo:
            options["batch_size"] = args.batch_size
            corrector = Corrector.from_pretrained(args.model, args.device, **options)
            with progress_bar() as bar:
                for found in bar.track(corrector.corrections(todo), len(todo), description="lists"):
                    journal.add(found)
        journal.close()
        journal.finish_with([journal.rows[one.id] for one in lists])
    found = journal.rows.values()
    counts = {"lists": len(lists), "resumed": len(lists) - len(todo)}
    counts |= {
        name: sum(bool(getattr(one, name)) for one in found) for name in ("edited", "refused")
    }
    counts["failed"] = sum(one.error is not None for one in found)
    shown = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(json.dumps(counts | {"file": str(rows)}) if args.json else f"{shown}; {rows}")
    raise SystemExit(1 if counts["failed"] else 0)


if __name__ == "__main__":
    run_script(main)
