"""VAR's image tokenizer: one codebook, used on grids of growing size that code the residual.

The latents f of an image are approximated by a sum over scales. At each scale the residual of f is
averaged onto a grid of ``side * side`` positions, and each position takes its nearest code; the
codes are enlarged to the full grid, pass a convolution and are added to the running sum f_hat. The
transformer of VAR, which generates codes scale by scale, reads f_hat averaged onto the next grid.

Source: Tian et al. 2024, arXiv:2404.02905, algorithms 1 and 2; layout of FoundationVision/VAR
``models/vqvae.py`` and ``models/quant.py``, read by `load_published`. Differs from it: codes are
compared by distance only (not by cosine), and the scales always share convolutions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from mmdecode.errors import InputError, ShapeError
from mmdecode.models.vqgan import ConvolutionalModel, Encoder, PixelDecoder, split_joint_projection
from mmdecode.weights import fill, published_weights

if TYPE_CHECKING:
    from pathlib import Path

PATCH_NUMS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)  # of the published models for 256 pixels


class MultiScaleVQConfig(PreTrainedConfig):
    """Shape of a tokenizer.

    Attributes:
        codebook_size, codebook_dim: Number of codes and their width.
        patch_nums: Side of each scale's grid, ascending; the last is the side of the latents.
        channels: Width of the finest level of encoder and decoder.
        channel_multipliers: Width of each level as a multiple of ``channels``; an image is halved
            between levels, so that with five levels a latent covers 16 x 16 pixels.
        residual_blocks: Residual blocks per level of the encoder; the decoder has one more.
        norm_groups: Groups of every normalisation; divides all widths.
        kernel: Side of the convolutions between encoder, codebook and decoder.
        residual_convolutions: Number of convolutions, which the scales share.
        residual_share: Weight s of a convolution in ``(1 - s) x + s conv(x)``.
    """

    model_type = "multiscale_vq"
    codebook_size: int = 4096
    codebook_dim: int = 32
    patch_nums: tuple[int, ...] = PATCH_NUMS
    channels: int = 160
    channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    residual_blocks: int = 2
    norm_groups: int = 32
    kernel: int = 3
    residual_convolutions: int = 4
    residual_share: float = 0.5

    @property
    def factor(self) -> int:
        """Height and width in pixels of the patch of a latent."""
        return int(2 ** (len(self.channel_multipliers) - 1))

    @property
    def side(self) -> int:
        """Height and width of an image in pixels."""
        return self.patch_nums[-1] * self.factor


def token_counts(patch_nums: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of tokens of each scale."""
    return tuple(side * side for side in patch_nums)


def scale_starts(patch_nums: Sequence[int]) -> tuple[int, ...]:
    """Returns the index of each scale's first token in the whole sequence, then its length."""
    return (0, *accumulate(token_counts(patch_nums)))


