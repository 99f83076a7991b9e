"""LlamaGen's transformer: a Llama over image codes in raster order, after a class or a caption.

The sequence begins with the condition's slots (one for a class, many for a caption), followed by
the codes row by row; position i predicts code i + 1 - slots. Rotary positions are 2-D (row and
column). At the condition's slots cosine and sine are zero, and with them queries and keys, so that
all slots get the same attention and a condition acts through its values only.

Modules have the names of transformers' Llama; `load_published` renames published weights.

Source: Sun et al. 2024, arXiv:2406.06525; layout of FoundationVision/LlamaGen
``autoregressive/models/gpt.py``. Differs from it: it has no dropout and no grouped-query attention,
and the configuration sets the number of slots of a caption.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mmdecode.errors import InputError, OptionError, ShapeError
from mmdecode.weights import fill, published_weights

if TYPE_CHECKING:
    from pathlib import Path

    from transformers.cache_utils import Cache

PUBLISHED_HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
"""Number of attention heads by hidden size, for the sizes B, L, XL, XXL, 1B, XXXL, 3B, 7B."""


class LlamaGenConfig(PreTrainedConfig):
    """Shape of a transformer.

    Attributes:
        vocab_size: Number of codes in the image tokenizer's codebook.
        hidden_size, intermediate_size: Width of states and of the feed-forward part.
        num_hidden_layers, num_attention_heads: The width of a head must be a multiple of four.
        grid_size: Number of rows, and of columns, of codes in an image.
        num_classes: Number of classes without the null class; 0: a caption-conditional model.
        caption_slots, caption_size: Number and width of the text features before the image; 0 for a
            class-conditional model.
        grey: Whether codes are grey levels from black to white, without an image tokenizer.
        tokenizer: Folder of the image tokenizer, relative to the model's; models may share one.
    """

    model_type = "llamagen"
    keys_to_ignore_at_inference = ("past_key_values",)
    vocab_size: int = 16384
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    grid_size: int = 16
    num_classes: int = 1000
    caption_slots: int = 0
    caption_size: int = 0
    grey: bool = False
    tokenizer: str = "vq"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False

    @property
    def slots(self) -> int:
        """Number of positions before the first code."""
        return self.caption_slots or 1

    @property
    def image_tokens(self) -> int:
        """Number of codes of an image."""
        return self.grid_size**2

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads


def rotary_table(config: LlamaGenConfig) -> Tensor:
    """Returns cosines and sines, ``(slots + grid ** 2, head_dim / 2, 2)`` float32.

    The first half of the frequencies is rotated by the row, the second by the column; the values
    of the condition's slots are zero.
    """
    half = config.head_dim // 2
    quarter = half // 2
    steps = 1.0 / config.rope_theta ** (torch.arange(0, half, 2).float() / half)
    angles = torch.arange(config.grid_size, dtype=torch.float32)[:, None] * steps
    side = config.grid_size
    rows = angles[:, None].expand(side, side, quarter)
    columns = angles[None].expand(side, side, quarter)
    turned = torch.cat([rows, columns], -1).flatten(0, 1)
    table = torch.stack([turned.cos(), turned.sin()], -1)
    return F.pad(table, (0, 0, 0, 0, config.slots, 0))


class GridRotary(nn.Module):
    """Looks positions up in `rotary_table`, in float32 for any dtype of the model."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.config = config
        self.tables: dict[torch.device, Tensor] = {}

    def forward(self, position_ids: Tensor) -> Tensor:
        """Maps positions ``(B or 1, Q)`` to complex factors ``(B or 1, Q, 1, 1, head_dim / 2)``."""
        device = position_ids.device
        if device not in self.tables:
            self.tables[device] = rotary_table(self.config).to(device)
        return torch.view_as_complex(self.tables[device][position_ids])[:, :, None, None]


def rotate(states: Tensor, turns: Tensor) -> Tensor:
    """Applies rotary factors to neighbouring pairs of ``(B, Q, 2, H, D)``, in float32."""
    pairs = torch.view_as_complex(states.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(states.dtype)


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Computes attention without a kernel; returns states ``(B, Q, H, D)`` and the weights."""
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class LlamaGenAttention(nn.Module):
    """Causal self-attention over condition and codes."""

    is_causal = True

    def __init__(self, config: LlamaGenConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.scaling = 1 / math.sqrt(config.head_dim)
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Computes the attention output, ``(B, Q, hidden)``, without the residual sum."""
        split = self.qkv_proj(hidden_states).unflatten(-1, (3, -1, self.config.head_dim))
        turned = rotate(split[:, :, :2], position_embeddings)  # queries and keys
        query, key = turned.permute(2, 0, 3, 1, 4)
        value = split[:, :, 2].transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        seen, _ = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling)
        return self.o_proj(seen.flatten(2))


