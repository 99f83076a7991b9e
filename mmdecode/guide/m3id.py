"""M3ID: contrasts the model with itself without the image, more with every generated token.

The guided logits are ``z + (z - z(no image)) (1 - g) / g`` with ``g = exp(-lambda t)``, where t is
the index of the generated token, from 0. So the first token, which is the whole answer to a yes-no
question, is unchanged. Then implausible tokens are excluded, see `mmdecode.guide.linear`. The paper
also reduces the contrast where the model is confident; this version without that is the one that
other papers compare with.

Source: Favero et al. 2024, arXiv:2403.14003, as implemented in RITUAL's release.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.call import Call
from mmdecode.engine.proposal import Proposal
from mmdecode.guide.linear import Linear, generated, not_negative

_LARGEST = 20.0  # limit of lambda t; beyond it only the image's share is left in float32


class M3ID(Linear):
    """Multi-modal mutual information decoding.

    Args:
        rate: Growth rate lambda of the contrast per generated token.
        beta: Plausibility cut: excludes tokens with a main probability below ``beta * max p``.

    The guide has no effect with ``rate`` 0 and ``beta`` 0.
    """

    summary = "away from the answer without the image, more with every token"
    source = "Favero et al. 2024"
    requires_inputs = ("image",)

    def __init__(self, rate: float = 0.02, beta: float = 0.1) -> None:
        self.rate = not_negative("rate", rate)
        # weights change by position, see `weigh`; their sum is always 1
        super().__init__([BranchSpec(name="text", transform="no_image")], [1 + rate, -rate], beta)

    def weigh(self, call: Call, proposal: Proposal) -> Sequence[float | Tensor]:
        """Returns the weights ``(1 + f, -f)`` with ``f = (1 - g) / g``."""
        if not self.rate:
            return self.weights
        more = (self.rate * generated(call, proposal)).clamp_max(_LARGEST).expm1()[..., None]
        return [1 + more, -more]
