"""After the end nothing is drafted: counts of the calls of a drafter."""

import pytest
import torch

from mmdecode.decoder import Decoder
from mmdecode.testing import drafts
from mmdecode.testing.checks import PROMPTS, run_rows
from mmdecode.testing.table import Table, decode
from tests.support import seams

MODEL = Table(5, seed=3)


class Counted(drafts.Random):
    """Counts its sessions and what they are asked for."""

    def __init__(self):
        super().__init__()
        self.sessions, self.budgets = 0, []

    def begin(self, call, prefill):
        self.sessions += 1
        return super().begin(call, prefill)

    def draft(self, call, budget):
        self.budgets.append(budget)
        return super().draft(call, budget)


def counted(new, eos=None, rows=PROMPTS):
    """A call of ``new`` tokens: its drafter, its passes and its tokens."""
    drafter = Counted()
    decoder = Decoder(drafter)
    tokens = run_rows(decoder, MODEL, rows, max_new_tokens=new, eos=eos)
    assert tokens == run_rows(Decoder(), MODEL, rows, max_new_tokens=new, eos=eos)
    return drafter, decoder.stats.passes, tokens


def test_a_single_token_pays_no_drafter():
    drafter, passes, _ = counted(1)
    assert (drafter.sessions, drafter.budgets, passes) == (0, [], 0)


def test_two_tokens_leave_nothing_to_draft():
    drafter, passes, _ = counted(2)
    assert (drafter.sessions, drafter.budgets, passes) == (1, [], 1)


def test_a_first_token_that_ends_every_row_pays_no_drafter():
    first = {row[0] for row in run_rows(Decoder(), MODEL, PROMPTS, max_new_tokens=1)}
    drafter, passes, tokens = counted(9, eos=sorted(first))
    assert all(len(row) == 1 for row in tokens)
    assert (drafter.sessions, drafter.budgets, passes) == (0, [], 0)


@pytest.mark.parametrize("seen", [True, False], ids=["looked at", "on an accelerator"])
def test_after_an_end_token_nothing_is_drafted_where_looking_is_free(seen, monkeypatch):
    """Elsewhere one proposal is made in vain, before the transfer that tells of the end."""
    if not seen:
        seams.MAY_READ.plant(monkeypatch, lambda _: lambda device: False)
    [row] = run_rows(Decoder(), MODEL, PROMPTS[:1], max_new_tokens=40)
    end = max(set(row), key=row.index)  # what came last for the first time
    drafter, passes, tokens = counted(40, eos=[end], rows=PROMPTS[:1])
    assert 1 < len(tokens[0]) < 40
    assert len(drafter.budgets) == passes + (not seen)


def test_no_level_is_asked_for_that_could_not_be_committed():
    drafter = Counted()
    ids = torch.tensor([[1, 2, 3]])
    decode(MODEL, ids, Decoder(drafter), max_new_tokens=8)
    assert drafter.budgets[0] == 6  # one of the seven that are left is decided, not drafted
    assert min(drafter.budgets) > 0
