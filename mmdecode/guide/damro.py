"""DAMRO: contrast with the few image tokens that the image encoder attends to most.

The negative branch reads the prompt with only the k image tokens that the encoder attends to most,
which are often background: ``(1 + alpha) * main - alpha * outliers``, then the plausibility cut.
They are read in the order of that attention, at consecutive positions.

Attention is that of the class token in the layer whose states become image tokens, averaged over
heads. An encoder without a class token (SigLIP, Qwen-VL) has none: there it is the attention that
each patch receives on average, pooled to image tokens where patches are merged. This is ours; the
paper has no such case. `DAMRO.salience` says which it was. InstructBLIP's Q-Former reads the k
patches instead of all.

Source: Gong et al. 2024, arXiv:2410.04514; the release (coder-gx/DAMRO) attends over the full width
as if there were one head (``heads="joined"``) for LLaVA, and ignores temperature, top-p and
penalties, which work here.
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
    """Contrast against ``k`` image tokens.

    Args:
        alpha: Strength of the contrast. Published: 2 for LLaVA, 0.5 and 1.5 for InstructBLIP on
            POPE and CHAIR.
        k: Image tokens of a row that stay; a row with fewer keeps all. Published: 10 for LLaVA, 4
            for InstructBLIP.
        beta: Plausibility cut, 0..1.
        heads: ``"mean"`` of the heads' attention, or ``"joined"``, as if they were one.
        order: Order in which the k are read: by falling ``"attention"``, or ``"spatial"``.

    Attributes:
        salience: ``"class token"`` or ``"mean received"``: the attention that chose them in the
            last call; ``None`` before the first.

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
            raise OptionError(f"k must be >= 1, got {k}: image tokens that the branch may see")
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
        """No constants; notes which attention there was."""
        super().begin(call, prefill)
        self.salience = "class token" if call.plan.adapter.has_cls() else "mean received"

    def _select(self, features: Tensor, salience: Tensor) -> Tensor:
        found = salience.topk(min(self.k, len(salience))).indices
        return found if self.order == "attention" else found.sort().values
