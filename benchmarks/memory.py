"""Memory per row, computed and measured, for shapes of large models: how many rows fit.

    python benchmarks/memory.py                                   # CUDA, bfloat16, a few minutes
    python benchmarks/memory.py --device meta --gigabytes 24      # the formula alone, at once
    python benchmarks/memory.py --device cpu --dtype float32 --scale tiny   # the script's own test

Measured is how much the peak grows with each row, from one row to two and from two to four: what
the allocator counts on CUDA, every operation's result on a CPU. It holds more than the formula by
what a forward pass needs while it runs, most of all over a prompt. Weights are random.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from step_speed import Shape, build, runner, shapes

from mmdecode.decoder import Decoder
from mmdecode.errors import run_script
from mmdecode.evaluation.speed.memory import row_bytes
from mmdecode.testing.drafts import Random
from mmdecode.testing.memory import LiveStorage

NODES = 4
ROWS = (1, 2, 4)
CALLS: dict[str, tuple[Callable[[], Decoder], dict[str, Any]]] = {
    "undrafted": (Decoder, {"argmax_only": True}),
    f"{NODES} nodes": (lambda: Decoder(Random()), {"nodes": NODES}),
}


def repeated(value: Any, count: int) -> Any:
    """The one row of an input, ``count`` times."""
    if isinstance(value, torch.Tensor):
        return value.repeat_interleave(count, 0)
    return type(value)(**{name: repeated(part, count) for name, part in value.items()})


def peak(device: torch.device, call: Callable[[], Any]) -> int:
    """The most bytes that a call holds at once, next to what was there before it."""
    if device.type != "cuda":
        with LiveStorage() as live:
            call()
        return live.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def slopes(device: torch.device, model: Any, shape: Shape, decoder: Decoder, inputs: Any) -> Any:
    """Bytes by which the peak grows with each row, inputs included."""
    peaks = []
    for rows in ROWS:

        def call(rows: int = rows) -> None:
            given = {name: repeated(value, rows) for name, value in inputs.items()}
            runner(model, given, shape.new, custom_generate=decoder)()

        peaks.append(peak(device, call))
    pairs = zip(peaks, peaks[1:], ROWS, ROWS[1:], strict=False)
    return [(after - before) / (many - few) for before, after, few, many in pairs]


def main() -> None:
    """Prints a line for each shape and call."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="meta computes and measures nothing")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--scale", default="full", choices=("full", "small", "tiny"))
    parser.add_argument("--gigabytes", type=float, default=80, help="weights and rows together")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("not run: there is no CUDA device here; --device meta computes without one")
        return
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    print(f"{device.type}, {arguments.dtype}, torch {torch.__version__}; megabytes per row\n")
    print(f"{'shape':18s}{'call':>12s}{'cache':>10s}{'source':>10s}{'scores':>10s}", end="")
    print(f"{'computed':>11s}{'measured':>22s}{'rows in ' + str(arguments.gigabytes) + ' GB':>18s}")
    for name, shape in shapes(arguments.scale).items():
        model, inputs = build(shape, device, dtype)
        weights = sum(p.nbytes for p in model.parameters())
        source = getattr(shape.config, "max_source_positions", 0)
        for label, (decoder, options) in CALLS.items():
            row = row_bytes(model, shape.prompt, shape.new, source=source, **options)
            fit = (arguments.gigabytes * 1e9 - weights) // row.total
            measured = "-"
            if device.type != "meta":
                found = slopes(device, model, shape, decoder(), inputs)
                measured = " ".join(f"{value / 1e6:.3f}" for value in found)
            parts = "".join(f"{v / 1e6:10.3f}" for v in (row.cache, row.source, row.scores))
            print(f"{name:18s}{label:>12s}{parts}{row.total / 1e6:11.3f}{measured:>22s}{fit:18.0f}")
        del model, inputs


if __name__ == "__main__":
    run_script(main)
