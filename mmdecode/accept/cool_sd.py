"""Cool-SD, a lossy rule: rejection sampling with a factor on the odds that decays with depth.

The i-th drafted token is kept with probability min(1, w_i p(x) / q(x)), where
``w_i = max(1, delta exp(-nu i - mu))`` and i is 0 for the first drafted token. After a rejection,
the next token is sampled from norm(max(p - q f, 0)), where f is the probability of being kept. This
residual keeps the output distribution nearest to p, and equals the residual norm(max(p - q, 0)) of
exact rejection sampling, since f is at least min(1, p / q): both are zero where p < q, and f is 1
elsewhere. Only the acceptance test differs from exact rejection sampling.

Source: arXiv:2601.09212. Published runs have ``delta`` 1.1 to 2 and ``nu`` 0.7. Differs from the
paper: the factor is never below 1, so no token is kept less often than by exact rejection sampling.
"""

from __future__ import annotations

import math

from torch import Tensor

from mmdecode.accept.rejection import Candidate, Relaxed
from mmdecode.errors import OptionError


class CoolSD(Relaxed):
    """Rejection sampling with odds raised by ``max(1, delta exp(-nu i - mu))``.

    Args:
        delta: Factor of the first drafted token if ``mu`` is 0; at least 1. ``1`` is exact
            rejection sampling.
        nu: Decrease of the logarithm of the factor with each further token; at least 0. With ``0``
            all tokens have the same factor.
        mu: Amount by which the logarithms of all factors are lowered; at least 0.

    Guarantee: lossy. The rule needs no codebook of image tokens, and never keeps a token whose
    target probability is 0.

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
        """Returns the numerator w p(x) and the denominator q(x) of the acceptance test."""
        p_x, q_x = super().odds(candidate)
        factor = self.delta * (-self.nu * candidate.depth.to(p_x.dtype) - self.mu).exp()
        return factor.clamp_min(1) * p_x, q_x
