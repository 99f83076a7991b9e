"""Speech next to its peers: time, identity and memory of every engine in benchmarks/peers.py.

    python benchmarks/asr_speed.py --page docs/asr_speed.md     # CPU, a quarter of an hour
    python benchmarks/asr_speed.py --parts short --engines medusa
    python benchmarks/asr_speed.py --device cuda --dtype float16

Short form: one window each, batch 1, 8 and 32. One process, the same weights and windows for all,
interleaved batch by batch. Ids are compared first: an exact method whose ids differ gets no time;
CTranslate2 promises none and is shown with the share of windows that have the ids of ``generate``.
Decode time leaves the encoder out: it is measured apart, and subtracted from ``generate``. Medians
over repeats for each batch of windows; ``generate`` runs twice, and no ratio is known better than
that control. A model this small may be faster on one CPU thread than on two, and not in every
engine: all are timed on each number of threads and compared at their best.

Long form (`long_form_speed`): whole recordings. Memory (`peak_memory`): each engine in a process of
its own. What an absent package would run is left out, and named.

The load of the machine is printed at the start and at the end; close everything else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import long_form_speed
import peak_memory
import peers
import torch
from asr_tables import number, tables, wide_tables
from pages import SECTION, parsed, warn_if_busy, with_section, write_page, write_result
from peers import GENERATE, UNDRAFTED, Checkpoint, Engine, rows_of
from speech import clips, encode, windows
from widen import SHAPES, laid_out, write

from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import interleaved, load, machine
from mmdecode.runs.console import only_our_output

HERE = Path(__file__).parent
WARM = 4
"""Batches that each engine decodes before any count."""
PARTS = ("short", "long", "memory")
PAUSE = 0.3
"""Seconds between two calls of a widened model, in which the threads of the last engine, which wait
for more work on our cores, fall asleep. Calls of a small model are too many for it."""
SLOTS = 1500
"""Encoder slots of a widened model: those of half a minute."""
Case = tuple[int, bool]
"""Batch size, and whether timestamps are predicted."""


def reference_texts(checkpoint: Checkpoint, count: int) -> list[str] | None:
    """Reference texts of the windows; ``None`` where they ship without texts."""
    if find_spec("soundfile") is None:
        return None
    return [clip.text for clip, _ in clips(checkpoint.extractor, count)]


def measure(
    checkpoint: Checkpoint, features: torch.Tensor, case: Case, chosen: list[str], repeats: int
) -> list[dict[str, Any]]:
    """Every engine on every batch of windows; a row each."""
    batch, timestamps = case
    engines: dict[str, Engine] = {
        name: peers.MAKERS[name](checkpoint, timestamps)
        for name in peers.names(batch, checkpoint.device)
        if name in chosen
    }
    chunks = [chunk for chunk in features.split(batch) if len(chunk) == batch]
    encoders: dict[str, Any] = {"torch": partial(encode, checkpoint.model)}
    encoders |= {e.encoder: e.encode for e in engines.values() if e.encode is not None}
    states = {name: [run(chunk) for chunk in chunks] for name, run in encoders.items()}

    def encoding(run: Any, item: int, repeat: int) -> Any:
        return run(chunks[item])

    def decoding(engine: Engine, item: int, repeat: int) -> Any:
        return engine.decode(
            chunks[item] if engine.encode is None else states[engine.encoder][item]
        )

    calls: dict[str, Any] = {f"encoder {n}": partial(encoding, run) for n, run in encoders.items()}
    calls |= {name: partial(decoding, engine) for name, engine in engines.items()}
    if checkpoint.wide:
        firsts = {n: replace(e, decode=e.first) for n, e in engines.items() if e.first is not None}
        calls |= {f"first {name}": partial(decoding, first) for name, first in firsts.items()}
    interleaved(calls, min(WARM, len(chunks)), 1, features.device)
    for engine in engines.values():
        if engine.stats is not None:
            engine.stats.reset()
    pause = partial(time.sleep, PAUSE if checkpoint.wide else 0.0)
    seconds, results = interleaved(calls, len(chunks), repeats, features.device, pause)
    ids = {
        name: [row for one in results[name] for row in rows_of(one, checkpoint.settings)]
        for name in engines
    }
    texts = reference_texts(checkpoint, len(chunks) * batch)
    rows = []
    for name, engine in engines.items():
        encoder = seconds[f"encoder {engine.encoder}"]
        row = timing(seconds[name], encoder, engine.encode is None)
        once = ids[name][: len(chunks) * batch]
        tokens = sum(len(line) + 1 for line in once)
        same = [mine == theirs for mine, theirs in zip(ids[name], ids[GENERATE], strict=True)]
        kept = engine.as_of not in ids or ids[name] == ids[engine.as_of]
        row |= {
            "threads": checkpoint.threads,
            "batch": batch,
            "timestamps": timestamps,
            "engine": name,
            "exact": engine.as_of is not None,
            "identical_share": round(sum(same) / len(same), 4),
            "wer": peers.word_errors(checkpoint, texts, once),
            "ms_per_token_row": round(1e3 * row["decode_s"] * batch / tokens, 3),
            "tokens": tokens,
            "windows": len(once),
            "tokens_per_pass": engine.stats and round(engine.stats.acceptance_length, 3),
        }
        if f"first {name}" in seconds:
            first = timing(seconds[f"first {name}"], encoder, engine.encode is None)["decode_s"]
            row["first_s"] = first
        if not kept:
            row |= {"decode_s": None, "ms_per_token_row": None}
        rows.append(row)
    return rows


def timing(
    spent: list[list[float]], encoder: list[list[float]], whole: bool
) -> dict[str, float | None]:
    """Seconds of decoding all batches once, their spread over repeats, and the encoder's share.

    Args:
        spent: By repeat and batch.
        encoder: The same of the encoder.
        whole: Whether the engine ran the encoder too.
    """
    encoder_s = sum(map(statistics.median, zip(*encoder, strict=True)))
    less = encoder_s if whole else 0.0
    decode = sum(map(statistics.median, zip(*spent, strict=True))) - less
    repeats = [sum(repeat) - less for repeat in spent]
    return {
        "decode_s": round(decode, 4),
        "encoder_s": round(encoder_s, 4),
        "encoder_share": round(encoder_s / (encoder_s + decode), 3),
        "spread": round(max(repeats) / min(repeats), 3),
    }


def compare(rows: list[dict[str, Any]]) -> None:
    """Prints one case, and writes what each engine gains, per token, into its row."""
    times = {row["engine"]: row["ms_per_token_row"] for row in rows}
    for row in rows:
        for other in (GENERATE, UNDRAFTED):
            base, own = times.get(other), row["ms_per_token_row"]
            row[f"over_{other}"] = round(base / own, 3) if base and own else None
        if row["ms_per_token_row"] is None:
            print(f"  {row['engine']:20s} ids differ: no time is reported")
            continue
        length = row["tokens_per_pass"]
        print(
            f"  {row['engine']:20s} {row['ms_per_token_row']:7.2f} ms/token  "
            f"x{number(row['over_generate'])} generate  x{number(row['over_undrafted'])} undrafted"
            f"  {row['threads']} threads  encoder {100 * row['encoder_share']:.0f} %  "
            f"{100 * row['identical_share']:.0f} % identical"
            + (f"  {length:.2f} tokens/pass" if length else "")
        )


def best_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each engine at its best number of threads; rows are copies."""
    chosen: dict[str, dict[str, Any]] = {}
    for row in rows:
        other = chosen.get(row["engine"])
        times = [r and r["ms_per_token_row"] for r in (row, other)]
        if other is None or (times[0] and (not times[1] or times[0] < times[1])):
            chosen[row["engine"]] = dict(row)
    return list(chosen.values())


