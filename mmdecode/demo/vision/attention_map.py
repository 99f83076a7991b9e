"""Attention to image tokens before the first token of an answer, with a guide and without.

The attention is that of the last prompt position, which decides the first token, averaged over
heads and over the layers that the guide edits.
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
    """Attention to the image tokens of one question.

    Attributes:
        plain: Share of attention on each image token without edits, ``(n,)``.
        edited: The same with the guide's edits, ``(n,)``.
        layers: Layers that are averaged.
        branch: The branch that is edited.
    """

    plain: Tensor
    edited: Tensor
    layers: tuple[int, ...]
    branch: str

    @property
    def side(self) -> int | None:
        """Side of the square of image tokens; ``None``: they are not a square."""
        side = math.isqrt(len(self.plain))
        return side if side * side == len(self.plain) else None


def attention_map(
    answerer: Answerer, image: Any, question: str, guide: Guide
) -> AttentionMap | None:
    """Attention to the image before the first token, with and without a guide's edits.

    Args:
        answerer: Answerer whose model and processor are used.
        image: Image as `mmdecode.vlm.Answerer` takes it.
        question: The question.
        guide: Guide whose edits are shown.

    Returns:
        The attention; ``None`` if the guide edits no attention of the language model.

    Raises:
        InputError: The question cannot be asked.
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
    """Records attention in the layers that a guide edits, with its edits or without."""

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
        """Requirements of the edited layers."""
        depth = adapter.num_layers
        self.layers = tuple(
            layer
            for layer in range(depth)
            if any(edit.covers(layer, depth) for edit in self._covers)
        )
        return Requirements(attention=frozenset(self.layers))

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Keeps the attention of the single row."""
        super().begin(call, prefill)
        scores = prefill[self._branch]
        assert scores.images is not None, "comes with attention"
        weights = torch.stack([scores.attention[layer][0, :, 0].float() for layer in self.layers])
        self.shares = weights.mean((0, 1))[scores.images[0]].cpu()