def convolution_of_scale(scales: int, convolutions: int) -> tuple[int, ...]:
    """Returns the index of the shared convolution that each scale uses, as in the published code.

    Scales are spaced evenly from 0 to 1, and use the convolution whose tick is nearest. The ticks
    of four convolutions are spaced evenly from 1/12 to 11/12; any other number of ticks lies at the
    centres of equal intervals.
    """
    margin = 1 / (3 if convolutions == 4 else 2) / convolutions
    ticks = np.linspace(margin, 1 - margin, convolutions)
    positions = [scale / max(scales - 1, 1) for scale in range(scales)]
    return tuple(int(np.argmin(np.abs(ticks - position))) for position in positions)


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Result of `MultiScaleVQ.quantize`.

    Attributes:
        codes: Codes of all scales, small scales first, int64 ``(B, L)``.
        running: f_hat after each scale, ``(B, K, D, side, side)``.
    """

    codes: Tensor
    running: Tensor


class MultiScaleVQ(ConvolutionalModel):
    """Encodes images to codes of all scales, and decodes them."""

    config_class = MultiScaleVQConfig
    main_input_name = "pixels"

    def __init__(self, config: MultiScaleVQConfig) -> None:
        super().__init__(config)
        width, around = config.codebook_dim, config.kernel // 2
        shape = (config.channels, config.channel_multipliers, config.residual_blocks, width)
        self.encoder = Encoder(*shape, groups=config.norm_groups)
        self.decoder = PixelDecoder(*shape, groups=config.norm_groups)
        self.quant_conv = nn.Conv2d(width, width, config.kernel, padding=around)
        self.post_quant_conv = nn.Conv2d(width, width, config.kernel, padding=around)
        self.codebook = nn.Embedding(config.codebook_size, width)
        self.residual = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1) for _ in range(config.residual_convolutions)
        )
        self.post_init()

    @property
    def starts(self) -> tuple[int, ...]:
        """See `scale_starts`."""
        return scale_starts(self.config.patch_nums)

    def encode(self, pixels: Tensor) -> Tensor:
        """Computes latents f ``(B, D, side, side)`` of pixels from -1 to 1.

        Raises:
            ShapeError: The pixels are not ``(B, 3, config.side, config.side)``.
        """
        side = self.config.side
        if pixels.ndim != 4 or pixels.shape[1:] != (3, side, side):
            raise ShapeError(
                f"pixels have shape {tuple(pixels.shape)}; expected (batch, 3, {side}, {side}): "
                "resize or crop them"
            )
        return self.quant_conv(self.encoder(pixels))

    def nearest(self, features: Tensor) -> Tensor:
        """Returns the codes nearest to features ``(..., D)``, int64."""
        rows = self.codebook.weight
        products = features @ rows.T
        return (rows.square().sum(1) - 2 * products).argmin(-1)

    def quantize(self, latents: Tensor) -> Quantized:
        """Quantises latents ``(B, D, side, side)``; gradients reach codebook and convolutions."""
        target = latents.detach()
        f_hat = torch.zeros_like(target)
        codes, running = [], []
        for scale, side in enumerate(self.config.patch_nums):
            left = resized(target - f_hat.detach(), side)
            codes.append(self.nearest(left.flatten(2).mT))
            f_hat = self.add_scale(f_hat, codes[-1], scale)
            running.append(f_hat)
        return Quantized(codes=torch.cat(codes, 1), running=torch.stack(running, 1))

    def add_scale(self, f_hat: Tensor, codes: Tensor, scale: int) -> Tensor:
        """Returns the running sum with one more scale added.

        Args:
            f_hat: Sum of the earlier scales, ``(B, D, side, side)``.
            codes: Codes of this scale, ``(B, side_k * side_k)``.
            scale: Index k from 0.
        """
        config = self.config
        side = config.patch_nums[scale]
        grid = self.codebook(codes).mT.unflatten(2, (side, side))
        if side != f_hat.shape[-1]:
            grid = F.interpolate(grid, size=f_hat.shape[-2:], mode="bicubic")
        chosen = convolution_of_scale(len(config.patch_nums), config.residual_convolutions)[scale]
        share = config.residual_share
        return f_hat + (1 - share) * grid + share * self.residual[chosen](grid)

    def scale_input(self, f_hat: Tensor, scale: int) -> Tensor:
        """Returns VAR's input at a scale: f_hat averaged onto its grid, ``(B, n_k, D)``."""
        return resized(f_hat, self.config.patch_nums[scale]).flatten(2).mT

    def inputs_of(self, codes: Tensor) -> Tensor:
        """Returns VAR's inputs at all scales after the first, computed from given codes.

        Args:
            codes: Codes of all scales, ``(B, L)``, or of the first scales only.

        Returns:
            Inputs ``(B, n_1 + n_2 + ..., D)``; they include the scale after the given codes, unless
            that was the last.
        """
        pieces = []
        for scale, f_hat in enumerate(self._sums(codes), 1):
            if scale < len(self.config.patch_nums):
                pieces.append(self.scale_input(f_hat, scale))
        return torch.cat(pieces, 1)

    def f_hat_of(self, codes: Tensor) -> Tensor:
        """Returns the sum over the scales whose codes are given, ``(B, D, side, side)``."""
        return self._sums(codes)[-1]

    def _sums(self, codes: Tensor) -> list[Tensor]:
        side = self.config.patch_nums[-1]
        if codes.ndim != 2 or codes.shape[1] not in self.starts[1:]:
            raise ShapeError(
                f"codes have shape {tuple(codes.shape)}; expected (batch, tokens) with the tokens "
                f"of whole scales, one of {', '.join(map(str, self.starts[1:]))}"
            )
        f_hat = self.codebook.weight.new_zeros(len(codes), self.config.codebook_dim, side, side)
        sums = []
        for scale in range(self.starts.index(codes.shape[1])):
            of_scale = codes[:, self.starts[scale] : self.starts[scale + 1]]
            f_hat = self.add_scale(f_hat, of_scale, scale)
            sums.append(f_hat)
        return sums

    def decode(self, f_hat: Tensor) -> Tensor:
        """Decodes a sum ``(B, D, side, side)`` to pixels from -1 to 1, not clamped."""
        return self.decoder(self.post_quant_conv(f_hat))

    def image(self, f_hat: Tensor) -> Tensor:
        """Decodes a sum to pixels from 0 to 1, float32 ``(B, 3, H, W)``."""
        return self.decode(f_hat).float().clamp(-1, 1) / 2 + 0.5

    def forward(self, pixels: Tensor) -> Tensor:
        """Encodes, quantises and decodes pixels; the result is not clamped."""
        return self.decode(self.quantize(self.encode(pixels)).running[:, -1])