def short_form(
    checkpoint: Checkpoint,
    chosen: list[str],
    threads: list[int],
    batches: list[int],
    limit: int,
    repeats: int,
) -> dict[str, Any]:
    """All cases on all numbers of threads."""
    rows, best = [], []
    cases = list(itertools.product(batches, (False, True)))
    features = windows(checkpoint.extractor, max(limit, *batches))
    if checkpoint.wide:
        features = laid_out(features, checkpoint.settings.config)
    features = features.to(checkpoint.device, checkpoint.dtype)
    for count, case in itertools.product(threads, cases):
        torch.set_num_threads(count)
        checkpoint.threads = count
        print(f"\n{count} threads, batch {case[0]}, timestamps {case[1]}", flush=True)
        found = measure(checkpoint, features[: max(limit, case[0])], case, chosen, repeats)
        compare(found)
        rows += found
    for case in cases:
        found = best_of([r for r in rows if (r["batch"], r["timestamps"]) == case])
        if len(threads) > 1:
            print(f"\neach engine at its best, batch {case[0]}, timestamps {case[1]}")
            compare(found)
        best += found
    return {"rows": rows, "best": best}


def run(arguments: argparse.Namespace, folder: Path) -> Path:
    """Measures everything and writes one file; converted weights lie in ``folder`` meanwhile."""
    threads = [int(n) for n in arguments.threads.split(",")]
    batches = [int(n) for n in arguments.batch_size.split(",")]
    device = torch.device(arguments.device)
    if device.type == "cuda":
        threads = threads[:1]
    torch.set_num_threads(max(threads))
    dtype = getattr(torch, arguments.dtype)
    model, draft, notes = arguments.model, arguments.draft, ()
    if arguments.width:
        wide = folder / "wide"
        plan = write(model, draft, replace(SHAPES[arguments.width], slots=SLOTS), wide)
        model, draft, notes = str(wide), str(wide / "medusa"), plan.notes
    checkpoint = Checkpoint(
        model, draft, device, dtype, folder=folder / "converted", wide=bool(arguments.width)
    )
    decoder = checkpoint.model.get_decoder()
    step_bytes = sum(p.numel() * p.element_size() for p in decoder.parameters())
    facts = machine(device, arguments.dtype)
    facts |= {
        "command": "python benchmarks/asr_speed.py"
        + (f" --width {arguments.width}" if arguments.width else ""),
        "threads": threads,
        "repeats": arguments.repeats,
        "model": arguments.model,
        "draft": arguments.draft,
        "windows": arguments.limit,
        "width": arguments.width,
        "notes": [*notes],
        "decoder_megabytes_per_pass": round(step_bytes / 1e6, 1),
        "floor_ms_per_pass": round(step_bytes / 1e6 / facts["bandwidth_gb_per_s"], 2),
        "ctranslate2": peers.version("ctranslate2"),
    }
    print(json.dumps(facts, indent=2))
    warn_if_busy(facts)
    usual = [name for name in peers.MAKERS if name not in peers.ASKED_FOR]
    chosen = [GENERATE, *arguments.engines] if arguments.engines else usual
    if "torchao int8" in chosen and find_spec("torchao") is None:
        print("torchao int8 is left out: torchao is not installed")
    if not peers.has_ctranslate2(device):
        print("CTranslate2 is left out: it is not installed, or this is not a CPU")
    result: dict[str, Any] = {"machine": facts}
    if "short" in arguments.parts:
        result |= short_form(
            checkpoint, chosen, threads, batches, arguments.limit, arguments.repeats
        )
    if "long" in arguments.parts:
        if find_spec("soundfile") is None:
            print("\nlong form is left out: reading recordings needs soundfile")
        else:
            result["long"] = long_form_speed.measure(
                checkpoint,
                chosen,
                threads,
                arguments.recordings,
                arguments.seconds,
                arguments.repeats,
            )
    if "memory" in arguments.parts:
        result["memory"] = peak_memory.measure(checkpoint, chosen, batches)
    facts |= {"load_at_end": load(), "weights_mb": checkpoint.megabytes()}
    shape = f"asr-{arguments.width}" if arguments.width else "asr"
    packages = f"{device.type}-torch{torch.__version__.split('+')[0]}"
    name = f"{with_section(shape, arguments.section)}-{packages}-{facts['date']}.json"
    write_result(arguments.out / name, result)
    return arguments.out / name


