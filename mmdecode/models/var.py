"""VAR's transformer: predicts all codes of a scale from all scales before it, given a class.

The sequence is made of scales, small scales first. The first scale reads the class; every later
scale reads the image so far, averaged onto its grid (`MultiScaleVQ.scale_input`). A position
predicts the code at its own position, and attends to its whole scale and all earlier scales. The
codes of a scale are therefore sampled together, and keys and values of earlier scales are cached.

Parameters are named as in the published checkpoints, which `load_published` reads.

Source: Tian et al. 2024, arXiv:2404.02905; layout of FoundationVision/VAR ``models/var.py`` and
``models/basic_var.py``. Differs from it: buffers that follow from the configuration (levels, mask,
the keys' zero bias) are not stored with the weights, and classes are not dropped in training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from mmdecode.errors import InputError, OptionError, ShapeError
from mmdecode.models.multiscale_vq import PATCH_NUMS, scale_starts, token_counts
from mmdecode.weights import fill, published_weights

if TYPE_CHECKING:
    from pathlib import Path

MOST_SHARPNESS = math.log(100)


class VarConfig(PreTrainedConfig):
    """Shape of a transformer.

    Attributes:
        vocab_size, codebook_dim: Number of the tokenizer's codes and their width.
        patch_nums: Side of each scale's grid, ascending.
        num_classes: Number of classes, without the null class.
        unconditional: Whether there is a null class, ``num_classes``, which guidance needs.
        hidden_size, intermediate_size: Width of states and of the feed-forward part.
        num_hidden_layers, num_attention_heads: Number of blocks, and of attention heads in each.
        attn_l2_norm: Whether queries and keys are normalised to length one, with a learned scale of
            at most 100 for each head.
        shared_adaln: Whether all blocks share one projection of the class, with a learned offset in
            each block (the 512-pixel model); otherwise each block has its own projection.
        norm_eps: Epsilon of every normalisation.
        tokenizer: Folder of the `MultiScaleVQ`, relative to this model's folder; empty: not known.
    """

    model_type = "var"
    vocab_size: int = 4096
    codebook_dim: int = 32
    patch_nums: tuple[int, ...] = PATCH_NUMS
    num_classes: int = 1000
    unconditional: bool = True
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    attn_l2_norm: bool = True
    shared_adaln: bool = False
    norm_eps: float = 1e-6
    tokenizer: str = ""

    @property
    def starts(self) -> tuple[int, ...]:
        """Index of each scale's first token, then the total number of tokens."""
        return scale_starts(self.patch_nums)


class ScaleCache:
    """Preallocated cache of the keys and values of every layer.

    Args:
        config: Configuration of the model.
        rows: Number of rows, conditional and unconditional together.
        tokens: Capacity in tokens.
        device, dtype: Device and data type of keys and values.
    """

    def __init__(
        self,
        config: VarConfig,
        rows: int,
        tokens: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        heads = config.num_attention_heads
        shape = (config.num_hidden_layers, 2, rows, heads, tokens, config.hidden_size // heads)
        self.room = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Size of the keys and values in bytes."""
        return self.room.nbytes

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends a layer's keys and values ``(R, heads, n, width)``; returns all of that layer."""
        stop = self.length + key.shape[2]
        self.room[layer, 0, :, :, self.length : stop] = key
        self.room[layer, 1, :, :, self.length : stop] = value
        return self.room[layer, 0, :, :, :stop], self.room[layer, 1, :, :, :stop]


class Attention(nn.Module):
    """Self-attention; queries and keys have length one with ``attn_l2_norm``, else are scaled."""

    def __init__(self, config: VarConfig) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        if config.attn_l2_norm:
            self.scale_mul_1H11 = nn.Parameter(torch.full((1, self.heads, 1, 1), math.log(4)))
        self.sharp = config.attn_l2_norm
        self.mat_qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(width))
        self.v_bias = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(width, width)

    def forward(
        self, x: Tensor, mask: Tensor | None, cache: ScaleCache | None, layer: int
    ) -> Tensor:
        """Computes ``(R, n, W)``; ``mask``, ``(n, cached + n)``, is true for visible keys."""
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        joint = F.linear(x, self.mat_qkv.weight, bias).unflatten(2, (3, self.heads, -1))
        query, key, value = joint.permute(2, 0, 3, 1, 4)  # each (R, heads, n, width)
        if self.sharp:
            sharpness = self.scale_mul_1H11.clamp_max(MOST_SHARPNESS).exp()
            query, key = F.normalize(query, dim=-1) * sharpness, F.normalize(key, dim=-1)
            scale = 1.0
        else:
            scale = 0.25 / math.sqrt(query.shape[-1])  # as published
        if cache is not None:
            key, value = cache.extend(layer, key, value)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers."""

    def __init__(self, config: VarConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """``(R, n, W)`` to the same."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


def modulation(width: int, parts: int) -> nn.Sequential:
    """Makes the layers that map a class embedding to ``parts`` scales, shifts and gates."""
    return nn.Sequential(nn.SiLU(), nn.Linear(width, parts * width))


class Block(nn.Module):
    """Attention and feed-forward part, each with adaptive layer norm (AdaLN) by the class."""

    def __init__(self, config: VarConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attn, self.ffn = Attention(config), FeedForward(config)
        self.norm = nn.LayerNorm(width, config.norm_eps, elementwise_affine=False)
        if config.shared_adaln:
            self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, width))
        else:
            self.ada_lin = modulation(width, 6)
        self.shared = config.shared_adaln

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        mask: Tensor | None,
        cache: ScaleCache | None,
        layer: int,
    ) -> Tensor:
        """Computes states ``(R, n, W)``.

        Args:
            x: States, ``(R, n, W)``.
            condition: Class embedding ``(R, W)`` or, with ``shared_adaln``, the shared projection
                of it, ``(R, 6 W)``.
            mask: See `Attention`.
            cache: Cache of the model.
            layer: Index of the block.
        """
        whole = condition if self.shared else self.ada_lin(condition)
        parts = whole.view(len(whole), 1, 6, -1)
        if self.shared:
            parts = parts + self.ada_gss
        gate1, gate2, scale1, scale2, shift1, shift2 = parts.unbind(2)
        x = x + gate1 * self.attn(self.norm(x) * (1 + scale1) + shift1, mask, cache, layer)
        return x + gate2 * self.ffn(self.norm(x) * (1 + scale2) + shift2)


