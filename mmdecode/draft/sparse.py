"""Sparse-to-Dense: drafts with the target model, attending only to the most relevant image tokens.

After prefill, every head of every layer keeps the ``cells`` image tokens that the prompt's text
attends to most, and all text tokens. Drafts are generated with this small cache, with the tokens'
original positions, and verified with the full cache. No training is needed, and the prompt is run
once. The method pays if image tokens far outnumber text tokens (videos, many tiles), so that
attending to them dominates the cost of a pass; with a few hundred image tokens it does not.

Source: Zhang et al. 2025 (Sparse-to-Dense), arXiv:2505.19155, section 3. The score of image token j
is the attention A(i, j), averaged over the text tokens i of the prompt and summed over the query
heads that share a key head. Tokens are chosen once, after the prompt. There is no reference code.
Differs from the paper: ``cells`` counts image tokens; the paper's budget (1024) counts image and
text tokens together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmdecode.draft.mirror import CacheCopyDrafter, CopySession
from mmdecode.engine.adapter import Adapter
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Requirements
from mmdecode.errors import IncompatibleError, OptionError


class Sparse(CacheCopyDrafter):
    """Drafts ``length`` tokens per round with only ``cells`` image tokens in the cache.

    Args:
        cells: Number of image tokens that each head keeps. If it keeps all, drafting equals the
            target and every token is accepted.
        length: Number of tokens drafted per round; 0 drafts nothing.
        max_rejection_probability: Threshold that ends drafting early, see
            `mmdecode.draft.assistant.Assistant`.

    Lossless under every exact acceptance rule, whichever tokens are kept.

    Raises:
        IncompatibleError: When decoding begins: the model has sliding-window layers, or its adapter
            gives no access to its layers.
    """

    summary = "the model drafts from the image tokens alone that the question attends to most"
    source = "Sparse-to-Dense, Zhang et al. 2025"

    def __init__(
        self, cells: int = 512, length: int = 9, max_rejection_probability: float = 1.0
    ) -> None:
        if cells < 0:
            raise OptionError(f"cells must be >= 0, got {cells}")
        super().__init__(length, max_rejection_probability)
        self.cells = cells

    @classmethod
    def from_options(  # type: ignore[override]
        cls, cells: int = 512, length: int = 9, max_rejection_probability: float = 1.0
    ) -> Sparse:
        """Builds the drafter from a string's options, for example ``sparse:cells=256``."""
        return cls(cells, length, max_rejection_probability)

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns what the drafter needs: the attention weights of the prompt's text tokens."""
        return Requirements(text_attention=True)

    def begin(self, call: Call, prefill: BranchOutput) -> CopySession:
        """Opens a session: chooses the image tokens, and copies their keys and values."""
        if any(window is not None for window in call.plan.adapter.windows.values()):
            raise IncompatibleError.between(
                "draft Sparse",
                call.plan.adapter.name,
                "its sliding attention windows would be wrong once image tokens are left out",
                "use layer_skip or amateur",
            )
        self._refuse(call)
        return SparseSession(call, prefill, self)


class SparseSession(CopySession):
    """Session of a `Sparse` drafter."""

    def __init__(self, call: Call, prefill: BranchOutput, drafter: Sparse) -> None:
        self.cells = drafter.cells
        super().__init__(call, prefill, drafter)

    def chosen(self, prefill: BranchOutput) -> tuple[Sequence[Tensor], Tensor]:
        """Chooses all text tokens and, per group of heads, the most attended image tokens."""
        images = prefill.images
        assert images is not None, "asked for by text_attention"
        columns = torch.arange(images.shape[1], device=self.call.device)
        real = columns >= self.main.pads[self.rows][:, None]
        images = images & real
        kept = (real & ~images).sum(1) + images.sum(1).clamp_max(self.cells)
        width = int(kept.amax())
        slots = []
        for index, layer in enumerate(self.main.cache.layers):
            # a model without attention sites has no image tokens either
            weights = prefill.text_attention.get(index, images[:, None].float())
            groups = layer.keys.shape[1] if layer.is_initialized else 1
            best = most_attended(weights, images, self.cells, groups)
            keep = best | (real & ~images)[:, None]
            slots.append(keep.long().argsort(dim=2, stable=True)[..., -width:])
        return slots, kept


def most_attended(weights: Tensor, images: Tensor, cells: int, groups: int) -> Tensor:
    """Marks the image tokens that each group of heads attends to most, bool ``(B, groups, P)``.

    Args:
        weights: Attention weights by query head, ``(B, H, P)``; query heads of a group, which share
            a key head, are adjacent.
        images: Whether each prompt token is an image token, ``(B, P)`` bool.
        cells: Number of image tokens to choose; in a row that has fewer, all.
        groups: Number of key heads.
    """
    groups = min(groups, weights.shape[1])
    score = weights.unflatten(1, (groups, -1)).sum(2)
    score = score.masked_fill(~images[:, None], -1.0)
    best = score.topk(min(cells, score.shape[2]), dim=2).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter(2, best, True) & images[:, None]
