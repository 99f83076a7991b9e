"""Attention to image tokens when the first token of an answer is chosen, with and without a guide.

It is the attention of the last prompt position, averaged over heads and over the layers whose
attention the guide edits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdecode.decoder import Decoder
from mmdecode.engine.attention import AttentionEdit
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide, Requirements
from mmdecode.guide.edited import Edited
from mmdecode.vlm.answerer import Answerer


@dataclass(frozen=True)
class AttentionMap:
    """Attention of a question's last prompt position to the image tokens.

    Attributes:
        plain: Share of attention on each image token without the guide, ``(n,)``.
        edited: Share of attention on each image token with the guide's edits, ``(n,)``.
        layers: Indices of the layers that are averaged.
        branch: Name of the branch whose attention is edited.
    """

    plain: Tensor
    edited: Tensor
    layers: tuple[int, ...]
    branch: str

    @property
    def side(self) -> int | None:
        """Side of the square grid of image tokens; ``None``: the grid is no square."""
        side = math.isqrt(len(self.plain))
        return side if side * side == len(self.plain) else None


def attention_map(
    answerer: Answerer, image: Any, question: str, guide: Guide
) -> AttentionMap | None:
    """Measures the attention to the image with and without a guide's edits.

    Args:
        answerer: Answerer whose model and processor are used.
        image: Image in any form that `mmdecode.vlm.Answerer` accepts.
        question: The question.
        guide: Guide whose edits are shown.

    Returns:
        The attention; ``None`` if the guide edits no attention of the language model.

    Raises:
        InputError: The image cannot be read, or the question is refused.
    """
    edits = _attention_edits(guide)
    if not edits:
        return None
    readings: list[Any] = [_Reading(guide, edited=False), _Reading(guide, edited=True)]
    for reading in readings:
        reader = Answerer(answerer.model, answerer.processor, Decoder(guide=reading, seed=0))
        reader(image, question, max_new_tokens=1, margins=False)
    plain, edited = (reading.shares for reading in readings)
    return AttentionMap(plain, edited, readings[1].layers, edits[0].branch)


def _attention_edits(guide: Guide) -> list[AttentionEdit]:
    return [edit for edit in getattr(guide, "edits", ()) if isinstance(edit, AttentionEdit)]


class _Reading(Edited):
    """Guide that records attention in the layers another guide edits, with or without its edits.

    Args:
        guide: The other guide.
        edited: Whether to apply its edits.
    """

    neutral = False
    images = True

    def __init__(self, guide: Guide, edited: bool) -> None:
        self._covers = _attention_edits(guide)
        self._branch = self._covers[0].branch if edited else "main"
        # the guide's branches may set the strength of the edits
        self.branches = guide.branches if edited else ()
        self.edits = getattr(guide, "edits", ()) if edited else ()
        self.layers: tuple[int, ...] = ()
        self.shares = Tensor()

    def needs(self, adapter: Any) -> Requirements:
        """Requires the attention weights of the edited layers."""
        depth = adapter.num_layers
        self.layers = tuple(
            layer
            for layer in range(depth)
            if any(edit.covers(layer, depth) for edit in self._covers)
        )
        return Requirements(attention=frozenset(self.layers))

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Stores the attention of the prefill, of the batch's only row."""
        super().begin(call, prefill)
        scores = prefill[self._branch]
        assert scores.images is not None, "comes with attention"
        weights = torch.stack([scores.attention[layer][0, :, 0].float() for layer in self.layers])
        self.shares = weights.mean((0, 1))[scores.images[0]].cpu()
