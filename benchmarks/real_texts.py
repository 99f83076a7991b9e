"""Texts that `mmdecode transcribe` writes of real recordings: in float32, in int8, with a draft.

    python benchmarks/real_texts.py --page docs/real_speech.md      # a minute

The command line itself, three times over the same manifest. With int8 weights the text may be
another; with a draft it has to be the same again, token by token. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pages import parsed, table, write_page, write_result

from mmdecode.asr.output.manifest import read_manifest
from mmdecode.errors import MissingExtraError, run_script

HERE = Path(__file__).parent
NAME = "texts"
"""Name of the marks around the table."""
FLOAT, INT8 = "float32", "int8"


def ways(draft: str) -> dict[str, tuple[str, ...]]:
    """Options of each run, by name."""
    int8 = ("--quantize", "int8")
    return {FLOAT: (), INT8: int8, f"int8, {draft}": (*int8, "--draft", draft)}


def transcribed(model: str, data: str, options: tuple[str, ...]) -> list[dict[str, Any]]:
    """Lines of ``results.jsonl`` that the command writes, in the order of the manifest."""
    words = ["transcribe", "--data", data, "--model", model, "--device", "cpu", "--dtype", "fp32"]
    words += ["--batch-size", "1", *options]
    code = "from mmdecode.cli.app import main; main()"
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, *words, "--out", folder]
        environment = {**os.environ, "PYTHONPATH": paths}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        lines = (Path(folder) / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def word_errors(references: list[str], hypotheses: list[str]) -> list[int] | None:
    """Wrong words, and all words, after normalisation; ``None``: the extra is missing."""
    from mmdecode.evaluation.speech.wer import wer

    try:
        found = wer(references, hypotheses, resamples=1)
    except MissingExtraError:
        return None
    return [found.errors, found.words]


def measure(model: str, data: str, draft: str) -> dict[str, Any]:
    """Texts of all ways, clip by clip."""
    import torch
    import transformers

    clips = read_manifest(data, text=True)
    found = {}
    for name, options in ways(draft).items():
        print(name, flush=True)
        lines = {line["id"]: line for line in transcribed(model, data, options)}
        found[name] = [lines[clip.id] for clip in clips]
    texts = [clip.text or "" for clip in clips]
    last = found[f"int8, {draft}"]
    same = [a["tokens"] == b["tokens"] for a, b in zip(found[INT8], last, strict=True)]
    return {
        "model": model,
        "data": data,
        "draft": draft,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "same_tokens": sum(same),
        "word_errors": {
            name: word_errors(texts, [line["text"] for line in lines])
            for name, lines in found.items()
        },
        "rows": [
            {"clip": clip.id, "said": text} | {name: found[name][at]["text"] for name in found}
            for at, (clip, text) in enumerate(zip(clips, texts, strict=True))
        ],
    }


def tables(result: dict[str, Any], name: str) -> str:
    """The table of the page, and what follows from it."""
    rows, drafted = result["rows"], f"int8, {result['draft']}"
    header = ["clip", "said", FLOAT, INT8, f"int8, draft {result['draft']}"]
    lines = []
    for row in rows:
        repeated = {INT8: row[FLOAT], drafted: row[INT8]}
        cells = ["the same" if row[way] == repeated[way] else row[way] for way in repeated]
        lines.append([row["clip"], row["said"], row[FLOAT], *cells])
    same = f"{result['same_tokens']} of {len(rows)}"
    apart = sum(row[FLOAT] != row[INT8] for row in rows)
    wrong = [f"{way} {n[0]} of {n[1]}" for way, n in result["word_errors"].items() if n is not None]
    verdict = "" if result["same_tokens"] == len(rows) else " THEY HAVE TO BE THE SAME."
    return "\n\n".join(
        [
            f"`mmdecode transcribe --data {result['data']} --model {result['model']}`, with "
            f"`--quantize int8`, and with `--draft {result['draft']}` as well; torch "
            f"{result['torch']}, transformers {result['transformers']}, "
            f"`benchmarks/results/{name}`.",
            f"With int8 weights the text differs in {apart} of {len(rows)} clips from that in "
            f"float32. With a draft the tokens are those of int8 without one in {same}.{verdict}"
            + (f" Wrong words: {', '.join(wrong)}." if wrong else ""),
            table(header, lines),
        ]
    )


def main() -> None:
    """Command line: transcribes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="moonshine:tiny-en")
    parser.add_argument("--data", default="zoo:real-clips", help="a manifest")
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="write the table into this page")
    parser.add_argument("--result", type=Path, help="show this earlier result, run nothing")
    arguments = parsed(parser, NAME)
    path = arguments.result or arguments.out / "real-texts.json"
    if not arguments.result:
        write_result(path, measure(arguments.model, arguments.data, arguments.draft))
    shown = tables(json.loads(path.read_text(encoding="utf-8")), path.name)
    print(f"\n{shown}\n\nwritten: {path}")
    if arguments.page:
        write_page(arguments.page, shown, NAME)


if __name__ == "__main__":
    run_script(main)
