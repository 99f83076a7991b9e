"""Punctuation with a fixed delay: F1 of marks, capitals and disfluencies, and time per word.

    python benchmarks/punctuation.py --page docs/punctuation.md  # minutes, needs debian-handbook

Texts are held out: paragraphs of the zoo's grammar, and sections of the Debian Administrator's
Handbook, fluent and with inserted disfluencies. Marks and capitals are taken away, words come one
by one. The references of the real clips that have marks are one more row.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pages import publish, table, warn_if_busy, write_result

from mmdecode.asr.streaming.finisher import TAGGER, Finisher
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import load, machine
from mmdecode.models.punctuation import CASES, DISFLUENCIES, MARKS, PunctuationTagger
from mmdecode.train.punctuation import (
    LabelledWord,
    disfluent,
    grammar_paragraphs,
    handbook,
    labelled,
)
from mmdecode.zoo.real_clips import all_clips

DELAYS: tuple[int | None, ...] = (0, 2, 5, None)
KINDS = {"marks": MARKS[1:], "case": CASES[1:], "disfluency": DISFLUENCIES[1:]}
LEAST = 200
"""Places of a label from which on its F1 is shown."""


def measured(
    tagger: PunctuationTagger, paragraphs: Sequence[Sequence[LabelledWord]], delay: int | None
) -> dict[str, Any]:
    """Counts of right, wrong and missed labels, and the time per word."""
    right, found, there = Counter[str](), Counter[str](), Counter[str]()
    words, began = 0, time.perf_counter()
    for paragraph in paragraphs:
        made = Finisher(tagger, delay)
        labels = made.push([f" {word.text}" for word in paragraph])
        labels += made.finish()
        words += len(paragraph)
        for word, label in zip(paragraph, labels, strict=False):
            shown = label.text.strip()
            case = (
                CASES[2]
                if shown.isupper() and len(shown.strip(".,?")) > 1
                else (CASES[1] if shown[:1].isupper() else CASES[0])
            )
            pairs = (
                (label.mark, MARKS[word.mark]),
                (case, CASES[word.case]),
                (label.disfluency, DISFLUENCIES[word.disfluency]),
            )
            for mine, theirs in pairs:
                right[mine] += mine == theirs
                found[mine] += 1
                there[theirs] += 1
    spent = time.perf_counter() - began
    row: dict[str, Any] = {"delay": delay, "words": words, "ms_per_word": 1000 * spent / words}
    for labels_ in KINDS.values():
        for label_ in labels_:
            total = found[label_] + there[label_]
            f1 = 2 * right[label_] / total if total else None
            row[label_] = {"places": there[label_], "f1": f1}
    return row


def run(arguments: argparse.Namespace) -> Path:
    """Measures everything and writes one file."""
    torch.set_num_threads(1)
    facts = machine(torch.device("cpu"), "float32")
    facts |= {"command": "python benchmarks/punctuation.py", "model": arguments.model}
    warn_if_busy(facts)
    tagger, rng = PunctuationTagger.from_pretrained(arguments.model), random.Random(5)
    prose, limit = handbook("test"), arguments.limit
    rng.shuffle(prose)
    texts = {
        "grammar": grammar_paragraphs(3 * limit, 77, "test"),
        "handbook": prose[:limit],
        "handbook, disfluent": [disfluent(one, rng) for one in prose[:limit]],
        "real clips": [
            words
            for clip in all_clips()
            if (words := labelled(clip.text)) and any(word.mark for word in words)
        ],
    }
    result: dict[str, Any] = {"machine": facts, "rows": []}
    for name, paragraphs in texts.items():
        for delay in DELAYS:
            row = {"texts": name} | measured(tagger, paragraphs, delay)
            print(row, flush=True)
            result["rows"].append(row)
    facts["load_at_end"] = load()
    path = arguments.out / f"punctuation-cpu-{facts['date']}.json"
    write_result(path, result, indent=None)
    return path


def cell(found: Mapping[str, Any]) -> str:
    """F1 of a label with its places; few places are shown in brackets."""
    if not found["places"]:
        return ""
    value = "" if found["f1"] is None else f"{100 * found['f1']:.0f}"
    shown = f"{value} ({found['places']})"
    return shown if found["places"] >= LEAST else f"[{shown}]"


def tables(result: Mapping[str, Any], name: str) -> str:
    """Tables of the page, from the result file called ``name``."""
    facts, labels = result["machine"], [label for kind in KINDS.values() for label in kind]
    names = {",": "comma", ".": "full stop", "?": "question mark", "first": "Capital",
             "upper": "CAPITALS"}  # fmt: skip
    rows = [
        [
            row["texts"], "sentence" if row["delay"] is None else str(row["delay"]),
            *(cell(row[label]) for label in labels), f"{row['ms_per_word']:.1f} ms",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    header = ["texts", "delay", *(names.get(label, label) for label in labels), "per word"]
    return "\n\n".join(
        [
            f"Written by `{facts['command']}` from `benchmarks/results/{name}`: {facts['model']}, "
            f"{facts['device']}, 1 thread, {facts['date']}; load {facts['load_at_start']} at the "
            f"start, {facts['load_at_end']} at the end. F1 in percent, with the number of places; "
            f"in brackets with fewer than {LEAST}.",
            table(header, rows),
        ]
    )


def main() -> None:
    """Measures, and shows the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=TAGGER, help="tagger")
    parser.add_argument(
        "--limit",
        type=int,
        default=300,
        help="paragraphs of prose; three times as many of the grammar",
    )
    publish(parser, run, tables)


if __name__ == "__main__":
    run_script(main)
