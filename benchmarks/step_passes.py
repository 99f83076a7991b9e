"""Time of single passes against their memory-bandwidth floor, by visible tokens, nodes and batch.

    python benchmarks/step_passes.py --part passes       # batch 1, 512 visible tokens
    python benchmarks/step_passes.py --part long         # batch 1, 32,768
    python benchmarks/step_passes.py --part batch        # batch 32: drafted against undrafted
    python benchmarks/step_passes.py --device cpu --quick --part passes

The floor of a pass is the time to read weights and caches once at the bandwidth of a large copy.
The clock starts when the prompt was read and its first token was decided, and stops at the end of
the call, so that reading the prompt does not count. Rounds are captured, by the calls before the
timed one. Each case is measured with the additive mask, and with FlexAttention (``flex=True``),
whose default follows from here.

Bars: a pass of 0, 8 or 63 nodes takes at most 1.3 times its floor at 512 tokens, 1.5 times at
32,768; at batch 32 no draft is slower than none. Weights are random.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pages import parsed, write_result
from step_speed import RATES, KnownSession, Oracle, Shape, build, runner, shapes, step_bytes
from toys import toy, toy_device

from mmdecode.decoder import Decoder
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Drafter, DraftSession
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.stopwatch import machine

HERE = Path(__file__).parent
NODES = (0, 8, 63)
NEW, LENGTH = 64, 8
OVER_FLOOR = {512: 1.3, 32768: 1.5}
"""Bars by visible tokens."""
PARTS = ("passes", "long", "batch")


class Watch:
    """Seconds between the prompt's first token and the end, of each call."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.began, self.spent = device, 0.0, list[float]()

    def now(self) -> float:
        """The time when the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


class Clocked(DraftSession):
    """Session that stops a watch when the call ends."""

    uncaptured: ClassVar = {"watch"}
    watch: Watch

    def close(self):
        """Stops the watch."""
        self.watch.spent.append(self.watch.now() - self.watch.began)


class WideSession(Clocked):
    """Session that proposes the same tree of tokens in each round."""

    def __init__(self, call, nodes: int) -> None:
        super().__init__(call)
        self.tree = Tree(tuple(-1 if n < 2 else (n - 2) // 2 for n in range(nodes)))
        self.tokens = (torch.arange(nodes, device=call.device) + 2).expand(call.batch, -1)

    def propose(self, budget):
        """A binary tree, whose siblings differ."""
        if not len(self.tree):
            return Proposal.empty(self.call.batch, self.call.device)
        return Proposal(tokens=self.tokens.clone(), tree=self.tree, kind="deterministic")


class Wide(Drafter):
    """Proposes a binary tree of ``nodes`` tokens that are wrong most often."""

    capabilities = DrafterCapabilities(graph_safe=True)
    uncaptured: ClassVar = {"watch"}

    def __init__(self, nodes: int, watch: Watch) -> None:
        self.nodes, self.watch = nodes, watch

    def begin(self, call, prefill):
        """Opens a session, and starts the watch."""
        session = WideSession(call, self.nodes)
        session.watch, self.watch.began = self.watch, self.watch.now()
        return session


class ClockedKnown(Clocked, KnownSession):
    """Session of `ClockedOracle`."""


class ClockedOracle(Oracle):
    """Proposes a known continuation, and notes the time of decoding."""

    uncaptured: ClassVar = {"watch"}
    watch: Watch

    def begin(self, call, prefill):
        """Opens a session, and starts the watch."""
        session = ClockedKnown(call, self.rows, self.steps)
        session.watch, self.watch.began = self.watch, self.watch.now()
        return session


def timed_calls(run, decoder: Decoder, watch: Watch, repeats: int) -> tuple[float, float, Any]:
    """Milliseconds of decoding and passes of a call whose rounds were captured before, and ids."""
    run()
    watch.spent.clear()
    decoder.stats.reset()
    ids = [run() for _ in range(repeats)][-1]
    captured = decoder.stats.paths["graph captured"]
    if captured:
        print(f"    {captured} graphs were captured while the clock ran")
    return 1e3 * statistics.median(watch.spent), decoder.stats.passes / repeats, ids


def batched(inputs: dict[str, Any], batch: int) -> dict[str, Any]:
    """Inputs of a batch of different prompts."""
    ids = inputs["input_ids"].expand(batch, -1).clone()
    if ids.shape[1] > 1:
        ids[:, 1] = torch.arange(batch, device=ids.device) % 60 + 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def passes(
    name: str, shape: Shape, visible: int, device, dtype, speed: float, repeats: int
) -> list[dict[str, Any]]:
    """A row for each number of nodes and way of attention."""
    shape = replace(shape, prompt=max(1, visible - shape.new))
    model, inputs = build(shape, device, dtype)
    floor = 1e3 * step_bytes(model, shape) / speed
    rows = []
    for nodes in NODES:
        for flex in (False, True):
            watch = Watch(device)
            decoder = Decoder(Wide(nodes, watch), compile=True, flex=flex)
            run = runner(model, inputs, shape.new, custom_generate=decoder)
            spent, count, _ = timed_calls(run, decoder, watch, repeats)
            row = {"shape": name, "visible": visible, "nodes": nodes, "batch": 1, "flex": flex}
            row |= {"ms_per_pass": round(spent / count, 4), "floor_ms": round(floor, 4)}
            row["over_floor"] = round(spent / count / floor, 3)
            limit = OVER_FLOOR.get(visible)
            row |= {"limit": limit, "met": None if limit is None else row["over_floor"] <= limit}
            rows.append(row)
            print(f"  {row}", flush=True)
    return rows


def batches(
    name: str, shape: Shape, batch: int, device, dtype, repeats: int
) -> list[dict[str, Any]]:
    """Drafts of a batch against the undrafted loop, at each rate of acceptance."""
    model, inputs = build(shape, device, dtype)
    inputs = batched(inputs, batch)
    rows = []
    for flex in (False, True):
        watch = Watch(device)
        decoder = Decoder(Wide(0, watch), compile=True, flex=flex)
        run = runner(model, inputs, shape.new, custom_generate=decoder)
        base, _, ids = timed_calls(run, decoder, watch, repeats)
        for rate in RATES:
            drafter = ClockedOracle(ids[:, shape.prompt :], rate, LENGTH)
            drafter.watch = watch = Watch(device)
            decoder = Decoder(drafter, compile=True, flex=flex)
            run = runner(model, inputs, shape.new, custom_generate=decoder)
            spent, _, _ = timed_calls(run, decoder, watch, repeats)
            row = {"shape": name, "batch": batch, "rate": rate, "flex": flex}
            row |= {"undrafted_ms": round(base / shape.new, 4), "ms": round(spent / shape.new, 4)}
            row |= {"gain": round(base / spent, 3), "limit": 1.0, "met": base >= spent}
            row["tokens_per_pass"] = round(decoder.stats.acceptance_length, 3)
            rows.append(row)
            print(f"  {row}", flush=True)
    return rows


def main() -> None:
    """Measures one part and writes one file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--part", required=True, choices=PARTS)
    parser.add_argument("--only", help="one shape by name; default: llama-7b")
    parser.add_argument("--quick", action="store_true", help="toys of the same names")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parsed(parser)
    name, quick = arguments.only or "llama-7b", arguments.quick
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    facts = toy_device(device, arguments.dtype) if quick else machine(device, arguments.dtype)
    speed, repeats = 1e9 * facts["bandwidth_gb_per_s"], 1 if quick else arguments.repeats
    shape = shapes("quick" if quick else "full")[name]
    shape = replace(shape, new=12 if quick else NEW)
    visible = {"passes": 512, "long": 32768}.get(arguments.part, 512)
    visible = min(visible, 40) if quick else visible
    print(f"{name}, {arguments.part}: {facts}")
    with torch.no_grad(), toy(device, quick):
        if arguments.part == "batch":
            rows = batches(name, shape, 4 if quick else 32, device, dtype, repeats)
        else:
            rows = passes(name, shape, visible, device, dtype, speed, repeats)
    path = arguments.out / f"{arguments.part}-{name}-{device.type}-{facts['date']}.json"
    write_result(path, {"machine": facts, "rows": rows})
    missed = sum(row["met"] is False for row in rows)
    print(f"{missed} of {len(rows)} rows miss their bar; written: {path}")


if __name__ == "__main__":
    run_script(main)
