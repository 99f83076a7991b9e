"""Known mistakes of released samplers, planted while a context is open.

A check that claims to find such mistakes must find these: a test by enumeration, a benchmark by the
likelihood of a real model's samples.
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
    """Window tokens kept after a rejection keep the distribution they had before it."""
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
    """The replacement of a rejected token is sampled from p, not from the residual."""
    with mock.patch("mmdecode.accept.rejection.residual", lambda p, q: p):
        yield
