"""Cost of guidance: forward passes and time per token of guided and plain answers.

    python benchmarks/guidance_cost.py --page docs/guidance_cost.md      # CPU, about 8 minutes

One process, ways interleaved item by item. Captions are decoded for exactly ``--tokens`` tokens and
again for one; the difference is decode time, over the tokens after the first. Answers to POPE
questions are one token, timed from the processed prompt to the end. "serial" runs the branches of
a contrast in passes of their own, as the references do; "stacked" is what the library does. Ids of
drafted ways are compared with those of the same guide undrafted.

The load of the machine is printed at the start and at the end; close everything else.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import parsed, table, warn_if_busy, write_page, write_result

import mmdecode
from mmdecode import registry
from mmdecode.decoder import Decoder
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import interleaved, load, machine, ratio
from mmdecode.runs.console import only_our_output
from mmdecode.vlm import Answerer
from mmdecode.zoo.scene_sets import scene_of, scene_rows
from mmdecode.zoo.scenes import render

HERE = Path(__file__).parent
PLAIN, GENERATE = "plain", "transformers generate"
CAPTION = "Describe the image."


def serial(name: str) -> Any:
    """A guide that runs each branch in a forward pass of its own."""
    guide = registry.create("guide", name)
    guide.branches = [replace(spec, stage=number + 2) for number, spec in enumerate(guide.branches)]
    return guide


def ways(drafts: Sequence[str]) -> dict[str, Decoder | None]:
    """By name; ``None`` is plain ``generate``."""
    found: dict[str, Decoder | None] = {
        PLAIN: Decoder(seed=0),
        "plain, again": Decoder(seed=0),
        GENERATE: None,
        "vcd, serial": Decoder(guide=serial("vcd"), seed=0),
        "vcd, stacked": Decoder(guide="vcd", seed=0),
    }
    for draft in drafts:
        found[f"plain, {draft}"] = Decoder(draft, seed=0)
        found[f"vcd, stacked, {draft}"] = Decoder(draft, "vcd", seed=0)
    return found


class Subject:
    """A model, and the prompts of questions about scenes, batch by batch."""

    def __init__(self, model: str, device: torch.device) -> None:
        self.answerer = Answerer.from_pretrained(model, device=device)
        self.model, self.device = self.answerer.model, device

    def batches(self, asked: Sequence[tuple[str, str]], size: int) -> list[dict[str, Any]]:
        """Inputs of (image, question) pairs."""
        from PIL import Image

        prompts = self.answerer.prompts
        questions = [
            prompts.question(text, [Image.fromarray(render(scene_of(image)))])
            for image, text in asked
        ]
        groups = [questions[at : at + size] for at in range(0, len(questions), size)]
        return [
            {name: value.to(self.device) for name, value in prompts.build(group).items()}
            for group in groups
            if len(group) == size
        ]

    def run(self, decoder: Decoder | None, inputs: dict[str, Any], tokens: int) -> torch.Tensor:
        """Generated ids, ``(B, tokens)``."""
        options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
        if decoder is None:
            output = self.model.generate(**inputs, **options)
        else:
            output = mmdecode.generate(self.model, decoder=decoder, **inputs, **options)
        return output[:, inputs["input_ids"].shape[1] :]


def measure_captions(
    subject: Subject, batch: int, count: int, tokens: int, repeats: int, drafts: Sequence[str]
) -> dict[str, Any]:
    """Decode time per token."""
    images = [row["image"] for row in scene_rows("test", "chair")][:count]
    batches = subject.batches([(image, CAPTION) for image in images], batch)
    decoders = ways(drafts)
    calls: dict[str, Any] = {}
    for name, decoder in decoders.items():
        for length in (1, tokens):
            calls[f"{name}/{length}"] = partial(call, subject, decoder, batches, length)
    interleaved(calls, min(2, len(batches)), 1, subject.device)
    for decoder in decoders.values():
        if decoder is not None:
            decoder.stats.reset()
    seconds, results = interleaved(calls, len(batches), repeats, subject.device)

    def spent(name: str) -> np.ndarray:
        whole, first = (np.median(seconds[f"{name}/{n}"], 0) for n in (tokens, 1))
        return whole - first

    ids = {name: [r.tolist() for r in results[f"{name}/{tokens}"]] for name in decoders}
    base, rows = spent(PLAIN), []
    for name, decoder in decoders.items():
        own = spent(name)
        same = ids[name] == ids["vcd, stacked" if "vcd" in name else PLAIN]
        rows.append(
            row_of(name, own, base, tokens - 1, same)
            | {
                "tokens_per_pass": round(decoder.stats.acceptance_length, 3) if decoder else 1.0,
                "seconds": [[round(s, 5) for s in r] for r in seconds[f"{name}/{tokens}"]],
            }
        )
        show(rows[-1])
    return {
        "case": "captions",
        "batch": batch,
        "tokens": tokens,
        "units": len(batches),
        "rows": rows,
    }


def measure_answers(subject: Subject, count: int, repeats: int) -> dict[str, Any]:
    """One token from the processed prompt on."""
    asked = [(row["image"], row["text"]) for row in scene_rows("test", "pope_adversarial")][:count]
    batches = subject.batches(asked, 1)
    decoders = ways([])
    calls = {name: partial(call, subject, d, batches, 1) for name, d in decoders.items()}
    interleaved(calls, min(4, len(batches)), 1, subject.device)
    seconds, results = interleaved(calls, len(batches), repeats, subject.device)
    ids = {name: [r.tolist() for r in found] for name, found in results.items()}
    base, rows = np.median(seconds[PLAIN], 0), []
    for name in decoders:
        same = ids[name] == ids["vcd, stacked" if "vcd" in name else PLAIN]
        rows.append(row_of(name, np.median(seconds[name], 0), base, 1, same))
        show(rows[-1])
    return {"case": "answers", "batch": 1, "tokens": 1, "units": len(batches), "rows": rows}


def call(
    subject: Subject,
    decoder: Decoder | None,
    batches: list[dict[str, Any]],
    tokens: int,
    item: int,
    repeat: int,
) -> torch.Tensor:
    """One batch in one way."""
    return subject.run(decoder, batches[item], tokens)


def row_of(name: str, own: np.ndarray, base: np.ndarray, tokens: int, same: bool) -> dict[str, Any]:
    """Cost over that of the plain loop, with a paired bootstrap over items."""
    over_plain, bounds = ratio(own, base)
    return {
        "way": name,
        "identical": same,
        "ms_per_token": round(1e3 * float(own.sum()) / len(own) / tokens, 3),
        "over_plain": over_plain,
        "interval": bounds,
    }


def show(row: dict[str, Any]) -> None:
    """One line as it comes."""
    low, high = row["interval"]
    print(
        f"  {row['way']:36s} {row['ms_per_token']:8.2f} ms/token  x{row['over_plain']:.2f} "
        f"[{low:.2f}, {high:.2f}]  {row.get('tokens_per_pass', 1):5.2f} tokens/pass  "
        f"{'identical' if row['identical'] else 'IDS DIFFER'}",
        flush=True,
    )


def tables(result: dict[str, Any], name: str) -> str:
    """The page's tables."""
    facts, parts = result["machine"], []
    for case in result["cases"]:
        unit = "captions" if case["case"] == "captions" else "one-token answers"
        parts.append(f"### {unit.capitalize()}, batch {case['batch']}\n")
        parts.append(
            table(
                ["way", "ms/token", "over plain", "95 % interval", "tokens/pass", "ids"],
                [
                    [
                        row["way"],
                        f"{row['ms_per_token']:.2f}",
                        f"x{row['over_plain']:.2f}",
                        "{:.2f} to {:.2f}".format(*row["interval"]),
                        f"{row.get('tokens_per_pass', 1.0):.2f}",
                        "same" if row["identical"] else "DIFFER",
                    ]
                    for row in case["rows"]
                ],
            )
            + "\n"
        )
    parts.append(
        f"{facts['device']}, {facts['threads']} threads, {facts['dtype']}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}, {facts['date']}, load {facts['load_at_start']} to "
        f"{facts['load_at_end']}; `benchmarks/results/{name}`."
    )
    return "\n".join(parts)


