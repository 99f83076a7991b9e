"""Decoder of Chameleon's image tokenizer, which transformers does not have.

In transformers, Chameleon reads images but does not generate them, so its checkpoints hold the
encoder alone; the published ``vqgan.ckpt`` holds both halves, and `load_published` takes the
decoder. **Untested against published weights**, which were not available. The tests cover the
layout and the arithmetic, on random weights.

Source: Chameleon 2024, arXiv:2405.09818; the tokenizer is a VQGAN, Esser et al. 2021,
arXiv:2012.09841, with attention in the middle only; layout of facebookresearch/chameleon
``chameleon/inference/vqgan.py``. Rows of the codebook are decoded as stored, without normalisation.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import PreTrainedConfig

from mmdecode.errors import InputError
from mmdecode.models.vqgan import CodeDecoder, PixelDecoder
from mmdecode.weights import fill, published_weights

if TYPE_CHECKING:
    from pathlib import Path


class ChameleonVQConfig(PreTrainedConfig):
    """Shape of the decoder, named as in `mmdecode.models.vqgan.PixelDecoder`.

    Attributes:
        codebook_size, codebook_dim: Number of codes and their width.
        channels: Width of the finest level.
        channel_multipliers: Width of each level as a multiple of ``channels``, finest first.
        residual_blocks: Residual blocks per level of the encoder; the decoder has one more.
        latent_channels: Channels between codebook and decoder.
        norm_groups: Groups of every GroupNorm.
        attends: Whether the coarsest level has attention too, in addition to the middle block.
    """

    model_type = "chameleon_vq_decoder"
    codebook_size: int = 8192
    codebook_dim: int = 256
    channels: int = 128
    channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    residual_blocks: int = 2
    latent_channels: int = 256
    norm_groups: int = 32
    attends: bool = False


class ChameleonVQDecoder(CodeDecoder):
    """Decodes codes to images."""

    config_class = ChameleonVQConfig
    main_input_name = "codes"

    def __init__(self, config: ChameleonVQConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_dim)
        self.post_quant_conv = nn.Conv2d(config.codebook_dim, config.latent_channels, 1)
        self.decoder = PixelDecoder(
            config.channels,
            config.channel_multipliers,
            config.residual_blocks,
            config.latent_channels,
            config.norm_groups,
        )
        if not config.attends:
            self.decoder.conv_blocks[0].attn = nn.ModuleList()
        self.post_init()

    @property
    def codes(self) -> Tensor:
        """Returns the codebook, ``(C, D)``."""
        return self.embedding.weight

    def forward(self, codes: Tensor) -> Tensor:
        """See `decode_codes`."""
        return self.decode_codes(codes)


def load_published(file: str | Path, *, codebook_size: int | None = None) -> ChameleonVQDecoder:
    """Loads the decoder of a published ``vqgan.ckpt``, in float32 and evaluation mode.

    Args:
        file: Checkpoint that holds the weights under ``state_dict``, or nothing but the weights.
        codebook_size: Size that the transformer expects; ``None``: any.

    Raises:
        InputError: The file has another layout, or another codebook.
    """
    weights = published_weights(file, marker="decoder.up.0.block.0.conv1.weight")
    size, dim = weights["quantize.embedding.weight"].shape
    if codebook_size not in (None, size):
        raise InputError(
            f"{file} has a codebook of {size}; expected {codebook_size}, the image tokens of the "
            "transformer: give the tokenizer it was trained with"
        )
    levels = 1 + max(int(n.split(".")[2]) for n in weights if n.startswith("decoder.up."))
    widths = [len(weights[f"decoder.up.{i}.block.0.conv1.weight"]) for i in range(levels)]
    channels = math.gcd(*widths)  # only the widths are needed
    blocks = {n.split(".")[4] for n in weights if n.startswith("decoder.up.0.block.")}
    config = ChameleonVQConfig(
        codebook_size=size,
        codebook_dim=dim,
        channels=channels,
        channel_multipliers=tuple(width // channels for width in widths),
        residual_blocks=len(blocks) - 1,
        latent_channels=weights["decoder.conv_in.weight"].shape[1],
        attends=f"decoder.up.{levels - 1}.attn.0.q.weight" in weights,
    )
    kept = ("decoder.", "post_quant_conv.", "quantize.embedding.")
    renamed = {_renamed(n, levels): w for n, w in weights.items() if n.startswith(kept)}
    return fill(ChameleonVQDecoder(config), renamed, file)


def _renamed(name: str, levels: int) -> str:
    """Renames a published weight; there levels count from the finest, here from the coarsest."""
    name = name.removeprefix("quantize.")
    name = re.sub(r"\.up\.(\d+)\.", lambda m: f".conv_blocks.{levels - 1 - int(m[1])}.", name)
    name = re.sub(r"\.block\.(\d+)\.", r".res.\1.", name)
    for index, part in enumerate(("block_1", "attn_1", "block_2")):
        name = name.replace(f".mid.{part}.", f".mid.{index}.")
    return name
