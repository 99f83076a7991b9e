"""Gain of drafting for the guided distribution: tokens per pass, and time per token.

    python benchmarks/guided_drafts.py --page docs/guided_drafts.md      # CPU, about 15 minutes

Every drafter decodes detailed descriptions of scenes, which neither the model nor the drafters were
trained on, under every guide twice: with ``draft_guided`` (it follows the guide, where it can) and
without (it drafts what the model would write without the guide). One process, all ways interleaved
item by item, greedy and sampled at temperature 1 by the coupled rule. Times are those of whole
answers, prompts included. Intervals are paired bootstraps over items. Ids are compared with those
of the same guide undrafted.

No Hydra heads are shipped for this model: without ``--hydra`` the benchmark trains some in three
minutes by the command that it prints, which is little, but the same heads draft both ways.

The load of the machine is printed at the start and at the end; close everything else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pages import parsed, table, warn_if_busy, write_page, write_result

from mmdecode import registry
from mmdecode.api import generate
from mmdecode.cli.bench import SCENES, prompts_of
from mmdecode.decoder import Decoder
from mmdecode.engine.stats import Stats
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import Cost, interleaved, load, machine
from mmdecode.runs.console import only_our_output
from mmdecode.vlm import Answerer

HERE = Path(__file__).parent
MODEL = "zoo:llava-scenes"
GUIDES = ("vcd", "cfg_image", "pai")
"""With their default options: ``vcd:alpha=1,beta=0.1,step=500``, ``cfg_image:gamma=1.5,beta=0`` and
``pai:alpha=0.2,gamma=1.1,beta=0.1``."""
DRAFTS = {
    "medusa": f"medusa:path={MODEL}-medusa",
    "eagle, chain": f"eagle:path={MODEL}-eagle,depth=4,top_k=1,nodes=4",
    "eagle, tree": f"eagle:path={MODEL}-eagle,depth=4,top_k=4,nodes=16",
    "hydra": "hydra:path={hydra},depth=4,top_k=4,nodes=16",
    "assistant, text only": f"assistant:model={MODEL}-text,length=4",
    "amateur": "amateur:length=3",
}
"""What is measured, by name; ``{hydra}`` is a folder of heads."""
UNDRAFTED = "undrafted"
TRAINING = ("train", "drafter", "--model", MODEL, "--kind", "hydra")
TRAINING += ("--limit", "800", "--steps", "1500", "--held-out", "16", "--tested", "16")
"""The command that makes Hydra heads, but for its folder."""


class Answer(NamedTuple):
    """Result of one call: ids and counters."""

    ids: torch.Tensor
    stats: Stats


def trained_heads(folder: Path) -> Path:
    """Hydra heads that are made now."""
    print(f"training Hydra heads: mmdecode {' '.join(TRAINING)} --out FOLDER", flush=True)
    command = [sys.executable, "-m", "mmdecode", *TRAINING, "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def call(
    model: Any,
    decoder: Decoder,
    batches: Sequence[Mapping[str, Any]],
    tokens: int,
    do_sample: bool,
    item: int,
    repeat: int,
) -> Answer:
    """One item in one way."""
    own = replace(decoder, stats=Stats())
    options = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    options = {**options, "request": [item]} if do_sample else {"do_sample": False}
    return Answer(
        generate(model, decoder=own, **batches[item], max_new_tokens=tokens, **options), own.stats
    )


def measure(
    model: Any,
    batches: Sequence[Mapping[str, Any]],
    drafts: Mapping[str, Any],
    guide: str,
    do_sample: bool,
    tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """All drafters under one guide, following it and not."""
    decoders = {UNDRAFTED: Decoder(guide=guide, seed=0)}
    for name, draft in drafts.items():
        for follow in (True, False):
            decoders[f"{name}/{follow}"] = Decoder(draft, guide, seed=0, draft_guided=follow)
    ways = {
        name: partial(call, model, decoder, batches, tokens, do_sample)
        for name, decoder in decoders.items()
    }
    interleaved(ways, 1, 1, model.device)  # what is made at first use
    seconds, answers = interleaved(ways, len(batches), repeats, model.device)
    rows = []
    expected = [answer.ids.tolist() for answer in answers[UNDRAFTED]]
    undrafted = costs(seconds[UNDRAFTED], answers[UNDRAFTED])[1]
    for name in drafts:
        following, unguided = (f"{name}/{follow}" for follow in (True, False))
        ids = [[answer.ids.tolist() for answer in answers[way]] for way in (following, unguided)]
        passes, times = zip(
            *(costs(seconds[way], answers[way]) for way in (following, unguided)), strict=True
        )
        rows.append(
            {
                "drafter": name,
                "identical": ids[0] == ids[1] == expected,
                "tokens_per_pass": [per_pass(cost) for cost in passes],
                "passes_saved": passes[0].over(passes[1]),
                "ms_per_token": [milliseconds(cost) for cost in times],
                "speed_following": times[0].over(undrafted),
                "speed_unguided": times[1].over(undrafted),
                "speedup": times[0].over(times[1]),
                "why_unguided": sorted(answers[following][0].stats.unguided),
            }
        )
    case = {
        "guide": guide,
        "sampled": do_sample,
        "items": len(batches),
        "ms_per_token_undrafted": milliseconds(undrafted),
        "tokens_per_answer": round(float(undrafted.tokens.mean()), 1),
        "rows": rows,
    }
    for row in rows:
        print("  " + " | ".join(cells(case, row)), flush=True)
    return case


def costs(seconds: list[list[float]], answers: Sequence[Answer]) -> tuple[Cost, Cost]:
    """Passes and seconds of the items in one way; both with the tokens they are counted over."""
    first = [answer.stats for answer in answers[: len(seconds[0])]]
    whole = np.array([stats.tokens for stats in first])
    passes = np.array([stats.rounds for stats in first])
    # the prompt decides a token that no pass is needed for
    return Cost(passes, whole - 1), Cost(np.median(np.array(seconds), 0), whole)


def per_pass(cost: Cost) -> float:
    """Tokens per pass."""
    return round(float(cost.tokens.sum() / cost.amount.sum()), 3)


def milliseconds(cost: Cost) -> float:
    """Milliseconds per token."""
    return round(1e3 * float(cost.amount.sum() / cost.tokens.sum()), 3)


def with_interval(values: Sequence[float]) -> str:
    """A ratio with its interval."""
    return "x{:.2f} [{:.2f}, {:.2f}]".format(*values)


HEAD = (
    "guide",
    "drafter",
    "tokens/pass, without the guide",
    "following it",
    "gain",
    "ms/token, without the guide",
    "following it",
    "speed, following over without",
    "speed, following over undrafted",
    "ids",
    "does not follow, because",
)


def cells(case: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """A row of the page."""
    following, unguided = row["tokens_per_pass"]
    fast, slow = row["ms_per_token"]
    return [
        f"`{case['guide']}`" + (", sampled" if case["sampled"] else ", greedy"),
        row["drafter"],
        f"{unguided:.2f}",
        f"{following:.2f}",
        with_interval(row["passes_saved"]),
        f"{slow:.2f}",
        f"{fast:.2f}",
        with_interval(row["speedup"]),
        with_interval(row["speed_following"]),
        "same" if row["identical"] else "DIFFER",
        "; ".join(row["why_unguided"]),
    ]


def tables(result: Mapping[str, Any], name: str) -> str:
    """The page's table of a result file called ``name``."""
    facts, cases = result["machine"], result["cases"]
    rows = [cells(case, row) for case in cases for row in case["rows"]]
    undrafted = ", ".join(
        f"{case['ms_per_token_undrafted']:.1f} (`{case['guide']}`, "
        f"{'sampled' if case['sampled'] else 'greedy'})"
        for case in cases
    )
    return (
        f"{table(HEAD, rows)}\n\n{cases[0]['items']} answers a row, of "
        f"{np.mean([case['tokens_per_answer'] for case in cases]):.0f} tokens in the mean. "
        f"Undrafted, ms a token: {undrafted}. {facts['device']}, {facts['threads']} threads, "
        f"{facts['dtype']}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"{facts['date']}, load {facts['load_at_start']} to {facts['load_at_end']}; "
        f"`benchmarks/results/{name}`."
    )