class LlamaGenMLP(nn.Module):
    """Gated feed-forward part."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Computes SwiGLU of ``(B, Q, hidden)``, in the same shape, without the residual sum."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaGenLayer(nn.Module):
    """A decoder layer: attention and feed-forward part, each with a norm before it."""

    def __init__(self, config: LlamaGenConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LlamaGenAttention(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaGenMLP(config)

    def forward(self, hidden_states: Tensor, **attention: Any) -> Tensor:
        """Computes the states after the layer, ``(B, Q, hidden)``."""
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), **attention
        )
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class ClassCondition(nn.Module):
    """Embeds a class as one vector before the image's codes; the last class is the null class."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.num_classes = config.num_classes
        self.embedding = nn.Embedding(config.num_classes + 1, config.hidden_size)

    def forward(self, condition: Tensor) -> Tensor:
        """Embeds class ids ``(B,)`` as ``(B, 1, hidden)``."""
        if condition.ndim != 1 or condition.is_floating_point():
            raise ShapeError(
                f"the condition is {condition.dtype} of shape {tuple(condition.shape)}; expected "
                f"one class id per image, 0 to {self.num_classes - 1}, or {self.num_classes} for "
                "none: this model was trained on classes"
            )
        return self.embedding(condition)[:, None]

    def unconditional(self, condition: Tensor) -> Tensor:
        """Returns the null class for each image, ``(B,)``, for classifier-free guidance."""
        return torch.full_like(condition, self.num_classes)


class CaptionCondition(nn.Module):
    """Projects a text encoder's features of a caption to vectors before the image's codes."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.caption_size, config.hidden_size, bias=False)
        self.fc2 = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.uncond_embedding = nn.Parameter(torch.empty(config.caption_slots, config.caption_size))

    def forward(self, condition: Tensor) -> Tensor:
        """Projects ``(B, caption_slots, caption_size)`` to ``(B, caption_slots, hidden)``."""
        expected = tuple(self.uncond_embedding.shape)
        if condition.shape[1:] != expected:
            raise ShapeError(
                f"the condition has shape {tuple(condition.shape)}; expected (batch, {expected[0]},"
                f" {expected[1]}): a caption's features, padded on the left by `left_padded`"
            )
        return self.fc2(F.gelu(self.fc1(condition), approximate="tanh"))

    def unconditional(self, condition: Tensor) -> Tensor:
        """Returns the learned features of an empty caption for each image, in the input's shape."""
        return self.uncond_embedding.to(condition.dtype).expand_as(condition)


class LlamaGenPreTrainedModel(PreTrainedModel):
    """Base of `LlamaGenModel` and `LlamaGenForImageGeneration`."""

    config_class = LlamaGenConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_attention_backend = True
    _no_split_modules = ("LlamaGenLayer",)
    _skip_keys_device_placement = ("past_key_values",)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CaptionCondition):
            features = module.uncond_embedding.shape[1]
            init.normal_(module.uncond_embedding, std=features**-0.5)


