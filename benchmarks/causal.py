"""Causal Whisper beside the policies over the uncut model: word errors, latency, work per second.

    python benchmarks/causal.py --page docs/causal.md      # CPU, needs espeak-ng, about 20 minutes

*Curves*: the clips of streaming.py, each a stream of a pool, with steps of one block. *Costs*: some
of the clips, one stream at a time: encoder states computed per second of audio, passes, and time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pages import add_parts, measure_parts, publish, table, warn_if_busy
from streaming import MODEL, RATE, cost, held_out, offline, pooled, timed
from streaming_tables import LATENCY, latencies, percent, seconds

from mmdecode.asr import Transcriber
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import machine

CAUSAL = {"zoo:whisper-synth-320ms": 0.32, "zoo:whisper-synth-960ms": 0.96}
"""Models with the seconds of their blocks, which are those of a step."""
UNCUT = ["agreement:n=2", "agreement:n=3", "hold:n=3", "alignatt:s=1.2"]
CUT = ["stable:m=2", "agreement:n=2", "agreement:n=3", "hold:n=1", "hold:n=3", "alignatt:s=0.8"]
"""Policies over the uncut and over causal models."""
STEPS = {MODEL: [0.5, 1.0]} | {name: [step] for name, step in CAUSAL.items()}
COSTS = ["agreement:n=2", "stable:m=2"]
PARTS = ["curves", "costs"]


@contextmanager
def encoded(transcriber: Transcriber) -> Iterator[list[int]]:
    """Notes how many states pass the encoder's first layer, in each pass."""
    counts: list[int] = []
    layer = transcriber.recognizer.model.get_encoder().layers[0].fc1
    handle = layer.register_forward_hook(
        lambda module, given, output: counts.append(output.shape[0] * output.shape[1])
    )
    try:
        yield counts
    finally:
        handle.remove()


def run(arguments: argparse.Namespace) -> Path:
    """Measures, and writes after each part."""
    torch.set_num_threads(arguments.threads)
    facts = machine(torch.device("cpu"), "float32")
    facts |= {"command": "python benchmarks/causal.py", "threads": arguments.threads}
    print(json.dumps(facts, indent=2))
    warn_if_busy(facts)
    clips = held_out(arguments.limit)
    models = [MODEL, *arguments.models]
    ours = {name: Transcriber.from_pretrained(name, draft="medusa" if name == MODEL else None,
                                              device="cpu") for name in models}  # fmt: skip
    result: dict[str, Any] = {"machine": facts}
    path = arguments.out / f"causal-cpu-torch{torch.__version__.split('+')[0]}-{facts['date']}.json"

    def curves() -> Iterator[dict[str, Any]]:
        timer = ours[MODEL].with_options(word_timestamps="ctc")
        ends = [timed(timer, one) for one in clips]
        result["clips"] = len(clips)
        result["seconds"] = round(sum(len(one.wave) for one in clips) / RATE, 1)
        result["offline"] = {name: offline(ours[name], clips) for name in models}
        for name in models:
            for step in STEPS[name]:
                for policy in UNCUT if name == MODEL else CUT:
                    yield {"model": name} | pooled(ours[name], policy, step, clips, ends)

    def costs() -> Iterator[dict[str, Any]]:
        few = clips[: arguments.few]
        audio_s = sum(len(one.wave) for one in few) / RATE
        for name in models:
            for policy in COSTS:
                with encoded(ours[name]) as counts:
                    row = {"model": name} | cost(ours[name], policy, STEPS[name][0], True, few)
                row["states_per_second"] = round(sum(counts) / audio_s, 1)
                del row["texts"]
                yield row

    return measure_parts(arguments, path, result, {"curves": curves, "costs": costs})


def tables(result: Mapping[str, Any], name: str) -> str:
    """Tables of the page, from the result file called ``name``."""
    facts = result["machine"]
    whole = ", ".join(f"{model} {percent(value)}" for model, value in result["offline"].items())
    rows = [
        [row["model"], row["policy"], f"{row['step_s']:g} s", percent(row["wer"]), *latencies(row)]
        for row in result["curves"]
    ]
    costs = [
        [
            row["model"], row["policy"], f"{row['step_s']:g} s", f"{row['states_per_second']:.0f}",
            str(row["passes"]), seconds(row["seconds_per_second"]),
        ]
        for row in result.get("costs", ())
    ]  # fmt: skip
    return "\n\n".join(
        [
            f"Written by `{facts['command']}` from `benchmarks/results/{name}`: {facts['device']} "
            f"with {facts['cores']} cores, {facts['threads']} thread, {facts['dtype']}, torch "
            f"{facts['torch']}, transformers {facts['transformers']}, {facts['date']}; load "
            f"{facts['load_at_start']} at the start, {facts['load_at_end']} at the end.",
            f"**{result['clips']} clips** ({result['seconds']:.0f} s; WER of each clip transcribed "
            f"as a whole: {whole})",
            table(["model", "policy", "step", "WER", *LATENCY], rows),
            "**Work per second of audio, one stream at a time**; the window has 25 states a second",
            table(
                ["model", "policy", "step", "encoder states", "passes", "seconds of compute"], costs
            ),
        ]
    )


def main() -> None:
    """Measures, and shows the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=100, help="clips of the curves")
    parser.add_argument("--few", type=int, default=14, help="clips of the costs")
    parser.add_argument("--models", nargs="+", default=[*CAUSAL], choices=[*CAUSAL])
    parser.add_argument("--threads", type=int, default=1)
    add_parts(parser, PARTS)
    publish(parser, run, tables)


if __name__ == "__main__":
    run_script(main)
