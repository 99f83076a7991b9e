"""Training loop of small models and drafters, resumable, with early stopping on held-out data."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdecode.errors import OptionError
from mmdecode.runs.files import write_file, write_folder
from mmdecode.train.distributed import Alone

BITS = 1 / math.log(2)
Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Settings of `fit`: steps, batch size, learning rates and early stopping.

    Attributes:
        steps: Maximum number of steps; the learning rate falls over the last two thirds.
        batch: Examples per step.
        peak_rate: Highest learning rate of AdamW.
        matrix_rate: Highest learning rate of Muon, which then trains the matrices of the
            transformer layers; 0: AdamW trains all weights.
        weight_decay: Weight decay of matrices.
        condition_dropout: Share of examples whose condition is dropped, for classifier-free
            guidance.
        every: Number of steps between evaluations on held-out data.
        patience: Number of evaluations without improvement after which training stops.
        seed: Seed of the training; the batch of a step depends only on the seed and the step.
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
        """Returns the random generator of a step, seeded with ``seed`` and the step."""
        return torch.Generator().manual_seed(self.seed * 2**32 + step)

    def share_at(self, step: int) -> float:
        """Returns the learning rate of a step, divided by the highest learning rate."""
        left = 1.5 * (1 - step / self.steps)
        return min(1.0, (step + 1) / 100, left + 0.03)


def progress(steps: Sequence[int], what: str) -> Iterable[int]:
    """Iterates over steps with a progress bar on stderr, whose label is ``what``."""
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
        loss_at: Returns the loss of a step's batch, usually the mean negative log-likelihood in
            nats.
        held_out: Returns the loss on held-out data, usually in bits; lower is better.
        keep: Saves the weights; called after each evaluation with a new lowest held-out loss.
        options: Steps, learning rates and early stopping.
        work: Folder of the training state and log; if it has a state, training resumes from it.
        worker: Process, device and precision; ``None``: this process, in float32.

    Returns:
        One row for each evaluation: ``step``, ``train`` (moving average of the training loss in
        bits), ``held_out`` and ``seconds`` of training so far.
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
    """Builds AdamW, and Muon for the matrices of the layers if ``options.matrix_rate`` is not 0."""
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
    """Returns whether none of the last ``patience`` evaluations improved the held-out loss."""
    values = [row["held_out"] for row in log]
    return bool(values) and len(values) - 1 - values.index(min(values)) >= patience


def boxed(batches: Iterable[Batch], spent_s: float = 0.0) -> Iterator[tuple[Batch, float]]:
    """Yields batches with the seconds of training so far, for trainings that end with time.

    Args:
        batches: The batches.
        spent_s: Seconds of training before; time counts from the first batch on.
    """
    before: float | None = None
    for batch in batches:
        now = time.time()
        if before is not None:
            spent_s += min(now - before, 30.0)  # longer gaps are a suspended machine
        before = now
        yield batch, spent_s


class Epochs:
    """Epochs of a training that ends with the weights of its best epoch, resumable.

    Args:
        modules: Module with all trained weights.
        optimizer: Its optimizer.
        settings: Plain values that a training must share with the one it resumes.
        file: File of the training state, written after each epoch; a training resumes from it.
            ``None``: no state is written.

    Attributes:
        scores: Score of each finished epoch on held-out data; higher is better.

    Raises:
        OptionError: ``file`` is of a training with other settings.
    """

    def __init__(
        self,
        modules: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Sequence[Any],
        file: Path | None = None,
    ) -> None:
        self.modules, self.optimizer, self.file = modules, optimizer, file
        self.scores: list[float] = []
        self._best: dict[str, Any] | None = None
        self._settings = json.dumps(settings)
        if file is None or not file.exists():
            return
        state = torch.load(file, weights_only=True)
        if state.get("settings") != self._settings:  # earlier versions wrote none
            raise OptionError(
                f"{file} is the state of a training with other settings or data; delete it to "
                "start again, or give the same settings and data to resume"
            )
        modules.load_state_dict(state["modules"])
        optimizer.load_state_dict(state["optimizer"])
        self.scores, self._best = state["scores"], state["best"]

    def left(self, count: int, what: str) -> Iterable[int]:
        """Iterates over the epochs that are left, with a progress bar labelled ``what``."""
        return track(range(len(self.scores), count), description=what)

    def end(self, score: float) -> None:
        """Ends an epoch: keeps the weights if its score is the best so far, writes the state."""
        if score > max(self.scores, default=-math.inf):
            self._best = copy.deepcopy(self.modules.state_dict())
        self.scores.append(score)
        if self.file is not None:
            state = {
                "settings": self._settings,
                "modules": self.modules.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scores": self.scores,
                "best": self._best,
            }
            write_state(self.file, state)

    def load_best(self) -> None:
        """Loads the weights of the best epoch."""
        if self._best is not None:
            self.modules.load_state_dict(self._best)


def write_state(path: Path, state: Any) -> None:
    """Writes a training state, such as tensors by name, atomically."""
    write_folder(path.parent, lambda into: torch.save(state, into / path.name))


def save_half(model: PreTrainedModel, folder: Path) -> None:
    """Saves a model's weights in float16, with ``dtype`` float32 in ``config.json``.

    The files are half as large, and transformers loads the model in float32.
    """
    half = copy.deepcopy(model).half()

    def fill(into: Path) -> None:
        half.save_pretrained(into)
        say_float32(into)

    write_folder(folder, fill)


def say_float32(into: Path, *parts: str) -> None:
    """Sets ``dtype`` in a saved ``config.json`` to float32, so that the model is loaded in float32.

    Args:
        into: Folder of the saved model.
        parts: Keys of nested configurations to change too, such as ``text_config``.
    """
    file = into / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for one in (config, *(config[part] for part in parts)):
        one["dtype"] = "float32"
    write_file(file, json.dumps(config, indent=2, sort_keys=True) + "\n", overwrite=True)