def run(arguments: argparse.Namespace) -> Path:
    """Measures, writes the result file and the page."""
    device = torch.device(arguments.device)
    subject = Subject(arguments.model, device)
    facts = machine(device, "float32") | {"threads": torch.get_num_threads()}
    print(facts)
    warn_if_busy(facts)
    cases = []
    for batch in arguments.batch_size:
        print(f"captions, batch {batch}")
        count = max(arguments.items, 2 * batch)
        cases.append(
            measure_captions(
                subject, batch, count, arguments.tokens, arguments.repeats, arguments.draft
            )
        )
    print("answers")
    cases.append(measure_answers(subject, 4 * arguments.items, arguments.repeats))
    facts["load_at_end"] = load()
    result = {"model": arguments.model, "machine": facts, "cases": cases}
    name = f"guidance-{device.type}-torch{torch.__version__.partition('+')[0]}-{facts['date']}.json"
    path = arguments.out / name
    write_result(path, result)
    print(f"load at the end {facts['load_at_end']}; wrote {path}")
    if arguments.page:
        write_page(arguments.page, tables(result, name))
    return path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="zoo:llava-scenes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--items", type=int, default=16, help="captions; four times as many answers"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of each caption")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, action="append", help="default: 1 and 8")
    parser.add_argument("--draft", action="append", help="default: lookup, recycling and others")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="a Markdown page to put the tables into")
    arguments = parsed(parser)
    arguments.batch_size = arguments.batch_size or [1, 8]
    arguments.draft = arguments.draft or [
        "lookup",
        "recycling:nodes=8",
        "layer_skip:exit_layer=4",
        "amateur",
    ]
    only_our_output()
    run(arguments)


if __name__ == "__main__":
    run_script(main)
