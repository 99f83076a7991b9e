"""Convolutional encoder and decoder of VQGAN, which several image tokenizers share.

Parameters have the names of LlamaGen's checkpoints; the loaders of other tokenizers rename theirs.
Source: taming-transformers, Esser et al. 2021, arXiv:2012.09841.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from mmdecode.errors import ShapeError

GROUPS = 32  # of every published checkpoint


def normed(channels: int, groups: int = GROUPS) -> nn.GroupNorm:
    """Makes a group normalisation with VQGAN's epsilon."""
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a skip connection, ``(B, C, H, W)`` to ``(B, C', H, W)``."""

    def __init__(self, channels: int, out_channels: int, groups: int = GROUPS) -> None:
        super().__init__()
        self.norm1 = normed(channels, groups)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, padding=1)
        self.norm2 = normed(out_channels, groups)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        same = channels == out_channels
        self.nin_shortcut = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the block's output, ``(B, C', H, W)``."""
        hidden = self.conv1(F.silu(self.norm1(x)))
        return self.nin_shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class AttentionBlock(nn.Module):
    """Single-head attention over all positions of an image."""

    def __init__(self, channels: int, groups: int = GROUPS) -> None:
        super().__init__()
        self.norm = normed(channels, groups)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to the same."""
        hidden = self.norm(x)
        q, k, v = (part(hidden).flatten(2).mT for part in (self.q, self.k, self.v))  # (B, HW, C)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return x + self.proj_out(mixed.mT.reshape(x.shape))


class Downsample(nn.Module):
    """A convolution of stride 2 that pads right and bottom only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, C, H/2, W/2)``."""
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Nearest-neighbour upsampling by 2, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, C, 2H, 2W)``."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """The blocks of one resolution; the coarsest one has attention after each of them."""

    def __init__(
        self, channels: int, out_channels: int, blocks: int, attend: bool, groups: int
    ) -> None:
        super().__init__()
        self.res = nn.ModuleList(
            ResidualBlock(channels if index == 0 else out_channels, out_channels, groups)
            for index in range(blocks)
        )
        self.attn = nn.ModuleList(
            AttentionBlock(out_channels, groups) for _ in range(blocks if attend else 0)
        )
        self.downsample: nn.Module | None = None
        self.upsample: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``(B, C, H, W)`` to ``(B, C', H, W)``, or half or double that size."""
        for index, block in enumerate(self.res):
            x = block(x)
            if self.attn:
                x = self.attn[index](x)
        step = self.downsample or self.upsample
        return x if step is None else step(x)


def _middle(channels: int, groups: int) -> nn.ModuleList:
    return nn.ModuleList(
        (
            ResidualBlock(channels, channels, groups),
            AttentionBlock(channels, groups),
            ResidualBlock(channels, channels, groups),
        )
    )


class Encoder(nn.Module):
    """Pixels ``(B, 3, H, W)`` to latents ``(B, z_channels, H / f, W / f)``.

    Args:
        channels: Channels of the finest level.
        multipliers: Multiplier of each level's channels, finest first; images are halved between
            levels.
        blocks: Residual blocks per level.
        z_channels: Channels of the latents.
        groups: Groups of every normalisation.
    """

    def __init__(
        self,
        channels: int,
        multipliers: Sequence[int],
        blocks: int,
        z_channels: int,
        groups: int = GROUPS,
    ) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1)
        widths = [channels, *(channels * m for m in multipliers)]
        last = len(multipliers) - 1
        self.conv_blocks = nn.ModuleList()
        for index in range(last + 1):
            level = Level(widths[index], widths[index + 1], blocks, index == last, groups)
            if index < last:
                level.downsample = Downsample(widths[index + 1])
            self.conv_blocks.append(level)
        self.mid = _middle(widths[-1], groups)
        self.norm_out = normed(widths[-1], groups)
        self.conv_out = nn.Conv2d(widths[-1], z_channels, 3, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Computes latents from pixels."""
        x = self.conv_in(pixels)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class PixelDecoder(nn.Module):
    """Latents ``(B, z_channels, h, w)`` to pixels ``(B, 3, h f, w f)``.

    Each level has one residual block more than the encoder's.

    Args:
        channels: Channels of the finest level.
        multipliers: Multiplier of each level's channels, finest first.
        blocks: Residual blocks per level of the encoder.
        z_channels: Channels of the latents.
        groups: Groups of every normalisation.
    """

    def __init__(
        self,
        channels: int,
        multipliers: Sequence[int],
        blocks: int,
        z_channels: int,
        groups: int = GROUPS,
    ) -> None:
        super().__init__()
        widths = [channels * m for m in reversed(multipliers)]  # coarsest first, as its levels are
        self.conv_in = nn.Conv2d(z_channels, widths[0], 3, padding=1)
        self.mid = _middle(widths[0], groups)
        self.conv_blocks = nn.ModuleList()
        for index, width in enumerate(widths):
            before = widths[max(index - 1, 0)]
            level = Level(before, width, blocks + 1, index == 0, groups)
            if index < len(widths) - 1:
                level.upsample = Upsample(width)
            self.conv_blocks.append(level)
        self.norm_out = normed(widths[-1], groups)
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """Computes pixels from latents, not clamped."""
        x = self.conv_in(latents)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class ConvolutionalModel(PreTrainedModel):
    """Base of image tokenizers, whose layers keep torch's own initialisation."""

    def _init_weights(self, module: nn.Module) -> None:
        """Initialises like torch; the normal of transformers is too narrow for convolutions."""
        if isinstance(module, (nn.Conv2d, nn.GroupNorm, nn.Embedding)):
            module.reset_parameters()


class CodeDecoder(ConvolutionalModel):
    """Base of tokenizers that decode codes of one codebook to images.

    A subclass has the modules ``decoder`` and ``post_quant_conv``, and defines `codes`.
    """

    @property
    def codes(self) -> Tensor:
        """Returns the codebook, ``(C, D)``."""
        raise NotImplementedError

    def lookup(self, codes: Tensor) -> Tensor:
        """Looks up codes ``(B, h, w)`` in the codebook; returns ``(B, D, h, w)``.

        Raises:
            ShapeError: ``codes`` has no height and width.
        """
        if codes.ndim != 3:
            raise ShapeError(
                f"codes have shape {tuple(codes.shape)}; expected (batch, height, width): "
                "reshape them to the grid"
            )
        return F.embedding(codes, self.codes).permute(0, 3, 1, 2)

    def decode(self, latents: Tensor) -> Tensor:
        """Decodes codebook rows ``(B, D, h, w)`` to pixels, nominally -1 to 1, not clamped."""
        return self.decoder(self.post_quant_conv(latents))

    def decode_codes(self, codes: Tensor) -> Tensor:
        """Decodes codes ``(B, h, w)`` to pixels: `lookup`, then `decode`."""
        return self.decode(self.lookup(codes))


def split_joint_projection(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Splits joint ``qkv`` weights into separate weights of queries, keys and values."""
    found: dict[str, Tensor] = {}
    for name, value in weights.items():
        if ".qkv." in name:
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                found[name.replace(".qkv.", f".{part}.")] = torch.clone(piece)
        else:
            found[name] = value
    return found