class Head(nn.Module):
    """The last layer norm, scaled and shifted by the class."""

    def __init__(self, config: VarConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps, elementwise_affine=False)
        self.ada_lin = modulation(config.hidden_size, 2)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """``(R, n, W)`` to the same."""
        scale, shift = self.ada_lin(condition).view(len(x), 1, 2, -1).unbind(2)
        return self.norm(x) * (1 + scale) + shift


class VarForImageGeneration(PreTrainedModel):
    """VAR's transformer, which predicts codes from a class and the image so far."""

    config_class = VarConfig
    main_input_name = "classes"

    def __init__(self, config: VarConfig) -> None:
        super().__init__(config)
        width, starts = config.hidden_size, config.starts
        self.class_emb = nn.Embedding(config.num_classes + config.unconditional, width)
        self.word_embed = nn.Linear(config.codebook_dim, width)
        self.lvl_embed = nn.Embedding(len(config.patch_nums), width)
        self.pos_start = nn.Parameter(torch.empty(1, starts[1], width))
        self.pos_1LC = nn.Parameter(torch.empty(1, starts[-1], width))
        self.shared_ada_lin = modulation(width, 6) if config.shared_adaln else nn.Identity()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.head_nm = Head(config)
        self.head = nn.Linear(width, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialises with narrow normals, and AdaLN with zeros: each block is the identity."""
        deviation = math.sqrt(1 / (3 * self.config.hidden_size))
        if isinstance(module, VarForImageGeneration):
            for table in (module.pos_start, module.pos_1LC):
                init.normal_(table, std=deviation)
            modulations = [m for n, m in module.named_modules() if n.endswith("ada_lin.1")]
            for linear in modulations:
                init.zeros_(linear.weight)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=deviation)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=deviation)
            if module.bias is not None:
                init.zeros_(module.bias)

    @property
    def null_class(self) -> int:
        """Id of the class that stands for no class.

        Raises:
            OptionError: The model has no null class.
        """
        if not self.config.unconditional:
            raise OptionError(
                f"guidance needs an unconditional input; this model knows {self.config.num_classes}"
                " classes and no null class: give guidance=0"
            )
        return int(self.config.num_classes)

    def forward(
        self, classes: Tensor, inputs: Tensor | None = None, cache: ScaleCache | None = None
    ) -> Tensor:
        """Computes the logits of the scales that are fed, ``(R, n, vocab_size)`` float32.

        Args:
            classes: One class per row, ``(R,)``.
            inputs: The image so far at each position of the scales to feed, ``(R, m,
                codebook_dim)``. If the cache is empty, the first scale, which reads the class, is
                fed before them.
            cache: Cache of the earlier scales, to which the new keys and values are appended.

        Raises:
            ShapeError: The last scale that is fed is not complete.
        """
        starts = self.config.starts
        begin = 0 if cache is None else cache.length
        condition = self.class_emb(classes)
        pieces = []
        if begin == 0:
            pieces.append(condition[:, None] + self.pos_start)
        if inputs is not None:
            pieces.append(self.word_embed(inputs.to(condition.dtype)))
        fed = torch.cat(pieces, 1)
        end = begin + fed.shape[1]
        if end not in starts:
            raise ShapeError(
                f"tokens {begin} to {end} are fed; scales end at {', '.join(map(str, starts[1:]))}:"
                " feed whole scales"
            )
        levels = self._levels(fed.device)[:end]
        x = fed + self.lvl_embed(levels[begin:]) + self.pos_1LC[:, begin:end]
        one_scale = starts.index(end) - starts.index(begin) == 1
        mask = None if one_scale else visible(levels, begin)
        shared = self.shared_ada_lin(condition)
        for layer, block in enumerate(self.blocks):
            x = block(x, shared, mask, cache, layer)
        if cache is not None:
            cache.length = end
        return self.head(self.head_nm(x, condition)).float()

    def _levels(self, device: torch.device) -> Tensor:
        """Returns the scale of every token, ``(L,)``."""
        counts = torch.tensor(token_counts(self.config.patch_nums))
        return torch.arange(len(counts)).repeat_interleave(counts).to(device)


def visible(levels: Tensor, begin: int) -> Tensor:
    """Returns the mask ``(n, L)`` of tokens from ``begin`` on: their scale and earlier scales."""
    return levels[begin:, None] >= levels


_DERIVED = ("lvl_1L", "attn_bias_for_masking")


def load_published(
    file: str | Path, *, patch_nums: Sequence[int] | None = None, num_heads: int | None = None
) -> VarForImageGeneration:
    """Loads a transformer from a published ``var_d*.pth``, in float32 and evaluation mode.

    Args:
        file: The weights; most of the configuration is inferred from their shapes.
        patch_nums: Side of each scale's grid; ``None``: inferred from the file's ``lvl_1L``.
        num_heads: Number of attention heads; ``None``: inferred from the learned scale of each head
            or, without these, the number of blocks.

    Raises:
        InputError: The file has another layout, or other scales than ``patch_nums``.
    """
    weights = published_weights(file, marker="pos_1LC")
    derived = {name: weights.pop(name) for name in _DERIVED if name in weights}
    patch_nums = _patch_nums(derived.get("lvl_1L"), patch_nums, file)
    for name in [name for name in weights if name.endswith("attn.zero_k_bias")]:
        if weights.pop(name).any():
            raise InputError(f"{file}: {name} is not zero; VAR's keys have no bias")
    layers = len({found[1] for n in weights if (found := re.match(r"blocks\.(\d+)\.", n))})
    try:
        shape: dict[str, Any] = {
            "vocab_size": len(weights["head.weight"]),
            "codebook_dim": weights["word_embed.weight"].shape[1],
            "patch_nums": patch_nums,
            "num_classes": len(weights["class_emb.weight"]) - 1,
            "hidden_size": weights["pos_1LC"].shape[2],
            "intermediate_size": len(weights["blocks.0.ffn.fc1.weight"]),
            "num_hidden_layers": layers,
            "attn_l2_norm": "blocks.0.attn.scale_mul_1H11" in weights,
            "shared_adaln": "blocks.0.ada_gss" in weights,
        }
    except KeyError as missing:
        raise InputError(f"{file} has no {missing}; give a var_d*.pth of VAR") from missing
    if num_heads is None:
        sharpness = weights.get("blocks.0.attn.scale_mul_1H11")
        num_heads = layers if sharpness is None else sharpness.shape[1]
    return fill(
        VarForImageGeneration(VarConfig(**shape, num_attention_heads=num_heads)), weights, file
    )


def _patch_nums(
    levels: Tensor | None, given: Sequence[int] | None, file: str | Path
) -> tuple[int, ...]:
    if levels is None:
        return tuple(given or PATCH_NUMS)
    inferred = tuple(math.isqrt(int(count)) for count in levels.flatten().bincount())
    if given is not None and tuple(given) != inferred:
        raise InputError(
            f"{file} was trained on scales {', '.join(map(str, inferred))}; patch_nums is "
            f"{', '.join(map(str, given))}: leave it out"
        )
    return inferred


AutoConfig.register(VarConfig.model_type, VarConfig)
AutoModel.register(VarConfig, VarForImageGeneration)
