"""Cool-SD: acceptance odds are raised by a factor that decays with depth. Lossy.

The i-th drafted token is kept with probability min(1, w_i p(x) / q(x)), where
``w_i = max(1, delta exp(-nu i - mu))``, i = 0 for the first. A rejected one is replaced by a sample
from norm(max(p - q f, 0)), f the probability of being kept: the residual that leaves the output
nearest to p. Since f is never below the exact min(1, p / q), that is the exact rule's residual:
where p < q both are zero, elsewhere f = 1. So nothing but the test differs.

Source: arXiv:2601.09212. Published runs have ``delta`` 1.1 to 2 and ``nu`` 0.7; the factor is never
below 1 here, where a draft would be kept less often than by the exact rule.
"""

from __future__ import annotations

import math

from torch import Tensor

from mmdecode.accept.rejection import Candidate, Relaxed
from mmdecode.errors import OptionError


class CoolSD(Relaxed):
    """Rejection sampling with odds raised by ``max(1, delta exp(-nu i - mu))``.

    Args:
        delta: Factor of the first drafted token at ``mu=0``, from 1 on. ``1`` is neutral: the
            rejection rule.
        nu: How fast it falls with each further token, from 0 on; ``0``: the same for all.
        mu: Lowers the logarithm of all factors, from 0 on.

    Guarantee: lossy. Needs no codebook, and never keeps what has no probability.

    Raises:
        OptionError: A number is out of range.
    """

    summary = "rejection sampling with acceptance odds raised by a factor that decays"
    source = "Cool-SD, arXiv:2601.09212"
    guarantee = "lossy"

    def __init__(self, delta: float = 1.1, nu: float = 0.7, mu: float = 0.0) -> None:
        if not (1 <= delta < math.inf and nu >= 0 and mu >= 0):
            raise OptionError(
                f"delta={delta}, nu={nu}, mu={mu}; expected delta of 1 (neutral) or more, nu and "
                "mu of 0 or more"
            )
        self.delta, self.nu, self.mu = delta, nu, mu

    def odds(self, candidate: Candidate) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of the test: w p(x), and q(x)."""
        p_x, q_x = super().odds(candidate)
        factor = self.delta * (-self.nu * candidate.depth.to(p_x.dtype) - self.mu).exp()
        return factor.clamp_min(1) * p_x, q_x