def resized(features: Tensor, side: int) -> Tensor:
    """Averages features ``(B, D, H, W)`` onto a smaller square grid."""
    if features.shape[-1] == side:
        return features
    return F.interpolate(features, size=(side, side), mode="area")


_NAMES = (
    (r"^encoder\.down\.(\d+)\.block\.", r"encoder.conv_blocks.\1.res."),
    (r"^encoder\.down\.", "encoder.conv_blocks."),
    (r"\.mid\.block_1\.", ".mid.0."),
    (r"\.mid\.attn_1\.", ".mid.1."),
    (r"\.mid\.block_2\.", ".mid.2."),
    (r"^quantize\.quant_resi\.qresi_ls\.", "residual."),
    (r"^quantize\.quant_resi\.qresi\.", "residual.0."),
    (r"^quantize\.embedding\.", "codebook."),
)


def load_published(
    file: str | Path, *, patch_nums: Sequence[int] = PATCH_NUMS, residual_share: float = 0.5
) -> MultiScaleVQ:
    """Loads a tokenizer from a published ``vae_*.pth``, in float32 and evaluation mode.

    Args:
        file: The weights; most of the configuration is inferred from their shapes.
        patch_nums: Side of each scale's grid, which cannot be inferred.
        residual_share: ``quant_resi`` of the published code, which cannot be inferred.

    Raises:
        InputError: The file has another layout, or another number of scales.
    """
    weights = published_weights(file, marker="quantize.embedding.weight")
    hits = weights.pop("quantize.ema_vocab_hit_SV", None)
    if hits is not None and len(hits) != len(patch_nums):
        raise InputError(
            f"{file} was trained on {len(hits)} scales; patch_nums has {len(patch_nums)} "
            f"({', '.join(map(str, patch_nums))}): give the sides that it was trained with"
        )
    levels = _count(weights, r"^decoder\.up\.(\d+)\.")
    required = ("encoder.conv_in.weight", "quant_conv.weight", "quantize.quant_resi.qresi")
    if not levels or not all(any(n.startswith(part) for n in weights) for part in required):
        raise InputError(
            f"{file} has a codebook, but not the names of VAR's tokenizer (decoder.up.*, "
            f"{', '.join(required)}); give a vae_*.pth of VAR"
        )
    renamed: dict[str, Tensor] = {}
    for name, value in split_joint_projection(weights).items():
        for pattern, plain in _NAMES:
            name = re.sub(pattern, plain, name)
        # stored from the finest level on, run from the coarsest
        name = re.sub(
            r"^decoder\.up\.(\d+)\.(block\.)?",
            lambda m: f"decoder.conv_blocks.{levels - 1 - int(m[1])}.{'res.' if m[2] else ''}",
            name,
        )
        renamed[name] = value
    config = _config_of(renamed, tuple(patch_nums), residual_share)
    return fill(MultiScaleVQ(config), renamed, file)


def _count(weights: dict[str, Tensor], pattern: str) -> int:
    return len({found[1] for name in weights if (found := re.match(pattern, name))})


def _config_of(
    weights: dict[str, Tensor], patch_nums: tuple[int, ...], residual_share: float
) -> MultiScaleVQConfig:
    size, dim = weights["codebook.weight"].shape
    channels = len(weights["encoder.conv_in.weight"])
    levels = _count(weights, r"^encoder\.conv_blocks\.(\d+)\.")
    first = "encoder.conv_blocks.{}.res.0.conv1.weight"
    shape: dict[str, Any] = {
        "codebook_size": size,
        "codebook_dim": dim,
        "patch_nums": patch_nums,
        "channels": channels,
        "channel_multipliers": tuple(
            len(weights[first.format(level)]) // channels for level in range(levels)
        ),
        "residual_blocks": _count(weights, r"^encoder\.conv_blocks\.0\.res\.(\d+)\."),
        "kernel": weights["quant_conv.weight"].shape[-1],
        "residual_convolutions": _count(weights, r"^residual\.(\d+)\."),
        "residual_share": residual_share,
    }
    return MultiScaleVQConfig(**shape)


AutoConfig.register(MultiScaleVQConfig.model_type, MultiScaleVQConfig)
AutoModel.register(MultiScaleVQConfig, MultiScaleVQ)
