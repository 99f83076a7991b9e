"""A guide's distribution on logits at hand, without a model."""

from types import SimpleNamespace

import torch

from mmdecode.engine.call import Call, Plan
from mmdecode.engine.contracts import BranchOutput
from mmdecode.engine.proposal import Proposal


def context(rows, length=0, **options):
    """Rows that have generated ``length`` tokens each, of prompts of two."""
    ids = torch.ones(rows, 2, dtype=torch.long)
    images = lambda kind, ids: torch.zeros_like(ids, dtype=torch.bool)  # noqa: E731
    plan = Plan(adapter=SimpleNamespace(spans=images))
    return Call.of(ids, length=length, max_new_tokens=40, room=62, pad_id=1, plan=plan, **options)


def distribution(guide, main, *others, length=0, proposal=None, combined=False):
    """``(B, V)`` or ``(B, N + 1, V)`` logits of all branches to the guided ones, same shape.

    Args:
        guide: The guide.
        main: Logits of the main branch.
        *others: Of the guide's branches, in order.
        length: Generated tokens so far.
        proposal: The nodes; ``None``: there are none.
        combined: The distribution before the cut.
    """
    flat = main.ndim == 2
    values = [v[:, None] if flat else v for v in (main, *others)]
    names = ["main", *(branch.name for branch in guide.branches)]
    scores = {n: BranchOutput(logits=v) for n, v in zip(names, values, strict=True)}
    call = context(len(main), length)
    proposal = proposal or Proposal.empty(len(main), call.device)
    method = guide.combine if combined else guide.apply
    found = method(None, call, proposal, scores)
    return found[:, 0] if flat else found