class LlamaGenModel(LlamaGenPreTrainedModel):
    """LlamaGen without its output matrix: codes or embeddings to states after the final norm.

    Raises:
        OptionError: The width of a head is not a multiple of four, or the configuration sets
            ``num_classes`` and ``caption_slots`` both to 0 or both above 0.
    """

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        width, heads = config.hidden_size, config.num_attention_heads
        if width % (4 * heads):
            raise OptionError(
                f"hidden_size={width} and num_attention_heads={heads}; expected heads whose width "
                "is a multiple of 4, for rotary positions by row and column: change either"
            )
        if bool(config.num_classes) == bool(config.caption_slots):
            raise OptionError(
                f"num_classes={config.num_classes} and caption_slots={config.caption_slots}; "
                "expected one of them to be 0: a model is conditioned on classes or on captions"
            )
        self.condition = (CaptionCondition if config.caption_slots else ClassCondition)(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(
            LlamaGenLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.rotary = GridRotary(config)
        self.post_init()

    def embed_condition(self, condition: Tensor) -> Tensor:
        """Returns the condition's vectors, ``(B, slots, hidden)``, which precede the codes.

        Args:
            condition: Class ids ``(B,)``, or caption features ``(B, caption_slots, caption_size)``.

        Raises:
            ShapeError: The model was trained on the other kind of condition.
        """
        return self.condition(condition)

    def unconditional(self, condition: Tensor) -> Tensor:
        """Returns the null condition: the null class, or learned features."""
        return self.condition.unconditional(condition)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Computes the states after the final norm.

        Args:
            input_ids: Codes, ``(B, Q)``.
            inputs_embeds: Embeddings instead of codes, ``(B, Q, hidden)``; the slots' embeddings
                come from `embed_condition`.
            attention_mask: Additive float or bool ``(B, 1, Q, K)``; ``None``: causal.
            position_ids: Index in the sequence, ``(B or 1, Q)``; ``None``: follows the cache.
            past_key_values: Cache of keys and values, which is extended.
            use_cache: Whether to make a cache if none is given.

        Raises:
            ShapeError: Not exactly one of ``input_ids`` and ``inputs_embeds`` is given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("give either input_ids or inputs_embeds, and not both")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            before = 0 if past_key_values is None else past_key_values.get_seq_length()
            position_ids = torch.arange(before, before + hidden.shape[1], device=hidden.device)[
                None
            ]
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            low = torch.finfo(hidden.dtype).min
            attention_mask = torch.zeros_like(attention_mask, dtype=hidden.dtype).masked_fill(
                ~attention_mask, low
            )
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )
        turned = self.rotary(position_ids)
        for layer in self.layers:
            hidden = layer(
                hidden,
                position_embeddings=turned,
                attention_mask=mask,
                past_key_values=past_key_values,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden), past_key_values=past_key_values
        )


class LlamaGenForImageGeneration(LlamaGenPreTrainedModel):
    """LlamaGen with its output matrix.

    A saved folder may also hold an image tokenizer (`mmdecode.models.vq.VQModel`), and for captions
    a ``T5EncoderModel`` under ``text_encoder`` and the files of its text tokenizer.
    """

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        self.model = LlamaGenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def embed_condition(self, condition: Tensor) -> Tensor:
        """See `LlamaGenModel.embed_condition`."""
        return self.model.embed_condition(condition)

    def unconditional(self, condition: Tensor) -> Tensor:
        """See `LlamaGenModel.unconditional`."""
        return self.model.unconditional(condition)

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> CausalLMOutputWithPast:
        """Computes logits ``(B, Q, V)``; the arguments are those of `LlamaGenModel.forward`."""
        output = self.model(input_ids, **inputs)
        return CausalLMOutputWithPast(
            logits=self.lm_head(output.last_hidden_state), past_key_values=output.past_key_values
        )

    def code_logits(
        self, condition: Tensor, codes: Tensor, slot_mask: Tensor | None = None
    ) -> Tensor:
        """Computes the logits of every code from the codes before it, in one uncached pass.

        Args:
            condition: Class ids or caption features, see `embed_condition`.
            codes: Codes in raster order, ``(B, n)``.
            slot_mask: Mask of slots that are no padding, bool ``(B, slots)``; ``None``: all.

        Returns:
            Logits ``(B, n, V)``.
        """
        slots = self.embed_condition(condition)
        embeds = torch.cat([slots, self.model.embed_tokens(codes[:, :-1])], 1)
        mask = None if slot_mask is None else padding_mask(slot_mask, embeds.shape[1])
        hidden = self.model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
        return self.lm_head(hidden[:, slots.shape[1] - 1 :])


def padding_mask(slot_mask: Tensor, length: int) -> Tensor:
    """Returns a causal mask without padded slots, bool ``(B, 1, length, length)``.

    A padded slot attends to itself, since it would otherwise have no keys.

    Args:
        slot_mask: Mask of slots that are no padding, bool ``(B, slots)``.
        length: Total number of slots and codes.
    """
    keys = F.pad(slot_mask, (0, length - slot_mask.shape[1]), value=True)
    square = torch.ones(length, length, dtype=torch.bool, device=keys.device)
    return ((square.tril() & keys[:, None]) | square.tril().triu())[:, None]


