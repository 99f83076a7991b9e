"""Training of a small VQ image tokenizer of LlamaGen's architecture, on one CPU core.

The model (`mmdecode.models.vq`) is first trained as an autoencoder without quantisation. Then the
codebook is initialised by k-means over the latents of a few batches, and each code is updated as
the moving average of the latents quantised to it. A rarely used code is replaced by a latent of the
batch. The loss is the mean absolute error of pixels and of their horizontal and vertical
differences; there is no perceptual and no adversarial loss.

Source: Sun et al. 2024, arXiv:2406.06525, section 2.1, for the lookup; van den Oord et al. 2017,
arXiv:1711.00937, for straight-through gradients, commitment and the moving average.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdecode.models.vq import VQConfig, VQModel
from mmdecode.runs.files import append_line, open_append
from mmdecode.train.loop import progress, save_half, write_state
from mmdecode.zoo.scene_images import to_pixels

Renderer = Callable[[Sequence[int]], np.ndarray]
"""Function that renders the images of seeds, ``(B, H, W, 3)`` uint8."""

INIT_BATCHES = 8
DEAD = 0.02  # usage below which a code is replaced, relative to uniform usage


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """Settings of an image tokenizer's training.

    Attributes:
        steps: Total number of steps; the learning rate has a cosine schedule.
        plain_steps: Number of first steps without quantisation.
        batch: Images per step.
        peak_rate: Highest learning rate (Adam).
        commitment: Weight of the commitment loss.
        decay: Decay of the codebook's moving average.
        codebook_size, codebook_dim, channels, channel_multipliers, residual_blocks,
            latent_channels, norm_groups: See `VQConfig`.
        seed: Seed of the training; the images of a step depend only on the seed and the step.
    """

    steps: int = 1800
    plain_steps: int = 250
    batch: int = 24
    peak_rate: float = 2e-3
    commitment: float = 0.25
    decay: float = 0.97
    codebook_size: int = 512
    codebook_dim: int = 8
    channels: int = 16
    channel_multipliers: tuple[int, ...] = (1, 2, 3)
    residual_blocks: int = 1
    latent_channels: int = 48
    norm_groups: int = 4
    seed: int = 0

    def build(self) -> VQModel:
        """Builds the untrained tokenizer."""
        torch.manual_seed(self.seed)
        names = VQConfig.__annotations__
        return VQModel(VQConfig(**{k: v for k, v in vars(self).items() if k in names}))


class Codebook:
    """Codebook whose codes are moving averages of the latents quantised to them.

    Args:
        model: Tokenizer whose codebook is updated.
        decay: Decay of the moving average.
    """

    def __init__(self, model: VQModel, decay: float) -> None:
        self.rows = model.quantize.embedding.weight
        self.rows.requires_grad_(False)
        self.decay = decay
        self.sums = self.rows.clone()
        self.counts = torch.ones_like(self.rows[:, 0])

    def begin(self, latents: Tensor, dice: torch.Generator) -> None:
        """Initialises the codes by spherical k-means over unit-norm latents, ``(n, D)``."""
        size = len(self.rows)
        centres = latents[torch.randperm(len(latents), generator=dice)[:size]]
        for _ in range(10):
            chosen = (latents @ centres.T).argmax(-1)
            sums = torch.zeros_like(centres).index_add_(0, chosen, latents)
            counts = torch.bincount(chosen, minlength=size)
            empty = (counts == 0).nonzero().flatten()
            sums[empty] = latents[torch.randperm(len(latents), generator=dice)[: len(empty)]]
            centres = F.normalize(sums, dim=-1)
        self.counts.fill_(len(latents) / size)
        self.sums = centres * self.counts[:, None]
        self.rows.copy_(centres)

    def follow(self, latents: Tensor, chosen: Tensor, dice: torch.Generator) -> None:
        """Updates the moving averages with a batch; replaces rarely used codes by random latents.

        Args:
            latents: Unit-norm latents, ``(n, D)``.
            chosen: Code that each latent is quantised to, ``(n,)``.
            dice: Random generator of the replacements.
        """
        counts = torch.bincount(chosen, minlength=len(self.rows)).float()
        sums = torch.zeros_like(self.sums).index_add_(0, chosen, latents)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        usual = len(latents) / len(self.rows)
        dead = (self.counts < DEAD * usual).nonzero().flatten()
        moved = latents[torch.randint(len(latents), (len(dead),), generator=dice)]
        self.counts[dead] = 0.3 * usual
        self.sums[dead] = 0.3 * usual * moved
        self.rows.copy_(F.normalize(self.sums, dim=-1))

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that `load` needs to resume a training."""
        return {"sums": self.sums, "counts": self.counts}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restores the tensors that `state` returned."""
        self.sums, self.counts = state["sums"], state["counts"]


def reconstruction_loss(found: Tensor, wanted: Tensor) -> Tensor:
    """Computes the mean absolute error of pixels and of horizontal and vertical differences."""
    error = found - wanted
    across, down = error.diff(dim=3).abs().mean(), error.diff(dim=2).abs().mean()
    return error.abs().mean() + 0.5 * (across + down)


def seeds_of(step: int, options: TokenizerOptions) -> range:
    """Returns the seeds of a step's images, which no other step has."""
    first = options.seed * 2**36 + step * options.batch
    return range(first, first + options.batch)


