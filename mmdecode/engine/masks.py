"""Attention masks of a block of tokens, and the positions of cache slots in the text."""

from __future__ import annotations

import torch
from torch import Tensor


def chain(width: int, device: torch.device) -> tuple[Tensor, None]:
    """Depths ``(1, Q)`` of a chain, and no ancestors: each token attends to all before it."""
    return torch.arange(width, device=device)[None], None


def block_mask(
    begin: Tensor,
    pads: Tensor,
    depths: Tensor,
    ancestors: Tensor | None,
    visible: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """Additive mask of a block: which slots each token may attend to, ``(R, 1, Q, visible)``.

    Args:
        begin: Slot of the block's first token per row, ``(R,)``; everything before it is committed.
        pads: Padding slots at the left of each row, ``(R,)``.
        depths: Distance of each token from the first, ``(1 or R, Q)``; a window is measured by it.
        ancestors: ``(1 or R, Q, Q)`` bool, self included; ``None``: the block is a chain.
        visible: Slots that attention covers.
        dtype: Dtype of the model.
        window: Width of a sliding window, the token itself included; ``None``: no window.
    """
    slots = torch.arange(visible, device=begin.device)
    relative = slots - begin[:, None]  # (R, K)
    where, last = relative[:, None], depths[:, :, None]  # compared: no dense integer tensor
    # a padding query could attend to nothing; let it attend to itself
    if ancestors is None:
        itself = where == last
        seen = where <= last
    else:
        width = ancestors.shape[-1]
        inside = (relative >= 0) & (relative < width)
        column = relative.clamp(0, width - 1)
        in_block = ancestors.expand(len(begin), -1, -1).gather(
            2, column[:, None].expand(-1, width, -1)
        )
        itself = where == torch.arange(width, device=begin.device)[:, None]
        seen = torch.where(inside[:, None], in_block, (relative < 0)[:, None])
        where = slot_positions(relative, depths)[:, None]
    seen &= (slots >= pads[:, None])[:, None]
    if window is not None:
        seen &= where > last - window
    seen |= itself
    low = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=begin.device)
    return torch.where(seen, 0.0, low)[:, None]


def distances(relative: Tensor, depths: Tensor) -> Tensor:
    """Distance in the text from each slot to each token of a block, ``(R, Q, K)``.

    A committed slot is one position; slots of the block are measured by depth, since siblings share
    a position and not a slot.

    Args:
        relative: Each slot's distance from the block's first, ``(R, K)``.
        depths: Distance of each token from the first, ``(R, Q)``.
    """
    return depths[:, :, None] - slot_positions(relative, depths)[:, None]


def slot_positions(relative: Tensor, depths: Tensor) -> Tensor:
    """Position of each slot in the text, relative to a block's first token, ``(R, K)``.

    Takes the arguments of `distances`, but ``depths`` may have one row for all.
    """
    width = depths.shape[1]
    inside = (relative >= 0) & (relative < width)
    depth = depths.expand(len(relative), -1).gather(1, relative.clamp(0, width - 1))
    return torch.where(inside, depth, relative)
