"""RBD-style: contrasts with a noised image, and adds logits for the most attended image tokens.

The guided logits are ``(1 + a - b) z - a z(noised) + b z(most attended)``, whose weights add up to
1. Then implausible tokens are excluded, see `mmdecode.guide.linear`. This follows the abstract of
Re-Balancing Contrastive Decoding and does not reproduce its results. Chosen here: the coefficients,
how many image tokens are kept, and that tokens are ranked by the image encoder's attention.

Source: Liang et al. 2024, arXiv:2409.06485 (abstract).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import OptionError
from mmdecode.guide.linear import Linear, not_negative
from mmdecode.guide.vcd import noised_branch


class RBD(Linear):
    """Re-balances the influence of text and image on the logits.

    Args:
        a: Weight a of the branch with a noised image; 0 leaves the branch out.
        b: Weight b of the branch with the most attended image tokens; 0 leaves the branch out.
        beta: Plausibility cut: excludes tokens with a main probability below ``beta * max p``.
        step: Diffusion step that sets the noise level, see `mmdecode.guide.vcd.VCD`.
        keep: Share of the image tokens that are kept, above 0 and at most 1.

    The guide has no effect with ``a``, ``b`` and ``beta`` 0. With ``b`` 0 this is VCD.
    """

    summary = "away from a noised image, towards its most attended tokens; weights are ours"
    source = "Liang et al. 2024, in its style"
    requires_inputs = ("image",)

    def __init__(
        self,
        a: float = 1.0,
        b: float = 0.5,
        beta: float = 0.1,
        step: int = 500,
        keep: float = 0.5,
    ) -> None:
        not_negative("a", a)
        not_negative("b", b)
        super().__init__([noised_branch(step), attended_branch(keep)], [1 + a - b, -a, b], beta)


def attended_branch(keep: float) -> BranchSpec:
    """Returns a branch that reads only the most attended share ``keep`` of the image tokens.

    Raises:
        OptionError: ``keep`` is not above 0 and at most 1.
    """
    if isinstance(keep, str) or not 0 < keep <= 1:
        raise OptionError(f"keep must be in 0..1 and more than 0, got {keep}; 1 keeps all tokens")
    select = partial(most_attended, keep)
    return BranchSpec(name="attended", transform="tokens", transform_options={"select": select})


def most_attended(keep: float, features: Tensor, salience: Tensor) -> Tensor:
    """Returns ascending indices of the most attended share ``keep`` of tokens, at least one."""
    count = max(1, round(keep * len(salience)))
    return salience.topk(count).indices.sort().values