def main() -> None:
    """Command line: measures and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="zoo:whisper-synth")
    parser.add_argument("--draft", default="zoo:whisper-synth-medusa", help="Medusa heads")
    parser.add_argument(
        "--width", choices=SHAPES, help="widen model and heads to this shape; no long form"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    parser.add_argument(
        "--engines", nargs="+", choices=peers.MAKERS, help="these only, beside generate"
    )
    parser.add_argument("--batch-size", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--limit", type=int, default=16, help="windows; a larger batch takes more, noisy ones too"
    )
    parser.add_argument("--recordings", type=int, default=8, help="of the long form")
    parser.add_argument("--seconds", type=float, default=20, help="of each recording, about")
    parser.add_argument("--threads", default="1,2", help="CPU threads to try, comma-separated")
    parser.add_argument("--quick", action="store_true", help="a smoke test of all parts")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    parser.add_argument("--section", default=SECTION, help="between these marks of the page")
    parser.add_argument("--result", type=Path, help="show this earlier result, measure nothing")
    arguments = parsed(parser)
    if arguments.width:  # a Transcriber cannot feed a wide model
        arguments.parts = [part for part in arguments.parts if part != "long"]
    if arguments.quick:
        small = {"batch_size": "1,2", "repeats": 1, "limit": 2, "threads": "1"}
        vars(arguments).update(small | {"recordings": 2, "seconds": 12})
    only_our_output()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.result or run(arguments, Path(folder))
    result = json.loads(path.read_text())
    shown = (wide_tables if result["machine"].get("width") else tables)(result, path.name)
    print(f"\n{shown}\n\nwritten: {path}")
    if arguments.page:
        write_page(arguments.page, shown, arguments.section)


if __name__ == "__main__":
    run_script(main)
