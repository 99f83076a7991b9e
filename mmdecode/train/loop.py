"""The training loop of small models: resumable, with early stopping on held-out data."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdecode.runs.files import write_file, write_folder
from mmdecode.train.distributed import Alone
from mmdecode.train.drafters.medusa import write_state

BITS = 1 / math.log(2)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Steps, learning rates and stopping of a training.

    Attributes:
        steps: Maximum number of steps; the learning rate falls over the last two thirds.
        batch: Examples per step.
        peak_rate: Highest learning rate (AdamW).
        matrix_rate: Learning rate of the layers' matrices under Muon, which needs fewer steps; 0:
            they are trained by AdamW like all other weights.
        weight_decay: Weight decay of matrices.
        condition_dropout: Share of examples whose condition is dropped, for classifier-free
            guidance.
        every: Steps between evaluations on held-out data.
        patience: Evaluations without improvement before training stops.
        seed: Seed of the training; a step's batch depends on it and the step alone.
    """

    steps: int
    batch: int = 16
    peak_rate: float = 2e-3
    matrix_rate: float = 0.0
    weight_decay: float = 0.05
    condition_dropout: float = 0.1
    every: int = 100
    patience: int = 5
    seed: int = 0

    def dice(self, step: int) -> torch.Generator:
        """Random generator of a step, seeded by ``seed`` and the step."""
        return torch.Generator().manual_seed(self.seed * 2**32 + step)

    def share_at(self, step: int) -> float:
        """Learning rate of a step as a share of the highest."""
        left = 1.5 * (1 - step / self.steps)
        return min(1.0, (step + 1) / 100, left + 0.03)


def progress(steps: Sequence[int], what: str) -> Iterable[int]:
    """Iterates over steps with a progress bar on the terminal."""
    return track(steps, description=what, console=Console(stderr=True))


def fit(
    learner: nn.Module,
    loss_at: Callable[[int], Tensor],
    held_out: Callable[[], float],
    keep: Callable[[], None],
    options: FitOptions,
    work: Path,
    worker: Alone | None = None,
) -> list[dict[str, float]]:
    """Trains until the held-out loss no longer improves.

    Args:
        learner: Module with all trained weights.
        loss_at: Mean negative log-likelihood in nats of a step's batch.
        held_out: Mean negative log-likelihood in bits of held-out data.
        keep: Called at each new best, to save the weights.
        options: Steps, learning rates and stopping.
        work: Folder of the training state and log, from which training resumes.
        worker: Process, device and precision; ``None``: this process, in float32.

    Returns:
        The log: step, training and held-out bits, seconds so far.
    """
    worker = worker or Alone()
    optimizers = optimizers_of(learner, options)
    state_file, begun = work / "state.pt", 0
    log: list[dict[str, float]] = []
    if state_file.exists():
        state = torch.load(state_file, map_location="cpu", weights_only=True)
        learner.load_state_dict(state["modules"])
        for optimizer, stored in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(stored)
        if worker.scaler is not None:
            worker.scaler.load_state_dict(state["scaler"])
        begun, log = state["step"], state["log"]
    started = time.monotonic() - (log[-1]["seconds"] if log else 0.0)
    average = math.nan
    steps = range(begun, options.steps)
    for step in steps if worker.rank else progress(steps, work.name):
        if stalled(log, options.patience):
            break
        learner.train()
        for group in (g for optimizer in optimizers for g in optimizer.param_groups):
            group["lr"] = group["peak"] * options.share_at(step)
        loss = loss_at(step)
        worker.backward(loss, learner)
        worker.step(learner, optimizers)
        now = float(loss.detach()) * BITS
        average = now if math.isnan(average) else average + 0.03 * (now - average)
        done = step + 1
        if done % options.every == 0 or done == options.steps:
            learner.eval()
            with torch.no_grad():
                found = worker.first(held_out)
            best = min((row["held_out"] for row in log), default=math.inf)
            seconds = time.monotonic() - started
            log.append({"step": done, "train": average, "held_out": found, "seconds": seconds})
            if worker.rank:
                continue
            if found < best:
                keep()
            parts: dict[str, Any] = {
                "modules": learner.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            }
            if worker.scaler is not None:
                parts["scaler"] = worker.scaler.state_dict()
            write_state(state_file, parts | {"step": done, "log": log})
            lines = [json.dumps({k: round(v, 4) for k, v in row.items()}) for row in log]
            write_file(work / "log.jsonl", "\n".join(lines) + "\n")
    return log


def optimizers_of(learner: nn.Module, options: FitOptions) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the layers' matrices if ``matrix_rate`` is not 0."""
    learned = {name: p for name, p in learner.named_parameters() if p.requires_grad}
    by_muon = {n: p for n, p in learned.items() if p.ndim == 2 and ".layers." in n}
    if not options.matrix_rate:
        by_muon = {}
    rest = [p for name, p in learned.items() if name not in by_muon]
    groups = [
        {
            "params": [p for p in rest if (p.ndim > 1) == wide],
            "weight_decay": options.weight_decay if wide else 0.0,
            "peak": options.peak_rate,
        }
        for wide in (True, False)
    ]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=options.peak_rate, betas=(0.9, 0.95))
    ]
    if by_muon:
        group = {"params": list(by_muon.values()), "peak": options.matrix_rate}
        found.append(
            torch.optim.Muon([group], lr=options.matrix_rate, weight_decay=options.weight_decay)
        )
    return found


def stalled(log: Sequence[dict[str, float]], patience: int) -> bool:
    """Whether the last ``patience`` evaluations brought no new best."""
    values = [row["held_out"] for row in log]
    return bool(values) and len(values) - 1 - values.index(min(values)) >= patience


def save_half(model: PreTrainedModel, folder: Path) -> None:
    """Saves half-precision weights with a configuration that says float32."""
    half = copy.deepcopy(model).half()

    def fill(into: Path) -> None:
        half.save_pretrained(into)
        say_float32(into)

    write_folder(folder, fill)


def say_float32(into: Path, *parts: str) -> None:
    """Corrects the ``config.json`` that was just saved, so that weights are loaded as float32.

    Args:
        into: Folder of the saved model.
        parts: Keys of inner configurations to correct too.
    """
    file = into / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for one in (config, *(config[part] for part in parts)):
        one["dtype"] = "float32"
    write_file(file, json.dumps(config, indent=2, sort_keys=True) + "\n", overwrite=True)
