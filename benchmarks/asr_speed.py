"""Decode time of Whisper: plain generate, our undrafted loop, Medusa, transformers' own drafting.

    python benchmarks/asr_speed.py                      # zoo model, CPU, batch 1 and 8, ~8 minutes
    python benchmarks/asr_speed.py --device cuda --dtype float16

One run, interleaved, the same weights and windows for all. Token ids are compared first: an exact
method whose ids differ gets no time. Decode time leaves the encoder out: it is measured apart and
subtracted from ``generate``, which cannot be entered behind it. Medians over repeats; generate is
timed twice, and a ratio means nothing within the spread of that control. A model this small may be
faster on one CPU thread than on two, and not in every engine: all are timed on each number of
threads, and the last table compares every engine at its best. The load of the machine is printed;
close everything else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import statistics
from functools import partial
from pathlib import Path

import torch
from speech import clean, encode, engine, windows
from stopwatch import interleaved, machine, warn_if_busy
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from mmdecode.checkpoints import local_path
from mmdecode.draft.medusa import Medusa
from mmdecode.engine.decoder import Decoder

HERE = Path(__file__).parent


def stock(model, timestamps, **options):
    """transformers' generate, encoder included."""
    call = {"do_sample": False, "num_beams": 1, "return_timestamps": timestamps}
    if getattr(model.generation_config, "is_multilingual", False):
        call |= {"language": "en", "task": "transcribe"}

    return partial(model.generate, **call, **options)


def measure(model, features, batch, timestamps, engines, repeats):
    """Seconds per engine and repeat, tokens, and whether ids agree with the first engine."""
    chunks = [c for c in features.split(batch) if len(c) == batch]
    audio = [encode(model, chunk) for chunk in chunks]
    calls = {"encoder": lambda item, repeat: encode(model, chunks[item])}
    for name, run in engines.items():
        given = chunks if through_generate(name) else audio
        calls[name] = partial(lambda run, given, item, repeat: run(given[item]), run, given)
    _, found = interleaved(calls, len(chunks), 1, features.device)  # a warm-up
    seconds, _ = interleaved(calls, len(chunks), repeats, features.device)
    ids = {name: [row for out in found[name] for row in clean(out, model)] for name in engines}
    first = next(iter(ids.values()))
    tokens = sum(len(row) + 1 for row in first)
    same = {name: rows == first for name, rows in ids.items()}
    return {name: [*map(sum, rows)] for name, rows in seconds.items()}, tokens, same, len(chunks)


def through_generate(name):
    """Whether an engine is transformers', which runs the encoder too."""
    return name.startswith(("generate", "assisted"))


def show(rows):
    """Prints one case, and writes what each engine gains into its row."""
    times = {row["engine"]: row["decode_s"] for row in rows}
    for row in rows:
        if row["decode_s"] is None:
            print(f"  {row['engine']:20s} ids differ: no time is reported")
            continue
        for other in ("generate", "undrafted"):
            base = times.get(other)
            row[f"over_{other}"] = round(base / row["decode_s"], 3) if base else math.nan
        length = row.get("tokens_per_pass")
        print(
            f"  {row['engine']:20s} {row['ms_per_token_row']:7.2f} ms/token  "
            f"x{row['over_generate']:.2f} generate  x{row['over_undrafted']:.2f} undrafted  "
            f"{row['threads']} threads  encoder {100 * row['encoder_share']:.0f} %"
            + (f"  {length:.2f} tokens/pass" if length else "")
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="zoo:whisper-synth")
    parser.add_argument("--draft", default="zoo:whisper-synth-medusa")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--threads", default="1,2", help="CPU threads to try, comma-separated")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    threads = [int(n) for n in arguments.threads.split(",")]
    torch.set_num_threads(max(threads))
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    path = local_path(arguments.model)
    model = WhisperForConditionalGeneration.from_pretrained(path, dtype=dtype).to(device).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(path)
    features = windows(extractor, arguments.limit).to(device, dtype)
    if device.type == "cuda":
        threads = threads[:1]
    step_bytes = sum(p.numel() * p.element_size() for p in model.get_decoder().parameters())
    facts = machine(device, arguments.dtype)
    facts |= {
        "threads": threads,
        "model": arguments.model,
        "draft": arguments.draft,
        "decoder_megabytes_per_pass": round(step_bytes / 1e6, 1),
        "floor_ms_per_pass": round(step_bytes / 1e6 / facts["bandwidth_gb_per_s"], 2),
    }
    print(json.dumps(facts, indent=2))
    warn_if_busy(facts)

    rows = []
    cases = [(b, t) for b in map(int, arguments.batches.split(",")) for t in (False, True)]
    for count, (batch, timestamps) in itertools.product(threads, cases):
        torch.set_num_threads(count)
        plain, drafted = Decoder(), Decoder(draft=Medusa.from_pretrained(arguments.draft))
        engines = {
            "generate": stock(model, timestamps),
            "undrafted": engine(model, plain, timestamps),
            "medusa": engine(model, drafted, timestamps),
            "generate again": stock(model, timestamps),
        }
        if batch == 1:
            engines["assisted (lookup)"] = stock(model, timestamps, prompt_lookup_num_tokens=5)
        seconds, tokens, same, chunks = measure(
            model, features, batch, timestamps, engines, arguments.repeats
        )
        encoder_s = statistics.median(seconds["encoder"])
        print(
            f"\n{count} threads, batch {batch}, timestamps {timestamps}: {tokens} tokens, "
            f"{chunks} batches"
        )
        found = []
        for name in engines:
            spent = [s - (encoder_s if through_generate(name) else 0) for s in seconds[name]]
            decode = statistics.median(spent)
            row = {
                "threads": count,
                "batch": batch,
                "timestamps": timestamps,
                "engine": name,
                "identical": same[name],
                "decode_s": round(decode, 4) if same[name] else None,
                "ms_per_token_row": round(1e3 * decode * batch / tokens, 3) if same[name] else None,
                "spread": round(max(spent) / min(spent), 3),
                "encoder_share": round(encoder_s / (encoder_s + decode), 3),
                "tokens": tokens,
            }
            stats = {"undrafted": plain.stats, "medusa": drafted.stats}.get(name)
            if stats is not None:
                row["tokens_per_pass"] = round(stats.acceptance_length, 3)
            found.append(row)
        show(found)
        rows += found
    best = []
    for batch, timestamps in cases if len(threads) > 1 else []:
        print(f"\neach engine at its best, batch {batch}, timestamps {timestamps}")
        case = [r for r in rows if (r["batch"], r["timestamps"]) == (batch, timestamps)]
        chosen: dict[str, dict] = {}
        for row in case:
            other = chosen.get(row["engine"])
            if row["decode_s"] and (other is None or row["decode_s"] < other["decode_s"]):
                chosen[row["engine"]] = dict(row)
        show(list(chosen.values()))
        best += chosen.values()
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"asr-{device.type}-torch{torch.__version__.split('+')[0]}-{facts['date']}.json"
    (arguments.out / name).write_text(
        json.dumps({"machine": facts, "rows": rows, "best": best or rows}, indent=2) + "\n"
    )
    print(f"\nwritten: {arguments.out / name}")


if __name__ == "__main__":
    main()
