"""Completion of images some of whose codes are given: continuation and inpainting.

Given codes are forced tokens: drafters propose them, and the token mask allows no other token at
their positions, as with the newline tokens that some models put after each row.

If the given codes are the first in raster order, the rest is sampled exactly from the model's
conditional distribution (*continued*). With any other mask the result is *locally constrained*: a
code depends on all codes before it, but not on given codes after it, since the distribution is
renormalised at each position and not over whole images. In next-scale models the given part is
*laid over* the image after every scale, and the next scale reads the result; this is not the
model's conditional distribution either.
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
        known: The given token at each position, -1 where none is given, ``(length,)``; or one such
            row per image, ``(B, length)``: then indices need a leading batch axis.
    """

    known: Tensor

    @property
    def has_forced(self) -> bool:
        """True: given codes are forced."""
        return True

    def forced(self, index: Tensor) -> Tensor:
        """Returns the forced token at each index, -1 where any code may follow; any shape."""
        known = self.known.to(index.device)
        position = index.clamp(0, self.length - 1)
        if known.ndim == 1:
            given = known[position]
        else:
            given = known.gather(1, position.flatten(1) if position.ndim > 1 else position[:, None])
            given = given.view_as(position)
        return torch.where(given >= 0, given, super().forced(index))


def partly_known(layout: Layout, codes: Tensor, known: int | Tensor) -> PartlyKnown:
    """Returns a layout in which some codes of an image are given.

    Args:
        layout: Layout of the model's image tokens.
        codes: Codes of the image to complete, ``(rows, columns)``; only the codes to keep are read.
        known: Number of codes to keep in raster order, or a mask of the codes to keep, bool
            ``(rows, columns)``.

    Raises:
        ShapeError: The shape of the codes or of the mask does not fit the grid.
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
    """Returns a layout with given tokens, ``(length,)`` or ``(B, length)``; -1: not given."""
    return PartlyKnown(
        layout.rows, layout.columns, layout.ids, layout.newline, layout.tail, known=tokens
    )


def kept_cells(known: int | Tensor, rows: int, columns: int) -> Tensor:
    """Returns the mask of the codes to keep, bool ``(rows, columns)``.

    Args:
        known: A number of codes in raster order, or a mask of codes or of pixels; with pixels, a
            code is kept if all pixels of its patch are.
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
            raise OptionError("the mask keeps every code; leave the part to generate unmarked")
        return stays
    if not 0 <= known < cells:
        raise OptionError(f"known={known}; expected 0 to {cells - 1} codes to keep")
    return (torch.arange(cells) < known).view(rows, columns)


def completion_of(layout: PartlyKnown) -> Completion:
    """Returns ``continued`` if the known codes are the first ones, else ``locally constrained``."""
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
            "no image tokenizer that encodes pixels was loaded",
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
    """Drafts only given codes, so that consecutive given codes take one pass of the model.

    It replaces `NoDraft` when an image is completed; Jacobi windows insert given codes themselves.
    The drafter is lossless under every rule that accepts deterministic proposals, and proposes
    nothing if no codes are given.

    Args:
        most: Maximum number of tokens of a proposal.
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
        """Proposes the given codes up to the next position without one."""
        call = self.call
        order = torch.arange(min(self.most, budget), device=call.device)
        tokens = call.plan.adapter.layout.forced(call.rows.length[:, None] + order)
        ahead = (tokens >= 0).long().cumprod(1).bool()
        return Proposal(tokens=tokens.masked_fill(~ahead, -1), kind="deterministic")
