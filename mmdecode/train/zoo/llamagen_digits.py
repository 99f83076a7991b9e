"""Recipe of ``zoo:llamagen-digits``: a LlamaGen over the grey levels of scanned digits.

There is no image tokenizer: the codes of an 8 x 8 scan are the grey levels of its pixels, 0 to 16,
so that likelihoods are those of real images. Against overfitting on the 1,437 training scans, half
of them are shifted by up to a pixel, and training stops when the held-out likelihood no longer
improves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdecode.image_ar.sampling import Sampling
from mmdecode.models.llamagen import LlamaGenConfig, LlamaGenForImageGeneration
from mmdecode.train.loop import FitOptions, fit, save_half, write_state
from mmdecode.train.zoo import image_codes
from mmdecode.train.zoo.image_codes import Setting, write_setting
from mmdecode.zoo.scenes import digit_scans

LEVELS = 17
SIDE = 8
DIGITS = 10


@dataclass(frozen=True, kw_only=True)
class LlamaGenDigitsOptions:
    """Settings of the recipe.

    Attributes:
        width, layers, heads, inner: Sizes of the transformer; ``inner`` is its feed-forward width.
        shifted: Share of the scans in a batch that are shifted by up to one pixel.
        fit: Steps, learning rates and early stopping.
        setting: Decoding settings of the model.
        num_sampled: Number of images that are sampled to measure entropies.
        device: Device of the training.
    """

    width: int = 112
    layers: int = 4
    heads: int = 4
    inner: int = 288
    shifted: float = 0.5
    fit: FitOptions = field(
        default_factory=lambda: FitOptions(
            steps=4000, batch=64, peak_rate=1.5e-3, weight_decay=0.3, patience=8
        )
    )
    setting: Setting = field(default_factory=lambda: Setting(scale=1.5, sampling=Sampling()))
    num_sampled: int = 200
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Scans:
    """Scans of digits.

    Attributes:
        codes: Grey levels in raster order, 0 to 16, ``(n, 64)`` int64.
        classes: Digit of each scan, ``(n,)`` int64.
    """

    codes: Tensor
    classes: Tensor


def split() -> tuple[Scans, Scans, Scans]:
    """Splits the scans into training (80 %), development (10 %) and test (10 %).

    The development and test scans are the scans that `mmdecode.zoo.scenes` holds out.
    """
    scans, labels = (torch.from_numpy(part).long() for part in digit_scans())
    index = torch.arange(len(scans))
    parts = (index % 5 > 0, index % 10 == 5, index % 10 == 0)
    training, development, test = (
        Scans(codes=scans[rows].flatten(1), classes=labels[rows]) for rows in parts
    )
    return training, development, test


def shift(codes: Tensor, share: float, dice: torch.Generator) -> Tensor:
    """Shifts a share of scans ``(B, 64)`` by up to a pixel vertically and horizontally."""
    images = torch.nn.functional.pad(codes.view(-1, SIDE, SIDE), (1, 1, 1, 1))
    moved = torch.rand(len(codes), generator=dice) < share
    start = torch.randint(3, (len(codes), 2), generator=dice).where(moved[:, None], torch.tensor(1))
    span = torch.arange(SIDE)
    rows, columns = start[:, 0, None] + span, start[:, 1, None] + span
    picked = images[torch.arange(len(codes))[:, None, None], rows[:, :, None], columns[:, None]]
    return picked.flatten(1)


def build(options: LlamaGenDigitsOptions) -> LlamaGenForImageGeneration:
    """Builds the untrained transformer."""
    torch.manual_seed(options.fit.seed)
    return LlamaGenForImageGeneration(
        LlamaGenConfig(
            vocab_size=LEVELS,
            hidden_size=options.width,
            intermediate_size=options.inner,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            grid_size=SIDE,
            num_classes=DIGITS,
            grey=True,
            initializer_range=0.03,
        )
    )


def loss_at(
    model: LlamaGenForImageGeneration, training: Scans, options: LlamaGenDigitsOptions, step: int
) -> Tensor:
    """Computes the mean negative log-likelihood of a step's batch, in nats per code."""
    fit = options.fit
    dice = fit.dice(step)
    rows = torch.randint(len(training.codes), (fit.batch,), generator=dice)
    left_out = torch.rand(fit.batch, generator=dice) < fit.condition_dropout
    classes = training.classes[rows].to(model.device)
    classes = image_codes.dropped(model, classes, left_out.to(model.device))
    codes = shift(training.codes[rows], options.shifted, dice)
    return image_codes.code_loss(model, classes, codes.to(model.device))


def run(options: LlamaGenDigitsOptions, work: Path, out: Path) -> dict[str, Any]:
    """Trains the model, or resumes its training, and writes its card.

    Args:
        options: Settings.
        work: Folder of the training state.
        out: Folder of the model.
    """
    torch.set_num_threads(1)
    training, development, test = split()
    model, best = build(options).to(options.device), work / "best.pt"

    def keep() -> None:
        write_state(best, model.state_dict())
        save_half(model, out)
        write_setting(options.setting, out)

    log = fit(
        model,
        loss_at=partial(loss_at, model, training, options),
        held_out=lambda: image_codes.bits_per_code(model, development.classes, development.codes),
        keep=keep,
        options=options.fit,
        work=work,
    )
    model = model.cpu().eval()
    model.load_state_dict(torch.load(best, map_location="cpu", weights_only=True))
    best_at = min(log, key=lambda row: row["held_out"])
    bits = {
        name: round(image_codes.bits_per_code(model, part.classes, part.codes), 3)
        for name, part in (("training", training), ("development", development), ("test", test))
    }
    numbers = {
        "steps": int(best_at["step"]),
        "minutes": round(log[-1]["seconds"] / 60, 1),
        "parameters": model.num_parameters(),
        "bits_per_code": bits,
        "position_entropy_bits": round(image_codes.position_entropy(training.codes), 3),
        **image_codes.distributions_of(
            model, torch.arange(options.num_sampled) % DIGITS, options.setting
        ),
        "decoding": options.setting.described(),
    }
    return {"folder": str(out)} | describe(numbers, options, out)


def describe(
    numbers: dict[str, Any], options: LlamaGenDigitsOptions, folder: Path
) -> dict[str, Any]:
    """Writes ``card.json`` and ``README.md`` of the model; returns the card."""
    bits, scale = numbers["bits_per_code"], options.setting.scale
    return image_codes.write_card(
        folder,
        recipe="llamagen-digits",
        what=f"LlamaGen of {numbers['parameters'] / 1e6:.2f} M parameters over grey levels: 8 x 8 "
        f"scans of ten digits in {LEVELS} levels, no tokenizer",
        measured=f"{bits['test']} bits per pixel of held-out scans, {bits['training']} of those it "
        f"learned (positions alone: {numbers['position_entropy_bits']}); what it decodes by has "
        f"{numbers['guided']['law_entropy_bits']} bits at guidance {scale:g}",
        facts=[
            "Data: the 1,797 scans of `mmdecode/zoo/data/digits.npz` (see `digits.md` there); a "
            "tenth decided when to stop, another gave the numbers, the rest was learned, half of "
            "the time shifted by up to a pixel.",
            "Codes are grey levels: 0 is paper, shown black, 16 is ink, shown white.",
            f"Meant to be decoded with guidance {scale:g}, where s = 1 is none, temperature "
            f"{options.setting.sampling.temperature:g}, and without top-k and top-p.",
        ],
        numbers=numbers,
    )