def train(
    options: TokenizerOptions,
    render: Renderer,
    work: Path,
    out: Path,
    *,
    save_every_s: float = 120.0,
) -> None:
    """Trains a tokenizer, or resumes its training.

    Args:
        options: Settings.
        render: Renders the images of seeds.
        work: Folder of the training state and log.
        out: Folder to write the tokenizer to.
        save_every_s: Seconds between saves of the training state.
    """
    model = options.build().train()
    codebook = Codebook(model, options.decay)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learned, lr=options.peak_rate, betas=(0.9, 0.95))
    state_file, begun = work / "state.pt", 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        codebook.load(state["codebook"])
        begun = state["step"]

    def save(done: int, loss: float) -> None:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        write_state(state_file, parts | {"codebook": codebook.state(), "step": done})
        with open_append(work / "log.jsonl") as log:
            row = json.dumps({"step": done, "loss": round(loss, 4)})
            append_line(log, row.encode() + b"\n")

    average, saved = math.nan, time.monotonic()
    for step in progress(range(begun, options.steps), "tokenizer"):
        dice = torch.Generator().manual_seed(step)
        if step == options.plain_steps:
            begin_codebook(model, codebook, render, options, dice)
        wave = 0.5 * (1 + math.cos(math.pi * step / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = options.peak_rate * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * wave)
        pixels = to_pixels(render(seeds_of(step, options)))
        latents = F.normalize(model.latents(pixels), dim=1)
        if step < options.plain_steps:
            loss = reconstruction_loss(model.decode(latents), pixels)
        else:
            flat = latents.detach().permute(0, 2, 3, 1).flatten(0, 2)
            chosen = (flat @ model.codes.T).argmax(-1)
            codes = chosen.view(len(latents), *latents.shape[2:])
            rows = model.lookup(codes)
            loss = reconstruction_loss(model.decode(latents + (rows - latents).detach()), pixels)
            loss = loss + options.commitment * (rows - latents).square().sum(1).mean()
            codebook.follow(flat, chosen, dice)
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        now = float(loss.detach())
        average = now if math.isnan(average) else average + 0.02 * (now - average)
        if time.monotonic() - saved > save_every_s:
            save(step + 1, average)
            saved = time.monotonic()
    save(options.steps, average)
    save_half(model, out)


@torch.no_grad()
def begin_codebook(
    model: VQModel,
    codebook: Codebook,
    render: Renderer,
    options: TokenizerOptions,
    dice: torch.Generator,
) -> None:
    """Initialises the codebook by k-means over latents of images that are not trained on."""
    found = []
    for index in range(INIT_BATCHES):
        pixels = to_pixels(render(seeds_of(options.steps + index, options)))
        found.append(model.latents(pixels).permute(0, 2, 3, 1).flatten(0, 2))
    codebook.begin(F.normalize(torch.cat(found), dim=-1), dice)


@torch.no_grad()
def measure(model: VQModel, pixels: Tensor) -> dict[str, Any]:
    """Measures a tokenizer on held-out images ``(B, 3, H, W)``.

    Returns:
        ``codes_used``: share of the codes that occur; ``code_entropy_bits``: entropy of the codes;
        ``psnr_db``: PSNR in dB; ``interchange_mse``: by r, the mean squared error between images
        decoded from their codes and from each code's r-th nearest code, or from random codes.
    """
    model.eval()
    codes = model.encode(pixels)
    plain = model.decode_codes(codes)
    size = model.config.codebook_size
    share = torch.bincount(codes.flatten(), minlength=size) / codes.numel()
    entropy = -(share * share.clamp_min(1e-12).log2()).sum()
    error = ((plain.clamp(-1, 1) - pixels) / 2).square().flatten(1).mean(1)
    order = (model.codes @ model.codes.T).argsort(-1, descending=True)
    random_codes = torch.randint(size, codes.shape, generator=torch.Generator().manual_seed(0))

    def changed(other: Tensor) -> float:
        return round(float(((model.decode_codes(other) - plain) / 2).square().mean()), 6)

    ranks = [r for r in (1, 2, 4, 8, 16, 32, 64, 128, 256) if r < size]
    return {
        "codes_used": round(float((share > 0).float().mean()), 4),
        "code_entropy_bits": round(float(entropy), 3),
        "psnr_db": round(float(-10 * error.log10().mean()), 2),
        "interchange_mse": {str(r): changed(order[:, r][codes]) for r in ranks}
        | {"random": changed(random_codes)},
    }
