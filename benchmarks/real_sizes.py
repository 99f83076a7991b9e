"""Our loop against ``generate`` at the sizes that people run: every speed claim is made here.

    python benchmarks/real_sizes.py --page docs/real_sizes.md  # CPU, an hour, nothing else runs
    python benchmarks/real_sizes.py --quick --parts host --only llava

Parts: ``prefill`` (memory and time of long prompts, by `size_prefill`), ``questions`` (several
about one image, by `size_questions`), ``sampling`` and
``processors`` at large vocabularies, ``host`` (undrafted loops of small models), by `size_steps`,
``images`` (image tokens, by `size_images`), ``arena`` (allocations and captures of the second call
of a shape, by `size_arena`).

Every row has a bar, and the paths that ran, by the decoder's own counter: a row that ran another
path than the one it names is missed, whatever its time. Weights are random but for the zoo's.

The load of the machine is printed at the start, with each row and at the end; close everything
else.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import size_arena
import size_images
import size_prefill
import size_questions
import size_rows
import size_steps
import torch
from pages import parsed, warn_if_busy, write_page, write_result
from size_rows import Row, line, warning

from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import load, machine
from mmdecode.runs.console import only_our_output

HERE = Path(__file__).parent
PARTS = {
    "prefill": "Long prompts",
    "questions": "Questions about one image",
    "sampling": "Sampling over a large vocabulary",
    "processors": "Processors that read the prefix",
    "host": "Undrafted loops of small models",
    "images": "Image tokens",
    "arena": "The second call of a shape",
}
"""Headings of the parts."""
MOST_REPEATS = {"prefill": 3, "questions": 3, "sampling": 3, "images": 2}
"""Repeats of parts whose calls take many seconds each."""
LEAST_REPEATS = {"host": 25}
"""Repeats of parts whose calls take little time, so that single ones say little."""


def rows_of(part: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of a part at the current number of threads."""
    tiny, quick = arguments.tiny, arguments.quick
    repeats = min(arguments.repeats, MOST_REPEATS.get(part, arguments.repeats))
    if not (tiny or quick):
        repeats = max(repeats, LEAST_REPEATS.get(part, repeats))
    batches = arguments.batch_size
    given: dict[str, Any] = {} if batches is None else {"batches": batches}
    if part == "prefill":
        yield from size_prefill.rows(tiny, repeats, arguments.only, arguments.limit_gb)
    elif part == "questions":
        yield from size_questions.rows(tiny, repeats, arguments.limit_gb)
    elif part == "sampling":
        yield from size_steps.sampling(tiny, repeats, **given)
    elif part == "processors":
        yield from size_steps.processors(tiny, repeats, new=24 if quick else 48)
    elif part == "host":
        yield from size_steps.host(tiny, repeats, only=arguments.only, **given)
        if not tiny:
            yield from size_images.zoo(repeats, only=arguments.only, **given)
    elif part == "images":
        side = 4 if tiny else min(8, arguments.grid) if quick else arguments.grid
        given |= {} if arguments.dtype is None else {"dtypes": arguments.dtype}
        yield from size_images.images(tiny, repeats, grid=side, **given)
    else:
        yield from size_arena.rows()


def measured(arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of the parts asked for; small models with each number of threads."""
    for part in arguments.parts:
        for threads in arguments.threads if part == "host" else [max(arguments.threads)]:
            torch.set_num_threads(threads)
            print(f"\n{PARTS[part]}, {threads} threads, load {load()}", flush=True)
            for found in rows_of(part, arguments):
                if arguments.only and arguments.only.lower() not in found["name"].lower():
                    continue
                print(line(found), flush=True)
                yield found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures, and writes the result file after each row; the page at the end."""
    torch.set_num_threads(max(arguments.threads))
    facts = machine(torch.device("cpu"), "float32 where no other is stated")
    facts["threads"] = arguments.threads
    print(f"load {facts['load_at_start']} at the start, threads {arguments.threads}")
    warn_if_busy(facts)
    version = facts["torch"].partition("+")[0]
    path = arguments.out / f"real-sizes-cpu-torch{version}-{facts['date']}.json"
    settings = {"parts": arguments.parts, "repeats": arguments.repeats, "quick": arguments.quick}
    result = {"machine": facts, "settings": settings, "warning": "", "rows": []}
    for found in measured(arguments):
        result["rows"].append(found)
        facts["load_at_end"] = load()
        loads = [facts["load_at_end"], *(found["load"] for found in result["rows"])]
        result["warning"] = warning(
            facts["load_at_start"], max(loads), max(arguments.threads), arguments.quick
        )
        write_result(path, result)
    missed = [found for found in result["rows"] if found["verdict"].startswith("missed")]
    print(f"\n{len(missed)} of {len(result['rows'])} rows missed; load {facts['load_at_end']}")
    if result["warning"]:
        print(f"WARNING: {result['warning']}")
    print(f"written: {path}")
    if arguments.page:
        write_page(arguments.page, tables(result, path.name))
    return result


def tables(result: Mapping[str, Any], name: str) -> str:
    """The page's tables."""
    return size_rows.tables(result, name, PARTS)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", metavar="NAME", help="rows whose name has this in it")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[2, 1], help="the most: all parts"
    )
    parser.add_argument("--batch-size", type=int, nargs="+", help="default: those of each part")
    parser.add_argument("--grid", type=int, default=24, help="side of an image, in tokens")
    parser.add_argument("--dtype", nargs="+", help="of image models; default: float32, bfloat16")
    parser.add_argument("--repeats", type=int, default=5, help="at most; long parts take fewer")
    parser.add_argument("--quick", action="store_true", help="two repeats, shorter outputs")
    parser.add_argument("--tiny", action="store_true", help="toys in all parts: tries the script")
    parser.add_argument("--limit-gb", type=float, default=12, help="most memory of a process")
    parser.add_argument("--json", action="store_true", help="the result as the last line")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="ours", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="Markdown whose tables are replaced")
    arguments = parsed(parser)
    only_our_output()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if arguments.child == size_questions.NAME:
        size_questions.main(arguments)
        return
    if arguments.child:
        size_prefill.main(arguments)
        return
    if arguments.quick:
        arguments.repeats = 2
    result = run(arguments)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    run_script(main)
