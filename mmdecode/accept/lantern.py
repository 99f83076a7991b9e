"""LANTERN and LANTERN++, lossy rules for image tokens that pool the probability of similar codes.

Distributions of image tokens are flat, because many codes look alike: an exact test often rejects
a drafted code x although its neighbours in the codebook have a high probability. Here x is kept
with probability min(1, (p(x) + p(A)) / q(x)). The set A holds the codes nearest to x, as many as
keep their total probability p(A) within a budget: ``delta`` (LANTERN), or ``(lambda - 1) p(x)``
(LANTERN++).
After a rejection the next token is sampled from max(p - q, 0), normalised.

``delta`` bounds the probability p(A) that is added in one test, not the distance of the output
distribution from p.

Sources: Jang et al. 2024 (LANTERN), arXiv:2410.03355; Park et al. 2025 (LANTERN++),
arXiv:2502.06352. Differs from the published code, which is not exact at delta = 0: the residual
after a rejection is computed from p alone, without changes for the neighbours. Delta and lambda are
two separate arguments. Distances are between the embeddings that the image decoder receives;
LlamaGen normalises them, while the published table of neighbours was computed without that.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmdecode.accept.rejection import Candidate, Relaxed
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import Outcome
from mmdecode.engine.proposal import Proposal
from mmdecode.engine.target_logits import TargetLogits
from mmdecode.errors import IncompatibleError, OptionError

_BLOCK = 512  # codes whose distances to all others are computed at once
_TABLES: WeakKeyDictionary[Any, dict[int, Tensor]] = WeakKeyDictionary()  # by adapter
_SORTED: dict[bytes, dict[int, Tensor]] = {}  # by content: adapters come and go


class LANTERN(Relaxed):
    """Rejection sampling where the nearest codes add their probability to the drafted code's.

    Exactly one of ``delta`` and ``lambda_`` is given; published runs have ``delta=0.1`` with
    ``k=1000`` of 16384 codes, and ``lambda_=5`` with ``k=10``.

    Args:
        delta: Maximum probability that the nearest codes add, 0 to 1. ``0``: exact rejection.
        lambda_: Maximum ratio of p(x) + p(A) to p(x), 1 or more. ``1``: exact rejection.
        k: Maximum number of nearest codes that are considered.
        neighbours: Nearest codes of each code without itself, nearest first, ``(C, K)``; ``None``:
            computed once for each model, from its codebook.

    Guarantee: lossy. A drafted code with p(x) = 0 may be kept. Tokens that are no image codes, and
    positions with a forced token (such as the end of a row), are tested exactly.

    Raises:
        OptionError: Both or neither of ``delta`` and ``lambda_`` are given, or a number is out of
            range.
    """

    summary = "similar image codes add their probability to the drafted one"
    source = "Jang et al. 2024; LANTERN++, Park et al. 2025"
    guarantee = "lossy"

    def __init__(
        self,
        delta: float | None = None,
        lambda_: float | None = None,
        k: int = 1000,
        neighbours: Tensor | None = None,
    ) -> None:
        if (delta is None) == (lambda_ is None):
            raise OptionError(
                f"delta={delta}, lambda_={lambda_}; give one of them: delta=0.1 adds at most "
                "that probability to a drafted token's, lambda_=5 at most four times its own"
            )
        if delta is not None and not 0 <= delta <= 1:
            raise OptionError(
                f"delta is a probability, 0 (neutral) to 1, got {delta}; a factor is lambda_"
            )
        if lambda_ is not None and not 1 <= lambda_ < math.inf:
            raise OptionError(f"lambda_ is a factor, 1 (neutral) or more, got {lambda_}")
        if k < 1:
            raise OptionError(f"k must be 1 or more, got {k}")
        self.delta, self.lambda_ = delta or 0.0, lambda_ or 1.0
        self.k, self.neighbours = k, neighbours
        self.neutral = self.delta == 0 and self.lambda_ == 1

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """Applies the rule to a proposal; see `mmdecode.engine.contracts.AcceptanceRule`.

        Raises:
            IncompatibleError: The model has no codebook.
        """
        if not self.neutral:
            self._table(call.plan.adapter)  # refuse in the first round, before anything is drafted
        return super().__call__(proposal, target, call)

    def odds(self, candidate: Candidate) -> tuple[Tensor, Tensor]:
        """Returns p(x) + p(A) and q(x), the numerator and denominator of the acceptance test."""
        p_x, q_x = super().odds(candidate)
        if self.neutral:
            return p_x, q_x
        ids, code_of, relaxed = codes_at(candidate)
        code = code_of[candidate.token].clamp_min(0)
        near = ids[self._table(candidate.adapter)[code].long()]  # (..., k) tokens
        lent = borrowed(candidate.p.gather(-1, near), self.delta + (self.lambda_ - 1) * p_x)
        return p_x + torch.where(relaxed, lent, 0.0), q_x

    def _table(self, adapter: Any) -> Tensor:
        """Returns the nearest codes of each code, at most k, nearest first, ``(C, k)``."""
        if self.neighbours is not None:
            return self.neighbours[:, : self.k]
        tables = _TABLES.setdefault(adapter, {})
        if self.k not in tables:
            codes = codebook_of(self, adapter)
            content = hashlib.blake2b(codes.cpu().numpy().tobytes(), digest_size=8).digest()
            known = _SORTED.setdefault(content, {})
            if self.k not in known:
                known[self.k] = nearest(codes, self.k)
            tables[self.k] = known[self.k].to(codes.device)
        return tables[self.k]


def borrowed(near: Tensor, budget: Tensor) -> Tensor:
    """Returns the probability p(A) that the nearest codes add in the test, ``(...)``.

    Args:
        near: Probabilities of the k nearest codes, nearest first, ``(..., k)``.
        budget: Maximum sum, ``(...)``: the longest prefix of ``near`` within it is summed.
    """
    sums = near.cumsum(-1)
    return sums.masked_fill(sums > budget[..., None], 0).amax(-1)


def nearest(codes: Tensor, count: int) -> Tensor:
    """Finds the ``count`` nearest other codes of each code, nearest first.

    Args:
        codes: Embeddings, ``(C, d)``.
        count: Number of neighbours; at most C - 1 are returned.

    Returns:
        Indices of codes, ``(C, count)`` int32.
    """
    count = min(count, len(codes) - 1)
    rows = []
    for first in range(0, len(codes), _BLOCK):
        block = codes[first : first + _BLOCK]
        apart = torch.cdist(block, codes, compute_mode="donot_use_mm_for_euclid_dist")
        apart.diagonal(first).fill_(torch.inf)  # a code is not its own neighbour, its twin is
        rows.append(apart.topk(count, largest=False).indices.int())
    return torch.cat(rows)


def codebook_of(rule: Relaxed, adapter: Any) -> Tensor:
    """Returns the embeddings of the codes that the image decoder receives, ``(C, d)`` float32.

    Raises:
        IncompatibleError: The model has no codebook.
    """
    codes = adapter.codebook()
    if codes is None:
        raise IncompatibleError.between(
            f"accept {type(rule).__name__}",
            adapter.name,
            "the rule compares the codes of an image tokenizer, and this model has no codebook",
            "use accept 'cool_sd', which needs none, or an exact rule",
        )
    return codes.float()


def codes_at(candidate: Candidate) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what a rule needs to compare the image codes of drafted tokens.

    Returns:
        The token id of each code, ``(C,)``; the code of each token id, -1 if it has none, ``(V,)``;
        and whether each drafted token may be compared with others, ``(...)`` bool: it must be a
        code, and the image layout must not force the token at its position.
    """
    vocab, device = candidate.p.shape[-1], candidate.p.device
    layout = candidate.adapter.layout if candidate.adapter is not None else None
    if layout is None:
        every = torch.arange(vocab, device=device)
        return every, every, torch.ones_like(candidate.token, dtype=torch.bool)
    ids, code_of = layout.ids.to(device), layout.codes_of(vocab, device)
    return ids, code_of, (code_of[candidate.token] >= 0) & (layout.forced(candidate.position) < 0)
