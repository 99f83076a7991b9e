"""Helpers for the image tokens in a drafter's input, which some drafters replace by fewer rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


def numbered(images: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
    """Returns the number of each token's image in its row, from 1, ``(B, L)``; 0: no image.

    Args:
        images: Mask of image tokens, bool ``(B, L)``.
        sizes: Number of tokens of each image, row by row. If ``None``, or if the sizes do not add
            up to the image tokens of every row, adjacent image tokens count as one image.
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
    """Converts image numbers ``(B, L)``, see `numbered`, to a mask per image, bool ``(B, I, L)``.

    Synchronises with the device to read the largest number of images.
    """
    count = int(images.max()) if images.numel() else 0
    return images[:, None] == torch.arange(1, count + 1, device=images.device)[:, None]


def at_last_rows(made: Tensor, members: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces the last rows of each image by vectors that were computed for the image.

    Args:
        made: S vectors per image, ``(B, I, S, H)``; an image with fewer than S rows gets the last
            of them.
        members: Mask per image, see `members_of`, with at least one image.
        rows: Input rows, ``(B, L, H)``.

    Returns:
        The new rows, and the mask of the replaced rows, bool ``(B, L)``.
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
