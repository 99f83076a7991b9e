"""Recorded times of calls, for code that measures them."""

import torch

from mmdecode.engine.call import Call, Plan


def call_after(rounds, rows=1):
    """A call whose rows went through so many rounds of one token."""
    plan = Plan(drafter_invariant=True)
    call = Call.of(torch.zeros(rows, 0, dtype=torch.long), length=rounds, plan=plan)
    call.rows.rounds.fill_(rounds)
    return call
