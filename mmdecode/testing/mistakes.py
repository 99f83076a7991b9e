"""Known mistakes of released samplers, planted for as long as a context lasts.

What claims to find such mistakes has to be shown them: a test by enumeration, a benchmark by the
likelihood of what a real model draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from mmdecode.accept import tail
from mmdecode.engine.contracts import Outcome


@contextmanager
def stale_law() -> Iterator[None]:
    """Tokens of a window that are kept behind a rejection keep the law they had before it."""
    sound = tail.with_tail

    def stale(outcome: Outcome, proposal: Any, *others: Any) -> Outcome:
        result = sound(outcome, proposal, *others)
        size = proposal.size
        if not size:
            return result
        assert result.tail_tokens is not None and result.tail_law is not None
        order = torch.arange(size, device=proposal.tokens.device)
        source = outcome.num_accepted[:, None] + 1 + order
        before = source.clamp_max(size - 1)
        kept = (result.tail_tokens == proposal.tokens.gather(1, before)) & (source < size)
        q = proposal.log_q.gather(1, before[..., None].expand_as(proposal.log_q))
        return replace(result, tail_law=torch.where(kept[..., None], q, result.tail_law))

    with mock.patch("mmdecode.accept.follow.with_tail", stale):
        yield


@contextmanager
def resampled_from_p() -> Iterator[None]:
    """What takes the place of a rejected token is drawn from p, and not from the residual."""
    with mock.patch("mmdecode.accept.rejection.residual", lambda p, q: p):
        yield
