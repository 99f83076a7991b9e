"""Every drafter on the shipped vision-language model, next to our undrafted loop and transformers'.

    python benchmarks/vlm_speed.py --page docs/vlm_speed.md     # CPU, about 20 minutes
    python benchmarks/vlm_speed.py --draft "mine=eagle:path=my-drafter" --only mine

Detailed descriptions of scenes that neither model nor drafters were trained on, greedy and sampled,
in batches of 1, 4 and 16, with and without the guidance of VCD. What is measured and how is in
`mmdecode.evaluation.speed.draft_speed`; ``mmdecode bench vlm`` does the same on a model of one's
own. Settings of the drafts were fixed before, on other scenes.

The load of the machine is printed at the start and at the end; close everything else.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pages import parsed, table, warn_if_busy, write_page, write_result
from rounding import add_quantize, form_of
from toys import toy

from mmdecode import registry
from mmdecode.cli.bench import SCENES, prompts_of
from mmdecode.errors import MMDecodeError, run_script
from mmdecode.evaluation.speed.draft_speed import (
    PEERS,
    Setting,
    Speed,
    confidence,
    measure,
    working,
)
from mmdecode.evaluation.speed.stopwatch import load, machine
from mmdecode.runs.console import only_our_output
from mmdecode.testing.drafts import Random
from mmdecode.vlm import Answerer

HERE = Path(__file__).parent
MODEL = "zoo:llava-scenes"
DRAFTS = {
    "random": None,
    "lookup": "lookup:length=4",
    "lookahead": "lookahead",
    "recycling": "recycling:nodes=8",
    "layer_skip": "layer_skip:exit_layer=4,length=4",
    "clasp": "clasp:length=4",
    "swift": "swift:length=4",
    "amateur": "amateur:length=4",
    "sparse": "sparse:length=4",
    "text-only": f"assistant:model={MODEL}-text,length=4",
    "kangaroo": f"kangaroo:path={MODEL}-kangaroo,length=4,confidence_threshold=0",
    "medusa": f"medusa:path={MODEL}-medusa",
    "eagle, chain": f"eagle:path={MODEL}-eagle,depth=4,top_k=1,nodes=4",
    "eagle, tree": f"eagle:path={MODEL}-eagle,depth=4,top_k=4,nodes=16",
    "eagle, OPT-Tree": f"eagle:path={MODEL}-eagle,depth=8,top_k=12,nodes=16,min_expected_gain=0.1",
    "adaptive eagle": f"adaptive:draft=eagle:path={MODEL}-eagle",
}
"""Drafters by name; ``None``: built by the script."""


@dataclass(frozen=True)
class Case:
    """A setting.

    Attributes:
        batch: Questions at once.
        temperature: 0 is greedy.
        guide: Guide of the decoding; ``None``: no guide.
    """

    batch: int
    temperature: float = 0.0
    guide: str | None = None

    @property
    def title(self) -> str:
        """The setting as a heading."""
        how = "greedy" if not self.temperature else f"temperature {self.temperature:g}"
        return f"batch {self.batch}, {how}" + (f", guide `{self.guide}`" if self.guide else "")


CASES = (
    Case(1),
    Case(1, 1.0),
    Case(4),
    Case(16),
    Case(16, 1.0),
    Case(1, 0.0, "vcd"),
    Case(4, 0.0, "vcd"),
)


QUICK = (Case(1), Case(2, 0.0, "vcd"))
"""Cases of a smoke test."""


def drafts_of(
    wanted: Mapping[str, str | None], answerer: Answerer, model: str = MODEL
) -> dict[str, Any]:
    """Drafters by name; those without a model at hand are reported and left out."""
    found: dict[str, Any] = {}
    for name, spec in wanted.items():
        if spec is None:
            found[name] = Random()
            continue
        try:
            found[name] = registry.create("draft", spec, target=answerer.model, model_id=model)
        except MMDecodeError as error:
            print(f"left out: {name}: {error}")
    return found


def run(arguments: argparse.Namespace) -> Path:
    """Measures, and writes after each case."""
    only_our_output()
    answerer = Answerer.from_pretrained(
        arguments.model, device=arguments.device, quantize=arguments.quantize
    )
    kind = arguments.quantize or "float32"
    facts = machine(answerer.model.device, kind) | {"threads": torch.get_num_threads()}
    print(facts)
    warn_if_busy(facts)
    wanted: dict[str, str | None] = {**DRAFTS}
    for one in arguments.draft or []:
        name, _, spec = one.partition("=")
        wanted[name] = spec
    if arguments.only:
        wanted = {name: wanted[name] for name in arguments.only}
    cases: list[dict[str, Any]] = []
    version = torch.__version__.partition("+")[0]
    device = answerer.model.device.type
    form = form_of(device, compiled=arguments.compile, quantize=arguments.quantize)
    name = f"vlm-{form}-torch{version}-{facts['date']}.json"
    path = arguments.out / name
    for case in QUICK if arguments.quick else CASES:
        count = max(arguments.scenes, 2 * case.batch)
        batches = prompts_of(answerer, SCENES, count, case.batch)
        setting = Setting(
            max_new_tokens=arguments.tokens,
            temperature=case.temperature,
            repeats=arguments.repeats,
        )
        guiding = None if case.guide is None else registry.create("guide", case.guide)
        asked = PEERS if case.guide is None else {}
        peers, failed = working(answerer.model, batches[0], asked)
        print(f"{case.title}, {len(batches)} batches")
        found = measure(
            answerer.model,
            batches,
            drafts_of(wanted, answerer, arguments.model),
            setting,
            guide=guiding,
            peers=peers,
            compile=arguments.compile,
        )
        for row in found:
            print(
                f"  {row.way:20s} {row.tokens_per_pass or 1:5.2f} tokens/pass "
                f"{row.ms_per_token:7.2f} ms/token x{row.decode[0]:.2f} "
                f"[{row.decode[1]:.2f}, {row.decode[2]:.2f}] same {row.identical}",
                flush=True,
            )
        cases.append(
            {
                "title": case.title,
                "batch": case.batch,
                "temperature": case.temperature,
                "guide": case.guide,
                "batches": len(batches),
                **confidence(answerer.model, batches, setting, guiding),
                "left_out": failed,
                "rows": [asdict(row) for row in found],
            }
        )
        facts["load_at_end"] = load()
        settings = {"model": arguments.model, "drafts": wanted, "max_new_tokens": arguments.tokens}
        settings["compiled"] = arguments.compile
        write_result(path, {"machine": facts, "settings": settings, "cases": cases})
    if arguments.page is not None:
        write_page(arguments.page, tables(json.loads(path.read_text()), path.name))
    return path


def tables(result: dict[str, Any], name: str) -> str:
    """The page's tables."""
    parts = []
    for case in result["cases"]:
        rows = [Speed(**row) for row in case["rows"]]
        parts.append(
            f"### {case['title'].capitalize()}\n\n{case['batches']} batches, answers of "
            f"{rows[0].tokens:.0f} tokens, {case['entropy_bits']:.2f} bits a token; at "
            f"{case['close']:.0%} of the tokens the two most likely are less than 0.05 apart.\n"
        )
        parts.append(table(HEAD, [shown(row) for row in rows]) + "\n")
        for way, why in case["left_out"].items():
            parts.append(f"Left out: {way} ({why}).\n")
    facts = result["machine"]
    parts.append(
        f"{facts['device']}, {facts['threads']} threads, {facts['dtype']}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}, {facts['date']}, load {facts['load_at_start']} to "
        f"{facts['load_at_end']}; `benchmarks/results/{name}`."
    )
    return "\n".join(parts)


