"""How far a relaxed rule moves the distribution of one drafted token, by closed form.

A draft x from q that is kept with probability f(x), else replaced by a draw from the residual r,
leaves the distribution ``q f + (1 - sum q f) r``. Where f is nowhere below the exact min(1, p / q)
and r is the exact rule's, its distance from p is the excess of the kept tokens, ``sum (q f - p)+``,
and no other residual brings it nearer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdecode.accept.rejection import Candidate, Rejection
from mmdecode.engine.sampling import residual


@dataclass(frozen=True, kw_only=True)
class OneToken:
    """What a rule makes of one draft.

    Attributes:
        keeps: Probability of keeping each token, were it drafted, ``(..., V)``.
        kept: Probability of keeping the draft, ``(...)``.
        distribution: Of the token that comes out, ``(..., V)``.
        distance: Total variation of it from the distribution of the model, ``(...)``.
    """

    keeps: Tensor
    kept: Tensor
    distribution: Tensor
    distance: Tensor


def one_token(
    rule: Rejection, p: Tensor, q: Tensor, *, depth: int = 0, position: int = 0, adapter: Any = None
) -> OneToken:
    """Enumerates every draft at one position; takes V times the memory of the distributions.

    Args:
        rule: The rejection rule, or a relaxed one.
        p: Distributions of the model, ``(..., V)``.
        q: Distributions that the draft is sampled from, one-hot if it is not sampled, ``(..., V)``.
        depth: Drafted tokens before it.
        position: Its index among the generated tokens.
        adapter: Of a model of image tokens, where the rule asks for codes or grid.
    """
    vocab = p.shape[-1]
    drafts = torch.arange(vocab, device=p.device).expand(p.shape)  # (..., V)
    first, second = rule.odds(
        Candidate(
            p=p[..., None, :].expand(*p.shape, vocab),
            q=q[..., None, :].expand(*q.shape, vocab),
            token=drafts,
            depth=torch.full_like(drafts, depth),
            position=torch.full_like(drafts, position),
            adapter=adapter,
        )
    )
    never = second <= 0  # drafted with probability 0: nothing hangs on it
    keeps = torch.where(never, 1.0, first / torch.where(never, 1.0, second)).clamp_max(1)
    stays = q * keeps
    kept = stays.sum(-1)
    distribution = stays + (1 - kept)[..., None] * residual(p, q)
    return OneToken(
        keeps=keeps,
        kept=kept,
        distribution=distribution,
        distance=(distribution - p).abs().sum(-1) / 2,
    )