def left_padded(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the padding of caption features to the left and sets it to zero, as in training.

    Args:
        features: Padded on the right, ``(B, slots, caption_size)``.
        mask: True where not padding, bool or integer ``(B, slots)``.

    Returns:
        Features and bool mask, padded on the left.
    """
    kept = mask.bool()
    order = kept.int().argsort(dim=1, stable=True)
    moved = features.masked_fill(~kept[..., None], 0).gather(
        1, order[..., None].expand_as(features)
    )
    return moved, kept.gather(1, order)


_RENAMED = (
    (r"^cls_embedding\.embedding_table\.", "model.condition.embedding."),
    (r"^cls_embedding\.cap_proj\.", "model.condition."),
    (r"^cls_embedding\.", "model.condition."),
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^output\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^layers\.", "model.layers."),
    (r"\.attention\.wqkv\.", ".self_attn.qkv_proj."),
    (r"\.attention\.wo\.", ".self_attn.o_proj."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
)
_TABLE = "freqs_cis"


def load_published(
    file: str | Path,
    *,
    grid_size: int | None = None,
    num_heads: int | None = None,
    rms_norm_eps: float = 1e-5,
    rope_theta: float = 10000.0,
) -> LlamaGenForImageGeneration:
    """Loads a transformer from a published ``.pt`` file, in float32 and evaluation mode.

    Args:
        file: Checkpoint with the weights under ``model``, ``module`` or ``state_dict``, or bare.
        grid_size: Codes per row: the image's width over the tokenizer's factor, for example
            384 / 16 = 24. ``None``: inferred from the table of rotations, if the file has one.
        num_heads: Number of attention heads; ``None``: `PUBLISHED_HEADS` of the width.
        rms_norm_eps: Epsilon of the norms, which is not stored with the weights.
        rope_theta: Base of the rotary frequencies, which is not stored with the weights.

    Raises:
        InputError: The file has another layout, or an argument is missing and cannot be inferred.
    """
    weights = published_weights(file, marker="tok_embeddings.weight")
    table = weights.pop(_TABLE, None)
    vocab, width = weights["tok_embeddings.weight"].shape
    heads = num_heads or PUBLISHED_HEADS.get(width)
    if heads is None:
        raise InputError(
            f"{file} has states of width {width}, which no published LlamaGen has, and the number "
            "of heads cannot be inferred; give num_heads"
        )
    classes = weights.get("cls_embedding.embedding_table.weight")
    caption = weights.get("cls_embedding.uncond_embedding")
    if (classes is None) == (caption is None):
        raise InputError(
            f"{file} has neither a table of classes nor an embedding of no caption, or has both; "
            "expected 'cls_embedding.embedding_table.weight' or 'cls_embedding.uncond_embedding': "
            "give a class- or caption-conditional LlamaGen"
        )
    slots = 1 if caption is None else len(caption)
    if grid_size is None and table is not None:
        grid_size = math.isqrt(len(table) - slots)
    if grid_size is None:
        raise InputError(
            f"{file} does not say how many codes a row has; give grid_size: the side of the image "
            "over 16, as 16 for 256 pixels, 24 for 384 or 32 for 512"
        )
    config = LlamaGenConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=len(weights["layers.0.feed_forward.w1.weight"]),
        num_hidden_layers=1 + max(int(k.split(".")[1]) for k in weights if k.startswith("layers.")),
        num_attention_heads=heads,
        grid_size=grid_size,
        num_classes=0 if classes is None else len(classes) - 1,
        caption_slots=0 if caption is None else slots,
        caption_size=0 if caption is None else caption.shape[1],
        rms_norm_eps=rms_norm_eps,
        rope_theta=rope_theta,
    )
    renamed = {_renamed(name): value for name, value in weights.items()}
    return fill(LlamaGenForImageGeneration(config), renamed, file)


def _renamed(name: str) -> str:
    for pattern, new in _RENAMED:
        name = re.sub(pattern, new, name)
    return name


AutoConfig.register(LlamaGenConfig.model_type, LlamaGenConfig)
AutoModel.register(LlamaGenConfig, LlamaGenForImageGeneration)
AutoModelForCausalLM.register(LlamaGenConfig, LlamaGenForImageGeneration)