def run(arguments: argparse.Namespace, heads: Path, facts: dict[str, Any]) -> Path:
    """Measures, and writes after each case."""
    answerer = Answerer.from_pretrained(MODEL, device=arguments.device)
    model = answerer.model
    specs = {name: spec.format(hydra=heads) for name, spec in DRAFTS.items()}
    drafts = {
        name: registry.create("draft", specs[name], target=model, model_id=MODEL)
        for name in arguments.only or DRAFTS
    }
    version = torch.__version__.partition("+")[0]
    path = arguments.out / f"guided-drafts-{model.device.type}-torch{version}-{facts['date']}.json"
    batches = prompts_of(answerer, SCENES, arguments.scenes, 1)
    settings = {"model": MODEL, "drafts": DRAFTS, "max_new_tokens": arguments.tokens}
    settings |= {"repeats": arguments.repeats, "hydra": "given" if arguments.hydra else TRAINING}
    cases = []
    for do_sample in (False, True):
        for guide in arguments.guide or GUIDES:
            asked = (guide, do_sample, arguments.tokens, arguments.repeats)
            cases.append(measure(model, batches, drafts, *asked))
            facts["load_at_end"] = load()
            write_result(path, {"machine": facts, "settings": settings, "cases": cases})
    return path


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scenes", type=int, default=16, help="answers")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--repeats", type=int, default=1, help="medians count")
    parser.add_argument("--hydra", type=Path, help="folder of Hydra heads; default: trained first")
    parser.add_argument("--guide", action="append", help=f"default: {', '.join(GUIDES)}")
    parser.add_argument("--only", action="append", choices=DRAFTS, help="drafter; default: all")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="Markdown whose tables are replaced")
    parser.add_argument("--result", type=Path, help="show this earlier result, measure nothing")
    arguments = parsed(parser)
    only_our_output()
    path = arguments.result
    if path is None:
        facts = machine(torch.device(arguments.device), "float32")  # before the heads are trained
        facts["threads"] = torch.get_num_threads()
        print(facts)
        warn_if_busy(facts)
        with tempfile.TemporaryDirectory() as made:
            wanted = arguments.hydra is None and "hydra" in (arguments.only or DRAFTS)
            heads = trained_heads(Path(made) / "hydra") if wanted else arguments.hydra
            path = run(arguments, heads, facts)
    result = json.loads(path.read_text())
    print(f"{tables(result, path.name)}\n\nwritten: {path}")
    if arguments.page is not None:
        write_page(arguments.page, tables(result, path.name))


if __name__ == "__main__":
    run_script(main)
