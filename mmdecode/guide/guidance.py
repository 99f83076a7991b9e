"""Classifier-free guidance of image tokens: contrast with unconditional generation.

``u + s (c - u)`` on raw logits, c with the condition and u without: the caption left out, the null
class, a negative prompt. The model family decides which of these it is, so the branch asks its
adapter for the transform ``"unconditional"``. Every family's own strength comes down to this s; one
that states t with ``(1 + t) c - t u`` has s = 1 + t.

Source: Ho and Salimans 2022, arXiv:2207.12598, equation 6.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, where

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.call import Call
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError
from mmdecode.guide.linear import Linear, generated, not_negative


class Guidance(Linear):
    """Classifier-free guidance of scale ``scale``, on raw logits.

    Args:
        scale: s above; 0 is the unconditional branch alone. `mmdecode.generate` in image mode uses
            the family's published value; the default here is LlamaGen's for classes.
        until: Index of the last token that is guided; later ones follow the condition alone.
            ``None``: all are. LlamaGen's ``cfg_interval`` of n guides up to index n + 1.

    The guide has no effect with ``scale`` 1; then the unconditional branch is not run.

    Raises:
        OptionError: A number is negative.
    """

    summary = "classifier-free guidance of image tokens, on raw logits"
    source = "Ho and Salimans 2022"

    def __init__(self, scale: float = 4.0, until: int | None = None) -> None:
        if until is not None and until < 0:
            raise OptionError(
                f"until must be 0 or more, got {until}; scale=1 switches guidance off"
            )
        self.scale, self.until = not_negative("scale", scale), until
        branch = BranchSpec(name="unconditional", transform="unconditional")
        super().__init__([branch], [self.scale, 1 - self.scale])

    def weigh(self, call: Call, proposal: Proposal) -> Sequence[float | Tensor]:
        """``(s, 1 - s)``, and ``(1, 0)`` after ``until``."""
        if self.until is None or self.neutral:
            return self.weights
        scale = where(generated(call, proposal) <= self.until, self.scale, 1.0)[..., None]
        return [scale, 1 - scale]
