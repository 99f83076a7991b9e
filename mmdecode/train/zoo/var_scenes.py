"""Recipe of ``zoo:var-scenes`` and ``zoo:var-scenes-small``: two VARs with one image tokenizer.

Output: a `MultiScaleVQ` tokenizer (64 x 64 pixels, seven grids up to 8 x 8, 155 codes per image)
and two `VarForImageGeneration`, conditioned on the noun of a scene's large object; the small one is
for collaborative decoding (CoDe) with the large one. All are trained from scratch. Images are
rendered during training (`mmdecode.zoo.scene_images`), and no image occurs twice, so that the
models cannot overfit a corpus.

The tokenizer is first trained as an autoencoder without quantisation. Then the codebook is
initialised with the residual latents of each scale, and rarely used codes are replaced by residual
latents of the batch.

Source: Tian et al. 2024, arXiv:2404.02905, for the losses of tokenizer and transformer; here
without perceptual and adversarial losses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdecode.image_ar.next_scale import VAR, NextScale
from mmdecode.models.multiscale_vq import MultiScaleVQ, MultiScaleVQConfig, Quantized, resized
from mmdecode.models.var import VarConfig, VarForImageGeneration
from mmdecode.runs.files import write_file
from mmdecode.train.drafters.ahead import Ahead
from mmdecode.train.loop import BITS, FitOptions, fit, save_half
from mmdecode.train.zoo.image_codes import entropy_of, write_card
from mmdecode.train.zoo.image_tokenizer import reconstruction_loss
from mmdecode.zoo.scene_images import labelled_images, rendered_images, to_pixels
from mmdecode.zoo.scenes import HELD_OUT, NOUNS

TOKENIZER = "var-scenes-tokenizer"
RENEWED_EVERY = 20  # steps
DEAD = 0.03  # usage below which a code is replaced, relative to uniform usage
COMMITMENT = 0.25  # as in the published tokenizer


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Size of a transformer.

    Attributes:
        width, layers, heads: Sizes of the transformer.
        shared_adaln: Whether the layers share the projection of the condition, see `VarConfig`;
            saves a third of the parameters at eight layers.
    """

    width: int
    layers: int
    heads: int
    shared_adaln: bool


@dataclass(frozen=True, kw_only=True)
class VarScenesOptions:
    """Settings of the recipe.

    Attributes:
        patch_nums: Side of the grid of codes at each scale.
        codebook_size, codebook_dim, channels, channel_multipliers, norm_groups: Sizes of the
            tokenizer.
        plain: Steps and learning rates of the tokenizer's training without quantisation.
        coded: Steps and learning rates of the tokenizer's training with quantisation.
        fitting: Steps and learning rates of each transformer's training.
        models: Sizes of the transformers by name.
        held_out: Number of held-out images that decide when training stops; the cards are measured
            on as many others.
        device: Device of the training.
        workers: Number of processes that render images; 0: they are rendered in this process.
    """

    patch_nums: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8)
    codebook_size: int = 256
    codebook_dim: int = 16
    channels: int = 16
    channel_multipliers: tuple[int, ...] = (1, 2, 2, 2)
    norm_groups: int = 8
    plain: FitOptions = field(
        default_factory=lambda: FitOptions(steps=300, batch=24, weight_decay=0.0, every=100)
    )
    coded: FitOptions = field(
        default_factory=lambda: FitOptions(steps=2700, batch=24, weight_decay=0.0, every=150)
    )
    fitting: FitOptions = field(default_factory=lambda: FitOptions(steps=3600, batch=16, every=200))
    models: dict[str, ModelShape] = field(
        default_factory=lambda: {
            "var-scenes": ModelShape(width=128, layers=8, heads=4, shared_adaln=True),
            "var-scenes-small": ModelShape(width=64, layers=4, heads=2, shared_adaln=False),
        }
    )
    held_out: int = 384
    device: str = "cpu"
    workers: int = 0

    def tokenizer(self) -> MultiScaleVQ:
        """Builds the untrained tokenizer; convolutions after each scale start as the identity."""
        torch.manual_seed(self.plain.seed)
        model = MultiScaleVQ(
            MultiScaleVQConfig(
                codebook_size=self.codebook_size,
                codebook_dim=self.codebook_dim,
                patch_nums=self.patch_nums,
                channels=self.channels,
                channel_multipliers=self.channel_multipliers,
                residual_blocks=1,
                norm_groups=self.norm_groups,
            )
        )
        for convolution in model.residual:
            nn.init.dirac_(convolution.weight)  # type: ignore[arg-type]
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        return model

    def transformer(self, shape: ModelShape) -> VarForImageGeneration:
        """Builds an untrained transformer."""
        torch.manual_seed(self.fitting.seed)
        return VarForImageGeneration(
            VarConfig(
                vocab_size=self.codebook_size,
                codebook_dim=self.codebook_dim,
                patch_nums=self.patch_nums,
                num_classes=len(NOUNS),
                hidden_size=shape.width,
                intermediate_size=4 * shape.width,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                shared_adaln=shape.shared_adaln,
                tokenizer=f"../{TOKENIZER}",
                id2label=dict(enumerate(NOUNS)),
            )
        )

    def development(self) -> range:
        """Returns the seeds of the images that decide when training stops."""
        return range(HELD_OUT, HELD_OUT + self.held_out)

    def test(self) -> range:
        """Returns the seeds of the images that the cards' numbers are measured on."""
        return range(HELD_OUT + 2**20, HELD_OUT + 2**20 + self.held_out)


