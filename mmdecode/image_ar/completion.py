"""Completion of images of which some codes are given: continuation and inpainting.

Given codes are forced at their positions, like the newline tokens of other models: drafters propose
them, and the grammar allows no other token there.

If exactly the first codes in raster order are given, the rest has exactly the model's distribution
given them, and with the same seed it is what the model samples there itself. Any other mask is
*locally constrained*: a code depends on the codes before it alone and not on given ones after it,
since the distribution is renormalised position by position and not over images. In next-scale
models the given part is *laid over* the image after every scale, and the next scale reads the
result; this is not the model's distribution either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter, DraftSession
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import IncompatibleError, OptionError, ShapeError
from mmdecode.models.image_layout import Layout

Completion = Literal["continued", "locally constrained", "laid over"]


@dataclass(frozen=True, eq=False, kw_only=True)
class PartlyKnown(Layout):
    """A layout some of whose codes are given.

    Args:
        known: The given token at each position, -1 where it is free, ``(length,)``; or by row,
            ``(B, length)``, and then indices have a leading batch axis.
    """

    known: Tensor

    @property
    def has_forced(self) -> bool:
        """True: given codes are forced."""
        return True

    def forced(self, index: Tensor) -> Tensor:
        """The forced token at each index, -1 where the position is free; any shape."""
        known = self.known.to(index.device)
        position = index.clamp(0, self.length - 1)
        if known.ndim == 1:
            given = known[position]
        else:
            given = known.gather(1, position.flatten(1) if position.ndim > 1 else position[:, None])
            given = given.view_as(position)
        return torch.where(given >= 0, given, super().forced(index))


def partly_known(layout: Layout, codes: Tensor, known: int | Tensor) -> PartlyKnown:
    """A layout with given codes.

    Args:
        layout: Layout of the model's image tokens.
        codes: Codes of the image to complete, ``(rows, columns)``; codes that are not known are
            ignored.
        known: Number of codes to keep in raster order, or a mask of the codes to keep, bool
            ``(rows, columns)``.

    Raises:
        ShapeError: Codes or mask have another shape than the grid.
        OptionError: A code does not exist, or there is nothing left to generate.
    """
    grid = (layout.rows, layout.columns)
    if tuple(codes.shape) != grid:
        raise ShapeError(f"the given codes have shape {tuple(codes.shape)}; expected {grid}")
    stays = kept_cells(known, *grid)
    size = len(layout.ids)
    if bool(((codes < 0) | (codes >= size))[stays].any()):
        raise OptionError(f"a given code does not exist; expected 0 to {size - 1}")
    tokens = torch.full((layout.length,), -1)
    ids = layout.ids.cpu()[codes.cpu().clamp(0, size - 1)]
    tokens[layout.cell_indices().flatten()] = torch.where(stays, ids, -1).flatten()
    return holding(layout, tokens)


def holding(layout: Layout, tokens: Tensor) -> PartlyKnown:
    """The layout with given tokens, ``(length,)`` or ``(B, length)``; -1: free."""
    return PartlyKnown(
        layout.rows, layout.columns, layout.ids, layout.newline, layout.tail, known=tokens
    )


def kept_cells(known: int | Tensor, rows: int, columns: int) -> Tensor:
    """Mask of the codes to keep, bool ``(rows, columns)``.

    Args:
        known: A number of codes in raster order, or a mask of cells or pixels: a cell is kept if
            all its pixels are.
        rows: Rows of the grid.
        columns: Columns of the grid.

    Raises:
        ShapeError: The mask has neither the grid's shape nor a multiple of it.
        OptionError: The number is out of range, or everything is kept.
    """
    cells = rows * columns
    if isinstance(known, Tensor):
        fits = known.ndim == 2 and not (known.shape[0] % rows or known.shape[1] % columns)
        if not fits or 0 in known.shape:
            raise ShapeError(
                f"the mask has shape {tuple(known.shape)}; expected {(rows, columns)}, or a "
                "multiple of both in pixels"
            )
        tall, wide = known.shape[0] // rows, known.shape[1] // columns
        blocks = known.cpu().bool().view(rows, tall, columns, wide)
        stays = blocks.all(3).all(1)
        if bool(stays.all()):
            raise OptionError("the mask keeps every code; mark what is to be drawn again")
        return stays
    if not 0 <= known < cells:
        raise OptionError(f"known={known}; expected 0 to {cells - 1} codes that stay")
    return (torch.arange(cells) < known).view(rows, columns)


def completion_of(layout: PartlyKnown) -> Completion:
    """Whether the completion has the model's distribution given the known codes."""
    given = layout.known[layout.cell_indices().flatten()] >= 0
    first_free = int((~given).long().argmax())
    return "locally constrained" if bool(given[first_free:].any()) else "continued"


def codes_of(adapter: Any, pixels: Tensor) -> Tensor:
    """Encodes an image with the model's tokenizer.

    Args:
        adapter: Adapter of the model.
        pixels: Pixels from 0 to 1, ``(3, H, W)``.

    Raises:
        IncompatibleError: The model has no encoder from pixels to codes.
        ShapeError: The image has another size.
    """
    rows, columns = adapter.layout.rows, adapter.layout.columns
    vq: Any = getattr(adapter, "vq", None)
    grey = getattr(adapter.model.config, "grey", False)
    if not grey and not hasattr(vq, "encode"):
        raise IncompatibleError.between(
            "an image to start from",
            adapter.name,
            "its tokenizer is not at hand for reading images",
            "give the codes of the image, (rows, columns)",
        )
    factor = 1 if grey else vq.config.factor
    expected = (3, rows * factor, columns * factor)
    if tuple(pixels.shape) != expected:
        raise ShapeError(
            f"the image to start from has shape {tuple(pixels.shape)}; expected {expected}: "
            "resize it"
        )
    if grey:
        return (pixels.mean(0) * (adapter.vocab - 1)).round().long()
    with torch.no_grad():
        return vq.encode(pixels[None].to(vq.device, vq.dtype) * 2 - 1)[0].cpu()


class Given(Drafter):
    """Drafts the given codes that come next, and nothing else: a run of them takes one pass.

    Used with decoding without a drafter; windows insert given codes themselves.

    Args:
        most: Maximum number of tokens of a proposal.

    Lossless under every rule that takes deterministic proposals; neutral if no codes are given.
    """

    capabilities = DrafterCapabilities(graph_safe=True)

    def __init__(self, most: int = 64) -> None:
        self.most = most

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """See `Drafter.begin`."""
        return GivenSession(call, self.most)


class GivenSession(DraftSession):
    """Proposes given codes of the layout, at most ``most`` at once."""

    def __init__(self, call: Call, most: int) -> None:
        super().__init__(call)
        self.most = most

    def propose(self, budget: int) -> Proposal:
        """The given codes up to the next free position."""
        call = self.call
        order = torch.arange(min(self.most, budget), device=call.device)
        tokens = call.plan.adapter.layout.forced(call.rows.length[:, None] + order)
        ahead = (tokens >= 0).long().cumprod(1).bool()
        return Proposal(tokens=tokens.masked_fill(~ahead, -1), kind="deterministic")
