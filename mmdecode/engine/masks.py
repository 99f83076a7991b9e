"""What the tokens of a block may attend to, and where they lie in the text."""

from __future__ import annotations

import torch
from torch import Tensor


def chain(width: int, device: torch.device) -> tuple[Tensor, None]:
    """Depths ``(1, Q)`` of a chain, and no ancestors: each token sees all before it."""
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
    """What each token of a block may attend to, as an additive mask ``(R, 1, Q, visible)``.

    Args:
        begin: Slot of the block's first token per row, ``(R,)``; everything before it is committed.
        pads: Padding slots at the left of each row, ``(R,)``.
        depths: Distance of each token from the first, ``(1 or R, Q)``; a window counts by it.
        ancestors: ``(1 or R, Q, Q)`` bool, self included; ``None``: the block is a chain.
        visible: Slots that attention covers.
        dtype: The model's.
        window: Tokens a sliding layer sees, the token itself included; ``None``: all.
    """
    slots = torch.arange(visible, device=begin.device)
    relative = slots - begin[:, None]  # (R, K)
    where, last = relative[:, None], depths[:, :, None]  # compared, so that no integers are dense
    # a padding query would see nothing; let it see itself
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
        where = places(relative, depths)[:, None]
    seen &= (slots >= pads[:, None])[:, None]
    if window is not None:
        seen &= where > last - window
    seen |= itself
    low = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=begin.device)
    return torch.where(seen, 0.0, low)[:, None]


def distances(relative: Tensor, depths: Tensor) -> Tensor:
    """How far before each token of a block a slot lies in the text, ``(R, Q, K)``.

    A committed slot lies where it is; a slot of the block by its depth, since siblings lie in slots
    of their own.

    Args:
        relative: Each slot's distance from the block's first, ``(R, K)``.
        depths: Distance of each token from the first, ``(R, Q)``.
    """
    return depths[:, :, None] - places(relative, depths)[:, None]


def places(relative: Tensor, depths: Tensor) -> Tensor:
    """Where each slot lies in the text, counted from a block's first token, ``(R, K)``.

    Arguments as of `distances`, but ``depths`` may have one row for all.
    """
    width = depths.shape[1]
    inside = (relative >= 0) & (relative < width)
    depth = depths.expand(len(relative), -1).gather(1, relative.clamp(0, width - 1))
    return torch.where(inside, depth, relative)
