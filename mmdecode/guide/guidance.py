"""Classifier-free guidance of image tokens: contrasts conditional and unconditional logits.

The guided logits are ``u + s (c - u)``, with raw logits c given the condition and u without it.
Depending on the model family, "without" means an empty caption, the null class or a negative
prompt; the model's adapter provides it as the transform ``"unconditional"``. For families that
publish a strength t of ``(1 + t) c - t u``, s is 1 + t.

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
        scale: Guidance scale s; 0 follows the unconditional branch alone. `mmdecode.generate` in
            image mode uses the published value of the model family; the default here is LlamaGen's
            for class labels.
        until: Index of the last generated token that is guided; later tokens follow the conditional
            logits. ``None``: all tokens are guided. A ``cfg_interval`` of n in LlamaGen guides
            tokens up to index n + 1.

    With ``scale`` 1 the guide has no effect, and the unconditional branch is not run.

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
        """Returns the weights of both branches: ``(s, 1 - s)``, and ``(1, 0)`` after ``until``."""
        if self.until is None or self.neutral:
            return self.weights
        scale = where(generated(call, proposal) <= self.until, self.scale, 1.0)[..., None]
        return [scale, 1 - scale]