HEAD = (
    "way",
    "tokens/pass",
    "drafted ones among them",
    "accepted by depth",
    "draft's share",
    "first token, ms",
    "ms/token",
    "decoding, over undrafted",
    "end to end",
    "answers the same",
)


def shown(row: Speed) -> Sequence[str]:
    """Cells of a row of the page."""
    number = "" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}"
    value, low, high = row.decode
    return [
        row.way,
        number,
        "" if row.accepted_per_pass is None else f"{row.accepted_per_pass:.2f}",
        " ".join(f"{share:.2f}" for share in row.by_depth or []),
        "" if row.draft_share is None else f"{row.draft_share:.0%}",
        f"{row.first_token_ms:.0f}",
        f"{row.ms_per_token:.2f}",
        f"x{value:.2f} [{low:.2f}, {high:.2f}]",
        f"x{row.end_to_end[0]:.2f}",
        "" if row.identical is None else f"{row.identical:.0%}",
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device", default="cpu")
    add_quantize(parser)
    parser.add_argument("--scenes", type=int, default=12, help="at least, at every batch size")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="all but peers, see `Decoder`")
    parser.add_argument("--draft", action="append", help="NAME=SPEC, beside the shipped ones")
    parser.add_argument("--only", action="append", help="name of a draft to measure; repeat")
    parser.add_argument("--quick", action="store_true", help="a smoke test of two cases")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, help="Markdown whose tables are replaced")
    arguments = parsed(parser)
    if arguments.quick:
        vars(arguments).update({"scenes": 1, "tokens": 8, "only": ["lookup", "medusa"]})
    with toy(torch.device(arguments.device), arguments.quick and arguments.compile):
        print(run(arguments))


if __name__ == "__main__":
    run_script(main)
