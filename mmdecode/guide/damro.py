"""DAMRO: contrasts the model with itself on the image tokens that its encoder attends to most.

The negative branch reads the prompt with only the k image tokens that the image encoder attends to
most, which are often background. They are read in the order of that attention, at consecutive
positions. The guided logits are ``(1 + alpha) * main - alpha * negative``; then implausible tokens
are excluded, see `mmdecode.guide.linear`.

Image tokens are ranked by the attention from the encoder's class token, in the layer whose states
become image tokens, averaged over heads. For encoders without a class token (SigLIP, Qwen-VL),
which the paper does not use, they are ranked by the mean attention that each patch receives,
averaged over the patches that are merged into an image token. With InstructBLIP, the Q-Former reads
the k patches instead of all.

Source: Gong et al. 2024, arXiv:2410.04514. The release (coder-gx/DAMRO) computes the attention for
LLaVA as if all heads were one (``heads="joined"``). It ignores temperature, top-p and penalties;
here they are applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput
from mmdecode.errors import OptionError
from mmdecode.guide.linear import Linear, contrast

_BRANCH = "outliers"


class DAMRO(Linear):
    """Contrasts the model with itself on the ``k`` most attended image tokens.

    Args:
        alpha: Strength of the contrast. Published: 2 for LLaVA; 0.5 on POPE and 1.5 on CHAIR for
            InstructBLIP.
        k: Number of image tokens that the negative branch reads in each row; all if a row has
            fewer. Published: 10 for LLaVA, 4 for InstructBLIP.
        beta: Plausibility cut, 0 to 1: excludes tokens with a main probability below ``beta * max
            p``.
        heads: How the heads' attention is combined: ``"mean"``, or ``"joined"`` as if all heads
            were one.
        order: Order in which the k tokens are read: by decreasing ``"attention"``, or
            ``"spatial"``.

    Attributes:
        salience: Attention that ranked the tokens in the last call: ``"class token"`` or ``"mean
            received"``; ``None`` before the first call.

    The guide has no effect with ``alpha`` 0 and ``beta`` 0.
    """

    summary = "away from the image tokens that the image encoder attends to most"
    source = "Gong et al. 2024"
    requires_inputs = ("image",)

    def __init__(
        self,
        alpha: float = 2.0,
        k: int = 10,
        beta: float = 0.1,
        heads: Literal["mean", "joined"] = "mean",
        order: Literal["attention", "spatial"] = "attention",
    ) -> None:
        if k < 1:
            raise OptionError(f"k, the number of image tokens to read, must be >= 1, got {k}")
        if heads not in ("mean", "joined"):
            raise OptionError(f"heads must be 'mean' or 'joined', got {heads!r}")
        if order not in ("attention", "spatial"):
            raise OptionError(f"order must be 'attention' or 'spatial', got {order!r}")
        self.k, self.order = int(k), order
        self.salience: str | None = None
        options = {"select": self._select, "heads": heads}
        branch = BranchSpec(name=_BRANCH, transform="tokens", transform_options=options)
        super().__init__([branch], contrast(alpha), beta)

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Sets `salience`; computes nothing in advance."""
        super().begin(call, prefill)
        self.salience = "class token" if call.plan.adapter.has_cls() else "mean received"

    def _select(self, features: Tensor, salience: Tensor) -> Tensor:
        found = salience.topk(min(self.k, len(salience))).indices
        return found if self.order == "attention" else found.sort().values
