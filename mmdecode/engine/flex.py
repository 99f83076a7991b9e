"""FlexAttention for rounds that are captured: a mask as a function of slots, not as a tensor.

`torch.nn.attention.flex_attention` computes attention by a kernel that splits a long cache over the
GPU, and asks a function which slots a token may attend to. The function reads tensors: write
positions, padding, ancestors, depths and the window. Another tree, other lengths or another
window are other values of the same tensors, so that nothing is compiled again; only new shapes
are, and their sizes become symbols after the second one. The blocks of slots that are read end
with the visible ones; they are made once for each number of nodes and visible slots.

`mmdecode.engine.masks.block_mask` is the reference. ``Decoder(flex=True)`` switches a model's
attention to `attend` for a call; a runner then makes masks of this kind where rounds are captured.
All other masks, and passes without one, are computed as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mmdecode._compat import attention_implementation, flex_kernel, text_config
from mmdecode.engine import attention

if TYPE_CHECKING:
    from mmdecode.engine.adapter import Adapter

NAME = "mmdecode_flex"
BLOCK = 128
"""Slots and tokens of a block."""
UNLIMITED = 2**40
"""A window that reaches back to every slot."""


def used(adapter: Adapter) -> bool:
    """Whether the layers of the called model use `attend` in this call.

    Drafters run views of it with layers of their own, which need not.
    """
    name = attention_implementation(text_config(adapter.model))
    return adapter.takes_block_masks and name == NAME


def tree_mask(
    begin: Tensor,
    pads: Tensor,
    depths: Tensor,
    ancestors: Tensor | None,
    visible: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> BlockMask:
    """`mmdecode.engine.masks.block_mask` as a function of slots; takes the same arguments."""
    rows, width = len(begin), depths.shape[1]
    if ancestors is None:  # a chain
        ancestors = torch.ones(1, width, width, dtype=torch.bool, device=begin.device).tril()
    bits = ancestors.expand(rows, -1, -1).contiguous()
    levels = depths.expand(rows, -1).contiguous()
    reach = torch.full_like(begin, UNLIMITED if window is None else window)

    def seen(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        relative = slot - begin[row]
        inside = (relative >= 0) & (relative < width)
        node = relative.clamp(0, width - 1)
        allowed = torch.where(inside, bits[row, query, node], relative < 0)
        position = torch.where(inside, levels[row, node], relative)
        allowed = allowed & (slot >= pads[row]) & (position > levels[row, query] - reach[row])
        return allowed | (relative == query)  # a padding query may attend to itself

    counts, blocks = _blocks(width, visible, begin.device)
    return BlockMask.from_kv_blocks(
        counts,
        blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(width, visible),
        compute_q_blocks=False,  # for gradients
    )


@lru_cache(maxsize=256)
def _blocks(width: int, visible: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number and indices of the blocks of slots that each block of tokens reads: all visible."""
    rows, columns = -(-width // BLOCK), -(-visible // BLOCK)
    counts = torch.full((1, 1, rows), columns, dtype=torch.int32, device=device)
    order = torch.arange(columns, dtype=torch.int32, device=device)
    return counts, order.expand(1, 1, rows, -1).contiguous()


def dense(mask: BlockMask, rows: int) -> Tensor:
    """The mask of some rows as a tensor: slots that a token may attend to, ``(R, 1, Q, K)``."""
    device, (queries, slots) = mask.kv_num_blocks.device, mask.seq_lengths
    row, query, slot = (
        torch.arange(size, device=device).view(shape)
        for size, shape in ((rows, (-1, 1, 1)), (queries, (-1, 1)), (slots, (-1,)))
    )
    seen: Tensor = mask.mask_mod(row, row, query, slot)
    return seen[:, None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: ``(B, H, Q, D)`` in, ``(B, Q, H, D)`` out."""
    if not isinstance(attention_mask, BlockMask):
        given = (module, query, key, value, attention_mask, scaling, dropout, is_causal, softcap)
        return attention.attend(*given, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.device.type != "cuda":  # nothing is compiled there
        seen = dense(attention_mask, len(query))
        return attention.explicit(query, key, value, seen, scale, softcap)
    return compiled(query, key, value, attention_mask, scale, softcap).transpose(1, 2), None


def compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    softcap: float | None = None,
    kernel: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Attention ``(B, H, Q, D)`` by torch's kernel.

    Args:
        query: ``(B, H, Q, D)``.
        key: ``(B, H', K, D)``, where H' divides H.
        value: The same.
        mask: From `tree_mask`.
        scale: Factor of the scores.
        softcap: Cap of the scores; ``None``: no cap.
        kernel: Function that runs it; ``None``: compiled ``flex_attention`` of torch.
    """

    def capped(score: Tensor, *index: Tensor) -> Tensor:
        return score if softcap is None else (score / softcap).tanh() * softcap

    return (kernel or flex_kernel())(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
