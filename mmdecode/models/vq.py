"""LlamaGen's image tokenizer: a convolutional autoencoder with one codebook.

Codebook rows and the encoder's output are normalised to length one before they are compared or
decoded. The stored rows are not normalised, so distances between codes (as in LANTERN) must be
computed from `VQModel.codes`.

Parameters are named as in the published checkpoints, which `load_published` reads.

Source: Sun et al. 2024, arXiv:2406.06525, section 2.1; layout of FoundationVision/LlamaGen
``tokenizer/tokenizer_image/vq_model.py``. Differs from it: the configuration sets the width of the
first level and the groups of norms, and the buffer ``codebook_used`` for training is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from mmdecode.errors import InputError, ShapeError
from mmdecode.models.vqgan import GROUPS, CodeDecoder, Encoder, PixelDecoder
from mmdecode.weights import fill, published_weights

if TYPE_CHECKING:
    from pathlib import Path


class VQConfig(PreTrainedConfig):
    """Shape of a tokenizer.

    Attributes:
        codebook_size, codebook_dim: Number of codes and their width.
        channels: Width of the first level.
        channel_multipliers: Width of each level as a multiple of ``channels``; an image is halved
            between levels, so that with three levels a code covers 4 x 4 pixels.
        residual_blocks: Residual blocks per level of the encoder; the decoder has one more.
        latent_channels: Channels between encoder and codebook.
        norm_groups: Groups of every GroupNorm; divides the width of each level. In narrow models
            one group per channel would lose the brightness of an image.
    """

    model_type = "llamagen_vq"
    codebook_size: int = 16384
    codebook_dim: int = 8
    channels: int = 128
    channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    residual_blocks: int = 2
    latent_channels: int = 256
    norm_groups: int = GROUPS

    @property
    def factor(self) -> int:
        """Height and width in pixels of the patch of a code."""
        return int(2 ** (len(self.channel_multipliers) - 1))


class Quantizer(nn.Module):
    """Module that holds the codebook."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)


class VQModel(CodeDecoder):
    """Encodes images to codes, and decodes them."""

    config_class = VQConfig
    main_input_name = "pixels"

    def __init__(self, config: VQConfig) -> None:
        super().__init__(config)
        shape = (
            config.channels,
            config.channel_multipliers,
            config.residual_blocks,
            config.latent_channels,
            config.norm_groups,
        )
        self.encoder = Encoder(*shape)
        self.decoder = PixelDecoder(*shape)
        self.quantize = Quantizer(config)
        self.quant_conv = nn.Conv2d(config.latent_channels, config.codebook_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.latent_channels, 1)
        self.post_init()

    @property
    def codes(self) -> Tensor:
        """Returns the codebook with rows normalised to length one, ``(V, D)``."""
        return F.normalize(self.quantize.embedding.weight, dim=-1)

    def latents(self, pixels: Tensor) -> Tensor:
        """Computes the encoder's output before quantisation, ``(B, D, h, w)``, not normalised.

        Args:
            pixels: Pixels from -1 to 1, ``(B, 3, H, W)``.

        Raises:
            ShapeError: Height or width is no multiple of the factor.
        """
        factor = self.config.factor
        if pixels.ndim != 4 or pixels.shape[1] != 3 or any(n % factor for n in pixels.shape[2:]):
            raise ShapeError(
                f"pixels have shape {tuple(pixels.shape)}; expected (batch, 3, height, width) with "
                f"both multiples of {factor}: resize or crop them"
            )
        return self.quant_conv(self.encoder(pixels))

    def encode(self, pixels: Tensor) -> Tensor:
        """Encodes images ``(B, 3, H, W)``, pixels from -1 to 1, to codes, int64 ``(B, h, w)``."""
        latents = F.normalize(self.latents(pixels), dim=1)
        # all of length one, so the nearest has the largest product
        return torch.einsum("bdhw,vd->bhwv", latents, self.codes).argmax(-1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encodes images to codes and decodes them again."""
        return self.decode_codes(self.encode(pixels))


def load_published(file: str | Path, *, codebook_size: int | None = None) -> VQModel:
    """Loads a tokenizer from a published ``.pt`` file, in float32 and evaluation mode.

    Args:
        file: Checkpoint with the weights under ``model``, ``module`` or ``state_dict``, or bare.
        codebook_size: Size that the transformer expects; ``None``: any.

    Raises:
        InputError: The file has another layout, or another codebook.
    """
    weights = published_weights(file, marker="quantize.embedding.weight")
    config = _config_of(weights)
    if codebook_size not in (None, config.codebook_size):
        raise InputError(
            f"{file} has a codebook of {config.codebook_size}; expected {codebook_size}, the "
            "vocabulary of the transformer: give the tokenizer it was trained with"
        )
    weights.pop("quantize.codebook_used", None)
    return fill(VQModel(config), weights, file)


def _config_of(weights: dict[str, Tensor]) -> VQConfig:
    """Infers a published tokenizer's configuration from its weights, except ``norm_groups``."""
    size, dim = weights["quantize.embedding.weight"].shape
    channels = len(weights["encoder.conv_in.weight"])
    multipliers: list[int] = []
    while f"encoder.conv_blocks.{len(multipliers)}.res.0.conv1.weight" in weights:
        level = weights[f"encoder.conv_blocks.{len(multipliers)}.res.0.conv1.weight"]
        multipliers.append(len(level) // channels)
    blocks = 0
    while f"encoder.conv_blocks.0.res.{blocks}.conv1.weight" in weights:
        blocks += 1
    shape: dict[str, Any] = {
        "codebook_size": size,
        "codebook_dim": dim,
        "channels": channels,
        "channel_multipliers": tuple(multipliers),
        "residual_blocks": blocks,
        "latent_channels": len(weights["encoder.conv_out.weight"]),
    }
    return VQConfig(**shape)
