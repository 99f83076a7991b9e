"""Context managers that patch mistakes of published samplers into this library, to test checks.

A check that claims to find such mistakes must fail inside these contexts. A test compares
distributions with exact enumeration; a benchmark compares the likelihood of a real model's samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from mmdecode.engine import window
from mmdecode.engine.contracts import DraftWindow, Outcome


@contextmanager
def stale_distribution() -> Iterator[None]:
    """Plants a mistake of Jacobi-style decoding: kept window tokens keep an outdated distribution.

    After a rejection, drafted tokens that stay in the window are scored with the distribution from
    before the rejection.
    """
    sound = window.continued

    def stale(outcome: Outcome, proposal: Any, *others: Any) -> DraftWindow:
        result = sound(outcome, proposal, *others)
        size = proposal.size
        if not size:
            return result
        order = torch.arange(size, device=proposal.tokens.device)
        source = outcome.num_accepted[:, None] + 1 + order
        before = source.clamp_max(size - 1)
        kept = (result.tokens == proposal.tokens.gather(1, before)) & (source < size)
        q = proposal.log_q.gather(1, before[..., None].expand_as(proposal.log_q))
        return replace(result, logits=torch.where(kept[..., None], q, result.logits))

    with mock.patch("mmdecode.engine.window.continued", stale):
        yield


@contextmanager
def resampled_from_p() -> Iterator[None]:
    """Plants a mistake of rejection sampling: a replacement is sampled from p, not the residual."""
    with mock.patch("mmdecode.accept.rejection.residual", lambda p, q: p):
        yield