def on_cuda() -> VarScenesOptions:
    """Returns the settings of the package's models: about ten minutes of training on a GPU."""
    plain = FitOptions(steps=400, batch=32, weight_decay=0.0, every=200)
    return VarScenesOptions(
        plain=plain,
        coded=replace(plain, steps=6000, every=500),
        fitting=FitOptions(steps=5000, batch=64, every=500),
        device="cuda",
        workers=6,
    )


def seeds_of(step: int, options: FitOptions, part: int) -> range:
    """Returns the seeds of a step's images; each part of the recipe has other seeds."""
    first = part * 2**36 + step * options.batch
    return range(first, first + options.batch)


# the tokenizer


class TokenizerLearner(nn.Module):
    """Tokenizer in training, with the moving average of each code's usage."""

    share: Tensor

    def __init__(self, tokenizer: MultiScaleVQ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        size = tokenizer.config.codebook_size
        self.register_buffer("share", torch.full((size,), 1 / size))

    def plain_loss(self, pixels: Tensor) -> Tensor:
        """Computes the reconstruction loss without quantisation."""
        return reconstruction_loss(self.tokenizer.decode(self.tokenizer.encode(pixels)), pixels)

    def coded_loss(self, pixels: Tensor, dice: torch.Generator, renew: bool) -> Tensor:
        """Computes the reconstruction loss with quantisation, plus all scales' codebook losses.

        Args:
            pixels: Pixels from -1 to 1, ``(B, 3, H, W)``.
            dice: Random generator of the replaced codes.
            renew: Whether to replace rarely used codes.
        """
        latents = self.tokenizer.encode(pixels)
        found = self.tokenizer.quantize(latents)
        last = found.running[:, -1]
        loss = reconstruction_loss(
            self.tokenizer.decode(latents + (last - latents).detach()), pixels
        )
        distance = F.mse_loss(found.running, latents.detach()[:, None].expand_as(found.running))
        pull = F.mse_loss(latents[:, None].expand_as(found.running), found.running.detach())
        size = len(self.share)
        used = torch.bincount(found.codes.flatten(), minlength=size) / found.codes.numel()
        self.share.lerp_(used, 0.05)
        if renew:
            self._renew(latents.detach(), found, dice)
        return loss + distance + COMMITMENT * pull

    @torch.no_grad()
    def _renew(self, latents: Tensor, found: Quantized, dice: torch.Generator) -> None:
        """Replaces rarely used codes by residual latents of random scales."""
        size = len(self.share)
        dead = (self.share * size < DEAD).nonzero().flatten()
        wanted = []
        for scale, side in enumerate(self.tokenizer.config.patch_nums):
            before = found.running[:, scale - 1] if scale else torch.zeros_like(latents)
            left = resized(latents - before, side).permute(0, 2, 3, 1).flatten(0, 2)
            wanted.append(left[torch.randint(len(left), (len(dead),), generator=dice)])
        scales = torch.randint(len(wanted), (len(dead),), generator=dice)
        self.tokenizer.codebook.weight[dead] = torch.stack(wanted)[scales, torch.arange(len(dead))]
        self.share[dead] = 1 / size


@torch.no_grad()
def lay_codebook(tokenizer: MultiScaleVQ, latents: Tensor, dice: torch.Generator) -> None:
    """Initialises the codebook with residual latents, the same number of codes for each scale.

    Args:
        tokenizer: Tokenizer whose codebook is set.
        latents: Encoder outputs of some images, ``(B, D, H, W)``.
        dice: Random generator that selects the latents.
    """
    sides = tokenizer.config.patch_nums
    rows = tokenizer.codebook.weight
    edges = np.linspace(0, len(rows), len(sides) + 1).astype(int)
    f_hat = torch.zeros_like(latents)
    for scale, side in enumerate(sides):
        left = resized(latents - f_hat, side).permute(0, 2, 3, 1).flatten(0, 2)
        chosen = torch.randint(len(left), (edges[scale + 1] - edges[scale],), generator=dice)
        rows[edges[scale] : edges[scale + 1]] = left[chosen]
        rows[edges[scale + 1] :] = rows[0]  # duplicates of the first code, which are never chosen
        codes = tokenizer.nearest(left).view(len(latents), -1)
        f_hat = tokenizer.add_scale(f_hat, codes, scale)


def train_tokenizer(options: VarScenesOptions, work: Path, out: Path) -> MultiScaleVQ:
    """Trains the tokenizer, or resumes its training, and returns it.

    Args:
        options: Settings.
        work: Folder of the training state.
        out: Folder to write the tokenizer to.
    """
    learner = TokenizerLearner(options.tokenizer()).to(options.device)
    tokenizer = learner.tokenizer
    seen = to_pixels(rendered_images(options.development())).to(options.device)

    def rendered(fitting: FitOptions, part: int) -> Ahead[np.ndarray]:
        return Ahead(
            lambda step: rendered_images(seeds_of(step, fitting, part)),
            fitting.steps,
            options.workers,
        )

    blank, coming = rendered(options.plain, 0), rendered(options.coded, 2)

    def plain(step: int) -> Tensor:
        return learner.plain_loss(to_pixels(blank(step)).to(options.device))

    fit(
        learner,
        plain,
        lambda: in_parts(learner.plain_loss, seen) * BITS,
        lambda: None,
        options.plain,
        work / "plain",
    )
    with torch.no_grad():
        first = to_pixels(rendered_images(seeds_of(0, options.plain, 1)))
        latents = tokenizer.encode(first.to(options.device))
    lay_codebook(tokenizer, latents, options.plain.dice(0))

    def coded(step: int) -> Tensor:
        pixels = to_pixels(coming(step)).to(options.device)
        return learner.coded_loss(pixels, options.coded.dice(step), step % RENEWED_EVERY == 0)

    fit(
        learner,
        coded,
        lambda: in_parts(lambda part: reconstruction_loss(tokenizer(part), part), seen) * BITS,
        lambda: save_half(tokenizer, out),
        options.coded,
        work / "coded",
    )
    return MultiScaleVQ.from_pretrained(out).eval()


@torch.no_grad()
def in_parts(loss: Any, pixels: Tensor, batch: int = 32) -> float:
    """Computes the mean of a loss over images, in batches."""
    parts = pixels.split(batch)
    return sum(float(loss(part)) * len(part) for part in parts) / len(pixels)


# the transformers


@torch.no_grad()
def encoded(
    tokenizer: MultiScaleVQ, classes: Sequence[int], images: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Encodes images; returns classes ``(n,)`` and codes ``(n, L)`` on the tokenizer's device."""
    device = tokenizer.device
    parts = to_pixels(images).split(64)
    codes = [tokenizer.quantize(tokenizer.encode(part.to(device))).codes for part in parts]
    return torch.tensor(classes, device=device), torch.cat(codes)


def code_losses(
    model: VarForImageGeneration, tokenizer: MultiScaleVQ, classes: Tensor, codes: Tensor
) -> Tensor:
    """Computes the negative log-likelihood of every code in nats, ``(B, L)``."""
    with torch.no_grad():
        inputs = tokenizer.inputs_of(codes)
    return F.cross_entropy(model(classes, inputs).mT, codes, reduction="none")


@torch.no_grad()
def mean_losses(
    model: VarForImageGeneration, tokenizer: MultiScaleVQ, classes: Tensor, codes: Tensor
) -> Tensor:
    """Computes the negative log2-likelihood at each position, averaged over images, ``(L,)``."""
    rows = zip(classes.split(32), codes.split(32), strict=True)
    parts = [code_losses(model, tokenizer, *row) for row in rows]
    return torch.cat(parts).mean(0) * BITS


def train_transformer(
    name: str, options: VarScenesOptions, tokenizer: MultiScaleVQ, work: Path, out: Path
) -> VarForImageGeneration:
    """Trains a transformer, or resumes its training, and returns it.

    Args:
        name: Name of the transformer in ``options.models``.
        options: Settings.
        tokenizer: The trained tokenizer.
        work: Folder of the training state.
        out: Folder to write the transformer to.
    """
    model = options.transformer(options.models[name]).to(options.device)
    tokenizer = tokenizer.to(options.device)
    classes, codes = encoded(tokenizer, *labelled_images(options.development()))
    fitting = options.fitting
    coming = Ahead(
        lambda step: labelled_images(seeds_of(step, fitting, 3)), fitting.steps, options.workers
    )

    def loss_at(step: int) -> Tensor:
        labels, codes = encoded(tokenizer, *coming(step))
        dropped = torch.rand(len(labels), generator=fitting.dice(step)) < fitting.condition_dropout
        labels = labels.masked_fill(dropped.to(labels.device), model.null_class)
        return code_losses(model, tokenizer, labels, codes).mean()

    fit(
        model,
        loss_at,
        lambda: float(mean_losses(model, tokenizer, classes, codes).mean()),
        lambda: save_half(model, out),
        fitting,
        work,
    )
    return VarForImageGeneration.from_pretrained(out).eval()


# cards


@torch.no_grad()
def measure_tokenizer(tokenizer: MultiScaleVQ, pixels: Tensor) -> dict[str, Any]:
    """Measures a tokenizer's codebook usage, entropy by scale and PSNR on ``(n, 3, H, W)``."""
    size, starts = tokenizer.config.codebook_size, tokenizer.starts
    codes, errors = [], []
    for part in pixels.split(32):
        found = tokenizer.quantize(tokenizer.encode(part))
        decoded = tokenizer.decode(found.running[:, -1]).clamp(-1, 1)
        codes.append(found.codes)
        errors.append(((decoded - part) / 2).square().flatten(1).mean(1))
    joined = torch.cat(codes)
    entropies = []
    for begin, end in pairwise(starts):
        share = torch.bincount(joined[:, begin:end].flatten(), minlength=size).double()
        share /= share.sum()
        entropies.append(round(float(-(share * share.clamp_min(1e-12).log2()).sum()), 3))
    return {
        "codes_used": round(len(joined.unique()) / size, 4),
        "code_entropy_bits_by_scale": entropies,
        "psnr_db": round(float(-10 * torch.cat(errors).log10().mean()), 2),
    }


@torch.no_grad()
def measure_transformer(
    model: VarForImageGeneration, tokenizer: MultiScaleVQ, classes: Tensor, codes: Tensor
) -> dict[str, Any]:
    """Measures bits per code with and without class, and the entropy when sampling images.

    Args:
        model: The transformer.
        tokenizer: Its tokenizer.
        classes: Classes of held-out images, ``(n,)``.
        codes: Codes of held-out images, ``(n, L)``.
    """
    starts = tokenizer.starts
    known = mean_losses(model, tokenizer, classes, codes)
    nothing = mean_losses(model, tokenizer, torch.full_like(classes, model.null_class), codes)
    maker = NextScale(model, tokenizer)
    sampled = maker.generate(classes[:64]).codes
    logprobs = VAR.sampling_of(0).warp(maker.score(classes[:64], sampled)).log_softmax(-1)
    return {
        "bits_per_code": round(float(known.mean()), 4),
        "bits_per_code_by_scale": [
            round(float(known[begin:end].mean()), 3) for begin, end in pairwise(starts)
        ],
        "bits_per_code_without_class": round(float(nothing.mean()), 4),
        "entropy_bits_when_drawn": round(float(entropy_of(logprobs).mean()), 3),
        "guidance": VAR.guidance,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def write_cards(options: VarScenesOptions, out: Path) -> dict[str, Any]:
    """Measures the models in ``out`` and writes their cards; returns the numbers by model."""
    tokenizer = MultiScaleVQ.from_pretrained(out / TOKENIZER).eval()
    classes, codes = encoded(tokenizer, *labelled_images(options.test()))
    found = {TOKENIZER: measure_tokenizer(tokenizer, to_pixels(rendered_images(options.test())))}
    images = {"images": len(classes)}
    facts = [
        "Data: pictures of `mmdecode/zoo/scene_images.py`, rendered while it trains; none "
        "occurs twice.",
        f"Held out by seed, and for digits by scan; the numbers are of {len(classes)} images that "
        "training never saw and that did not decide when to stop.",
    ]
    card = partial(write_card, recipe="var-scenes", facts=facts)
    seen = found[TOKENIZER]
    grids = ", ".join(map(str, options.patch_nums))
    card(
        out / TOKENIZER,
        what=f"Multi-scale tokenizer of {tokenizer.config.side} x {tokenizer.config.side} pixels: "
        f"grids of {grids}, {options.codebook_size} codes of {options.codebook_dim} numbers",
        measured=f"{100 * seen['codes_used']:.1f} % of the codes occur, PSNR {seen['psnr_db']} dB",
        numbers=seen | images,
    )
    for name, shape in options.models.items():
        model = VarForImageGeneration.from_pretrained(out / name).eval()
        found[name] = seen = measure_transformer(model, tokenizer, classes, codes)
        card(
            out / name,
            what=f"VAR of {seen['parameters'] / 1e6:.2f} M parameters, {shape.layers} layers of "
            f"width {shape.width}: {codes.shape[1]} codes in {len(options.patch_nums)} scales, "
            f"for one of {len(NOUNS)} nouns",
            measured=f"{seen['bits_per_code']} bits per held-out code, without the class "
            f"{seen['bits_per_code_without_class']}; entropy {seen['entropy_bits_when_drawn']} "
            f"bits when drawn as VAR was published",
            numbers=seen | images,
        )
    return found


def run(options: VarScenesOptions, work: Path, out: Path) -> dict[str, Any]:
    """Trains all models, or resumes their training, and writes their cards.

    Args:
        options: Settings.
        work: Folder of the training states.
        out: Folder of the results, with one subfolder for each model.
    """
    tokenizer = train_tokenizer(options, work / "tokenizer", out / TOKENIZER)
    for name in options.models:
        train_transformer(name, options, tokenizer, work / name, out / name)
    numbers = write_cards(options, out)
    for name in numbers:
        write_file(out / name / "recipe.json", json.dumps(asdict(options), indent=2) + "\n")
    weights = sum(file.stat().st_size for file in out.glob("*/model.safetensors"))
    return {"folder": str(out), "weights_mb": round(weights / 1e6, 2)} | numbers
