"""Peak memory of each engine, in a process of its own. A part of asr_speed.py.

A child imports torch, transformers and CTranslate2, builds one engine and decodes one window: what
its resident memory grew by is *loaded*: weights, and code that is imported on first use. Then it
takes batches of growing size from features to ids, encoder included: *peak* is the most resident
memory over that of the loaded engine (Linux's VmHWM, set back before each batch); what an allocator
kept from loading is used up first. On CUDA both are what torch's allocator handed out.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import peers
import torch
from peers import Checkpoint, rows_of
from speech import windows
from widen import laid_out

from mmdecode.errors import run_script

STATUS = Path("/proc/self/status")


def resident(name: str) -> int:
    """Kilobytes of an entry of Linux's process status."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


def now(device: torch.device) -> float:
    """Megabytes in use."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated() / 1e6
    return resident("VmRSS") * 1024 / 1e6


def reset(device: torch.device) -> None:
    """Resets the peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> float:
    """The most megabytes since `reset`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return resident("VmHWM") * 1024 / 1e6


def child(name: str, checkpoint: Checkpoint, batches: list[int]) -> dict[str, Any]:
    """One engine's megabytes."""
    device = checkpoint.device
    features = windows(checkpoint.extractor, max(batches))
    if checkpoint.wide:
        features = laid_out(features, checkpoint.settings.config)
    features = features.to(device, checkpoint.dtype)
    if peers.has_ctranslate2(device):
        import ctranslate2  # noqa: F401
    before = now(device)
    engine = peers.MAKERS[name](checkpoint, False)

    def decode(batch: int) -> None:
        given = features[:batch]
        states = given if engine.encode is None else engine.encode(given)
        rows_of(engine.decode(states), checkpoint.settings)

    decode(1)
    loaded = now(device)
    peaks = {}
    for batch in sorted(batches):
        if name in peers.names(batch, device):
            reset(device)
            decode(batch)
            peaks[str(batch)] = round(peak(device) - loaded, 1)
    return {"engine": name, "loaded_mb": round(loaded - before, 1), "peak_mb": peaks}


def measure(checkpoint: Checkpoint, chosen: list[str], batches: list[int]) -> list[dict[str, Any]]:
    """All engines, one after another; empty where memory cannot be read."""
    if checkpoint.device.type != "cuda" and not STATUS.exists():
        print("\nmemory is left out: it is read from Linux's /proc")
        return []
    print("\nmemory, each engine in a process of its own", flush=True)
    rows = []
    for name in peers.names(1, checkpoint.device):
        if name not in chosen or name == "generate again":
            continue
        words = ["--engine", name, "--model", checkpoint.name, "--draft", checkpoint.draft]
        words += ["--device", str(checkpoint.device), "--dtype", str(checkpoint.dtype)[6:]]
        words += ["--batch-size", *map(str, batches)]
        words += ["--wide"] if checkpoint.wide else []
        if name in peers.CTRANSLATE2:
            words += ["--converted", str(checkpoint.convert())]
        command = [sys.executable, __file__, *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"  {rows[-1]}", flush=True)
    return rows


def main() -> None:
    """Measures one engine, and prints it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=peers.MAKERS, required=True)
    parser.add_argument("--model", default="zoo:whisper-synth")
    parser.add_argument("--draft", default="zoo:whisper-synth-medusa")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--converted", type=Path, help="the weights for CTranslate2")
    parser.add_argument("--wide", action="store_true", help="the model was widened")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    device = torch.device(arguments.device)
    checkpoint = Checkpoint(
        arguments.model,
        arguments.draft,
        device,
        dtype,
        folder=arguments.converted,
        apart=False,
        wide=arguments.wide,
    )
    print(json.dumps(child(arguments.engine, checkpoint, arguments.batch_size)))


if __name__ == "__main__":
    run_script(main)
