"""Sparse to dense: the model drafts while attending only to the image tokens that matter.

After prefill, every head of every layer keeps the ``cells`` image tokens that the prompt's text
attends to most, and all text tokens. Drafts are generated with this small cache, at the tokens' own
positions, and verified with the whole one. No training, and the prompt is read once. It pays where
image tokens far outnumber text tokens (videos, many tiles), so that reading them dominates the cost
of a pass; with a few hundred of them it does not.

Source: Zhang et al. 2025 (Sparse-to-Dense), arXiv:2505.19155, section 3. The score of image token j
is the mean over the text tokens i of the prompt of A(i, j), summed over the query heads that share
a key; chosen once. Differs: there is no reference code; the number of image tokens is given, where
the paper gives that of image tokens and words together (1024).
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
    """Drafts ``length`` tokens with ``cells`` image tokens in the cache.

    Args:
        cells: Image tokens that each head keeps; as many as there are is the model itself, and
            accepts everything.
        length: Tokens per round; 0 is neutral.
        max_rejection_probability: See `mmdecode.draft.assistant.Assistant`.

    Lossless under every exact rule, whatever is kept.

    Raises:
        IncompatibleError: At the call: layers of the model attend to a window of tokens, or its
            adapter gives no access to its layers.
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
        """Builds it from a string: ``sparse:cells=256``."""
        return cls(cells, length, max_rejection_probability)

    def needs(self, adapter: Adapter) -> Requirements:
        """The attention of the prompt's text."""
        return Requirements(text_attention=True)

    def begin(self, call: Call, prefill: BranchOutput) -> CopySession:
        """Chooses the image tokens, and copies their keys and values."""
        if any(window is not None for window in call.plan.adapter.windows.values()):
            raise IncompatibleError.between(
                "draft Sparse",
                call.plan.adapter.name,
                "some of its layers see a window of tokens, which is counted in slots",
                "use layer_skip or amateur",
            )
        self._refuse(call)
        return SparseSession(call, prefill, self)


class SparseSession(CopySession):
    """One call of a `Sparse`."""

    def __init__(self, call: Call, prefill: BranchOutput, drafter: Sparse) -> None:
        self.cells = drafter.cells
        super().__init__(call, prefill, drafter)

    def chosen(self, prefill: BranchOutput) -> tuple[Sequence[Tensor], Tensor]:
        """Text tokens, and for each group of heads the image tokens that these attend to most."""
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
    """The image tokens that a layer's heads attend to most, bool ``(B, groups, P)``.

    Args:
        weights: Weights by query head, ``(B, H, P)``; heads of a group follow one another.
        images: ``(B, P)``.
        cells: Number of image tokens to choose; all of a row that has fewer.
        groups: Number of key heads.
    """
    groups = min(groups, weights.shape[1])
    score = weights.unflatten(1, (groups, -1)).sum(2)
    score = score.masked_fill(~images[:, None], -1.0)
    best = score.topk(min(cells, score.shape[2]), dim=2).indices
    return torch.zeros_like(score, dtype=torch.bool).scatter(2, best, True) & images[:, None]
