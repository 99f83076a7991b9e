"""The server: speed, delays and overload of streams, and clients that vanish, stall or do harm.

    python benchmarks/serve.py --page docs/serve.md      # CPU, about an hour

Each part starts ``mmdecode serve`` in a process of its own; clients are in this one, on the same
machine. *Files*: files and questions, beside the same in this process. *Capacity*: streams at real
time. *Overload*: more of them than the machine can decode, to the last word. *Vanish*: clients that
go in the middle. *Slow*: clients that do not read. *Hostile*: uploads that are broken or made to do
harm. What must hold is checked, and the exit code is 1 if it does not. Modules: serve_process.py,
serve_files.py, serve_streams.py, serve_clients.py, serve_hostile.py and serve_uploads.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import serve_clients
import serve_files
import serve_hostile
import serve_streams
import torch
from pages import parsed, warn_if_busy, write_page, write_result
from serve_process import CHAT, DRAFT, MODEL
from serve_tables import missed, tables
from streaming import Speech, timed

from mmdecode.asr import Transcriber
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import load, machine
from mmdecode.runs.console import only_our_output
from mmdecode.vlm import Answerer
from mmdecode.zoo.speech import speech_test

HERE = Path(__file__).parent
PARTS = ["files", "capacity", "overload", "vanish", "slow", "hostile"]
OVERLOAD_S = 20.0
"""Most seconds of a stream of overload: the server takes 30 s before it holds a stream up."""


def parts(arguments: argparse.Namespace) -> dict[str, Callable[[], Iterable[dict[str, Any]]]]:
    """Functions that yield the rows of each part."""
    ours = Transcriber.from_pretrained(MODEL, draft=DRAFT, device="cpu")
    clips, threads, seed = speech_test()[: arguments.limit], arguments.threads, arguments.seed
    shortest = min(clips, key=lambda clip: clip.duration_s)
    speech = [Speech(clip.samples(), clip.text) for clip in clips]

    def streams(counts: list[int], seconds: float) -> Iterable[dict[str, Any]]:
        timer = ours.with_options(word_timestamps="ctc")
        ends = [timed(timer, one) for one in speech]
        return serve_streams.measure(ours, speech, ends, counts, seconds, threads, seed)

    def files() -> Iterable[dict[str, Any]]:
        answerer = Answerer.from_pretrained(CHAT, device="cpu")
        clients, repeats = arguments.clients, arguments.repeats
        return serve_files.measure(ours, answerer, clips, clients, repeats, threads)

    def scene() -> tuple[str, Any, bytes]:
        [found] = serve_files.scenes(1)
        return found

    return {
        "files": files,
        "capacity": lambda: streams(arguments.streams, arguments.seconds),
        "overload": lambda: streams([max(arguments.streams)], min(arguments.seconds, OVERLOAD_S)),
        "vanish": lambda: serve_clients.vanish(ours, clips, 20, arguments.requests, threads, seed),
        "slow": lambda: serve_clients.slow(
            ours, clips, scene()[::2], arguments.readers, arguments.patience, threads
        ),
        "hostile": lambda: serve_hostile.measure(
            ours, shortest, scene()[1], arguments.uploads, threads, seed
        ),
    }


def run(arguments: argparse.Namespace) -> Path:
    """Measures, and writes after each part."""
    torch.set_num_threads(arguments.threads)
    facts = machine(torch.device("cpu"), "float32")
    facts |= {
        "command": "python benchmarks/serve.py",
        "model": MODEL,
        "draft": DRAFT,
        "chat_model": CHAT,
        "threads": arguments.threads,
        "seed": arguments.seed,
    }
    print(json.dumps(facts, indent=2))
    warn_if_busy(facts)
    result: dict[str, Any] = {"machine": facts, "parts": {}}
    if arguments.onto:
        result["parts"] = json.loads(arguments.onto.read_text())["parts"]
    torch_version = torch.__version__.split("+")[0]
    path = arguments.out / f"serve-cpu-torch{torch_version}-{facts['date']}.json"
    for part, measure in parts(arguments).items():
        if part not in arguments.parts:
            continue
        rows, before, began = list[dict[str, Any]](), load(), time.perf_counter()
        for row in measure():
            print(part, json.dumps(row), flush=True)
            rows.append(row)
        took_s = round(time.perf_counter() - began, 1)
        own = {"rows": rows, "load": [before, load()], "took_s": took_s, "date": facts["date"]}
        result["parts"] = {name: result["parts"].get(name) for name in PARTS} | {part: own}
        result["parts"] = {name: found for name, found in result["parts"].items() if found}
        write_result(path, result, indent=None)
    return path


def main() -> None:
    """Measures, and shows the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, help="clips; all without it")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], help="of files")
    parser.add_argument("--repeats", type=int, default=8, help="how often a clip is sent")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 64])
    parser.add_argument("--seconds", type=float, default=120.0, help="audio of each stream")
    parser.add_argument("--requests", type=int, default=500, help="of clients that vanish")
    parser.add_argument("--readers", type=int, default=32, help="clients that do not read")
    parser.add_argument("--patience", type=float, default=150.0, help="how long they do not, in s")
    parser.add_argument("--uploads", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--onto", type=Path, help="earlier result, whose other parts stay")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    parser.add_argument("--result", type=Path, help="show this earlier result, measure nothing")
    arguments = parsed(parser)
    only_our_output()
    path = arguments.result or run(arguments)
    result = json.loads(path.read_text())
    shown = tables(result, path.name)
    print(f"\n{shown}\n\nwritten: {path}")
    if arguments.page:
        write_page(arguments.page, shown)
    if failed := missed(result):
        print("\n".join(["MISSED:", *failed]), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
