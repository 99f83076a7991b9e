"""Streaming with the shipped Whisper: word errors, latency, changed provisional words, and time.

    python benchmarks/streaming.py --page docs/streaming.md       # CPU, about 5 minutes

The clips and the long recording come in blocks of a tenth of a second, as fast
as they can be heard; the wall time of each step is its own. Lags are means over recordings.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import parsed, table, warn_if_busy, write_page, write_result
from rounding import add_quantize, form_of

from mmdecode.asr import Stream, Transcriber
from mmdecode.errors import run_script
from mmdecode.evaluation.speech.wer import wer
from mmdecode.evaluation.speed.latency import StreamMeter, StreamReport
from mmdecode.evaluation.speed.stopwatch import load, machine
from mmdecode.runs.console import only_our_output
from mmdecode.zoo.speech import speech_test

HERE = Path(__file__).parent
MODEL, RATE = "zoo:whisper-synth", 16_000
WAYS = [
    *(("agreement", step, "medusa") for step in (0.5, 1.0, 2.0)),
    ("agreement", 1.0, None),
    ("agreement:n=3", 0.5, "medusa"),
    ("hold:n=3", 1.0, "medusa"),
    ("hold:n=6", 1.0, "medusa"),
]
"""Policy, step in seconds, and drafter of each way."""


def streamed(stream: Stream, wave: np.ndarray, words: int) -> tuple[str, StreamReport]:
    """Text and latency of one recording with a given number of reference words."""
    meter, text = StreamMeter(), ""
    size = RATE // 10
    for at in range(0, len(wave), size):
        for update in stream.feed(wave[at : at + size]):
            meter.add(update)
            text += update.text
    update = stream.finish()
    meter.add(update)
    return (text + update.text).strip(), meter.report(words)


def mean(values: list[float | None]) -> float:
    """Mean of the known values."""
    return round(float(np.mean([value for value in values if value is not None])), 3)


def measure(
    transcriber: Transcriber, policy: str, step: float, waves: list[np.ndarray], texts: list[str]
) -> dict[str, Any]:
    """Measures one way on some recordings."""
    began = time.perf_counter()
    found = [
        streamed(Stream(transcriber, policy, step), wave, len(text.split()))
        for wave, text in zip(waves, texts, strict=True)
    ]
    spent = time.perf_counter() - began
    reports = [report for _, report in found]
    score = wer(texts, [text for text, _ in found])
    return {
        "wer": round(score.value, 6),
        "al": mean([report.received.al for report in reports]),
        "laal": mean([report.received.laal for report in reports]),
        "dal": mean([report.received.dal for report in reports]),
        "ready_laal": mean([report.ready.laal for report in reports]),
        "lag_s": mean([report.lag_s for report in reports]),
        "revision_rate": mean([report.provisional_change_rate for report in reports]),
        "seconds_per_second": round(spent * RATE / sum(map(len, waves)), 3),
        "texts": [text for text, _ in found],
    }


def tables(result: dict[str, Any], name: str) -> str:
    """Tables of the page, from the result file called ``name``."""
    facts = result["machine"]
    parts = [
        f"Written by `{facts['command']}` from `benchmarks/results/{name}`: {facts['model']}, "
        f"{facts['device']} with {facts['cores']} cores, {facts['threads']} thread, "
        f"{facts['dtype']}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"{facts['date']}; load {facts['load_at_start']} at the start, {facts['load_at_end']} at "
        "the end."
    ]
    header = ["policy", "step", "draft", "WER", "AL", "LAAL", "DAL", "LAAL on the wall"]
    header += ["behind the word's end", "provisional and changed", "compute per second"]
    for case in result["cases"]:
        rows = [["whole recording at once", "", "", f"{100 * case['offline_wer']:.1f} %"]]
        rows[0] += [""] * (len(header) - len(rows[0]))
        for row in case["rows"]:
            seconds = ("al", "laal", "dal", "ready_laal", "lag_s")
            rows.append(
                [
                    row["policy"],
                    f"{row['step_s']:g} s",
                    row["draft"] or "none",
                    f"{100 * row['wer']:.1f} %",
                    *(f"{row[key]:.2f} s" for key in seconds),
                    f"{100 * row['revision_rate']:.0f} %",
                    f"{row['seconds_per_second']:.2f} s",
                ]
            )
        parts += [f"**{case['case']}**", table(header, rows)]
    return "\n\n".join(parts)


def run(arguments: argparse.Namespace) -> Path:
    """Measures everything and writes one file."""
    torch.set_num_threads(arguments.threads)
    facts = machine(torch.device("cpu"), arguments.quantize or "float32")
    facts |= {
        "command": "python benchmarks/streaming.py",
        "model": MODEL,
        "threads": arguments.threads,
    }
    print(json.dumps(facts, indent=2))
    warn_if_busy(facts)
    transcribers = {
        draft: Transcriber.from_pretrained(
            MODEL, draft=draft, device="cpu", quantize=arguments.quantize, word_timestamps="ctc"
        )
        for draft in {draft for _, _, draft in WAYS}
    }
    clips = speech_test()[: arguments.limit]
    sets = {f"{len(clips)} clips": ([c.samples() for c in clips], [c.text for c in clips])}
    [recording] = speech_test(long=True)
    if not arguments.clips_only:
        sets["The recording of three minutes"] = ([recording.samples()], [recording.text])
    cases = []
    for title, (waves, texts) in sets.items():
        whole = [transcript.text for transcript in transcribers[None](waves)]
        case = {"case": title, "offline_wer": round(wer(texts, whole).value, 6), "rows": []}
        for policy, step, draft in WAYS:
            row = {"policy": policy, "step_s": step, "draft": draft}
            row |= measure(transcribers[draft], policy, step, waves, texts)
            print({key: value for key, value in row.items() if key != "texts"}, flush=True)
            case["rows"].append(row)
        cases.append(case)
    facts["load_at_end"] = load()
    form = form_of("cpu", quantize=arguments.quantize)
    name = f"streaming-{form}-torch{torch.__version__.split('+')[0]}-{facts['date']}.json"
    write_result(arguments.out / name, {"machine": facts, "cases": cases}, indent=None)
    return arguments.out / name


def main() -> None:
    """Measures, and shows the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=12, help="clips, of 30")
    parser.add_argument("--clips-only", action="store_true", help="leave the recording out")
    parser.add_argument("--threads", type=int, default=1)
    add_quantize(parser)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    parser.add_argument("--result", type=Path, help="show this earlier result, measure nothing")
    arguments = parsed(parser)
    only_our_output()
    path = arguments.result or run(arguments)
    shown = tables(json.loads(path.read_text()), path.name)
    print(f"\n{shown}\n\nwritten: {path}")
    if arguments.page:
        write_page(arguments.page, shown)


if __name__ == "__main__":
    run_script(main)
