"""Rows of images in a drafter's input: which image each belongs to, and replacing them by fewer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def numbered(images: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    """Index of each token's image in its row, counted from 1, ``(B, L)``; 0 for none.

    Args:
        images: Tokens of images, ``(B, L)`` bool.
        sizes: Tokens of each image, row by row; ``None``, or if they do not add up to the tokens of
            a row: adjacent tokens are one image.
    """
    ends = {0, *itertools.accumulate(sizes or ())}
    if not ends.issuperset(images.sum(1).cumsum(0).tolist()) or max(ends) != int(images.sum()):
        return (images & ~pad(images, (1, -1))).cumsum(1) * images
    counts = torch.tensor(sizes or (), dtype=torch.long)
    owner = torch.arange(len(counts)).repeat_interleave(counts)
    begins = torch.zeros_like(images)
    begins[images] = owner.diff(prepend=torch.tensor([-1])).bool().to(images.device)
    return begins.cumsum(1) * images


def members_of(images: Tensor) -> Tensor:
    """The rows of each image, ``(B, I, L)`` bool, from the image of each row, counted from 1.

    Asks for the largest number of images on the host.
    """
    count = int(images.max()) if images.numel() else 0
    return images[:, None] == torch.arange(1, count + 1, device=images.device)[:, None]


def at_last_rows(made: Tensor, members: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces the last rows of each image by the vectors computed for it.

    Args:
        made: Vectors for each image, ``(B, I, S, H)``; an image with fewer rows takes the last of
            them.
        members: See `members_of`, with at least one image.
        rows: ``(B, L, H)``.

    Returns:
        The rows, and which of them were replaced, ``(B, L)`` bool.
    """
    each = made.shape[2]
    # rows of the same image from each row on, itself included; 0 where there is no image
    left = members.flip(-1).cumsum(-1).flip(-1).mul(members).sum(1)
    replaced = (left > 0) & (left <= each)
    if not each:
        return rows, replaced
    index = members.long().argmax(1) * each + (each - left).clamp(0, each - 1)
    chosen = made.flatten(1, 2).gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
    return torch.where(replaced[..., None], chosen, rows), replaced
