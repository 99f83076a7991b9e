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
import os
import platform
import statistics
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from stopwatch import bandwidth, timed
from transformers import GenerationConfig, StoppingCriteriaList, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mmdecode.asr.options import TranscribeOptions
from mmdecode.asr.prompts import processors
from mmdecode.checkpoints import local_path
from mmdecode.draft.medusa import Medusa
from mmdecode.engine.decoder import Decoder
from mmdecode.train.medusa import whisper_prompt

HERE = Path(__file__).parent


def windows(extractor, limit):
    """Features of the test clips that fit one window, ``(N, mel, frames)``."""
    try:
        import soundfile  # noqa: F401
    except ImportError:
        from safetensors.torch import load_file

        return load_file(HERE / "data" / "windows.safetensors")["features"].float()[:limit]
    from mmdecode.zoo.speech import speech_test

    longest = extractor.n_samples / extractor.sampling_rate
    clips = [clip for clip in speech_test() if clip.duration_s <= longest][:limit]
    waves = [clip.samples() for clip in clips]
    return extractor(waves, sampling_rate=16_000, return_tensors="pt").input_features


def engine(model, decoder, timestamps):
    """Our loop behind the encoder: ``audio (B, S, H)`` to token ids."""
    config = model.generation_config
    prompt = whisper_prompt(model, 1, int(timestamps)).to(model.device)
    width = prompt.shape[1]
    rules = processors(config, width, TranscribeOptions(timestamps=timestamps), 0.0)
    call = GenerationConfig(
        max_length=model.config.max_target_positions,
        do_sample=False,
        num_beams=1,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )

    def run(features, audio):
        ids = decoder(
            model,
            prompt.expand(len(audio), -1),
            logits_processor=rules,
            stopping_criteria=StoppingCriteriaList(),
            generation_config=call,
            encoder_outputs=BaseModelOutput(last_hidden_state=audio),
        )
        return ids[:, width:]

    return run


def stock(model, timestamps, **options):
    """transformers' generate, encoder included."""
    call = {"do_sample": False, "num_beams": 1, "return_timestamps": timestamps}
    if getattr(model.generation_config, "is_multilingual", False):
        call |= {"language": "en", "task": "transcribe"}

    def run(features, audio):
        return model.generate(features, **call, **options)

    return run


def clean(ids, model):
    """Rows up to the end-of-sequence token, prompts and padding cut."""
    eos = model.generation_config.eos_token_id
    rows = []
    for row in ids.tolist():
        rows.append(row[: row.index(eos)] if eos in row else row)
    return rows


def measure(model, features, batch, timestamps, engines, encoder, repeats):
    """Seconds per engine and repeat, tokens, and whether ids agree with the first engine."""
    chunks = [c for c in features.split(batch) if len(c) == batch]
    seconds = {name: [] for name in engines} | {"encoder": []}
    ids, tokens = {}, 0
    for repeat in range(repeats + 1):  # the first is a warm-up
        total = dict.fromkeys(seconds, 0.0)
        found = {name: [] for name in engines}
        for index, chunk in enumerate(chunks):
            spent, audio = timed(chunk.device, partial(encoder, chunk))
            total["encoder"] += spent
            first = (repeat + index) % len(engines)  # who follows whom must not matter
            for name in [*list(engines)[first:], *list(engines)[:first]]:
                spent, out = timed(chunk.device, partial(engines[name], chunk, audio))
                total[name] += spent
                found[name] += clean(out, model)
        if repeat == 0:
            ids, tokens = found, sum(len(row) + 1 for row in next(iter(found.values())))
            continue
        for name, spent in total.items():
            seconds[name].append(spent)
    first = next(iter(ids))
    same = {name: rows == ids[first] for name, rows in ids.items()}
    return seconds, tokens, same, len(chunks)


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
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)
    features = windows(extractor, arguments.limit).to(device, dtype)
    if device.type == "cuda":
        threads = threads[:1]
    speed = bandwidth(device)
    step_bytes = sum(p.numel() * p.element_size() for p in model.get_decoder().parameters())
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    machine = {
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "dtype": arguments.dtype,
        "threads": threads,
        "cores": os.cpu_count(),
        "load_at_start": round(load, 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": arguments.model,
        "draft": arguments.draft,
        "date": time.strftime("%Y-%m-%d"),
        "bandwidth_gb_per_s": round(speed / 1e9, 1),
        "decoder_megabytes_per_pass": round(step_bytes / 1e6, 1),
        "floor_ms_per_pass": round(1e3 * step_bytes / speed, 2),
    }
    print(json.dumps(machine, indent=2))
    if load > 0.7:
        print(f"WARNING: load {load:.2f}: not an idle machine, times below are not to be quoted")

    @torch.no_grad()
    def encoder(chunk):
        return model.get_encoder()(chunk).last_hidden_state

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
            model, features, batch, timestamps, engines, encoder, arguments.repeats
        )
        encode = statistics.median(seconds["encoder"])
        print(
            f"\n{count} threads, batch {batch}, timestamps {timestamps}: {tokens} tokens, "
            f"{chunks} batches"
        )
        found = []
        for name in engines:
            through_generate = name.startswith(("generate", "assisted"))
            spent = [s - (encode if through_generate else 0) for s in seconds[name]]
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
                "encoder_share": round(encode / (encode + decode), 3),
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
    name = f"asr-{device.type}-torch{torch.__version__.split('+')[0]}-{machine['date']}.json"
    (arguments.out / name).write_text(
        json.dumps({"machine": machine, "rows": rows, "best": best or rows}, indent=2) + "\n"
    )
    print(f"\nwritten: {arguments.out / name}")


if __name__ == "__main__":
    main()
