"""Drafting where a target's states are given as tensors instead of computed by a model."""

import torch

from mmdecode.engine.adapter import Adapter, Prompt
from mmdecode.engine.call import Call, Plan
from mmdecode.engine.contracts import Block, BranchOutput
from mmdecode.engine.noise import Noise
from mmdecode.engine.proposal import Proposal


class Given(Adapter):
    """What drafts ask of an adapter: a head, embeddings, and where images are.

    Args:
        head: ``(V, H)``.
        images: Of the prompt, ``(B, P)`` bool.
        embed: Table of embeddings, ``(V, H)``; ``None``: the drafter has its own.
    """

    inputs, num_layers = frozenset({"image"}), 1

    def __init__(self, head, images, embed=None):
        self.weight, self.images, self.model, self.vocab = head, images, self, len(head)
        self.table = embed

    def get_input_embeddings(self):
        return lambda ids: self.table[ids]

    def head(self, states):
        return states @ self.weight.T

    def prompt(self, call, spec):
        return Prompt(ids=call.request.prompt_ids, mask=call.request.prompt_mask)

    def spans(self, kind, ids):
        return self.images


def begin(draft, adapter, ids, hidden, merged):
    """A session after a prompt of given states ``hidden`` and merged embeddings ``(1, P, H)``."""
    batch = len(ids)
    plan = Plan(adapter=adapter)
    noise = Noise(0, torch.arange(batch))
    call = Call.of(ids, max_new_tokens=40, noise=noise, plan=plan)
    states = {"last": hidden, 0: merged}
    prefill = BranchOutput(
        logits=adapter.head(hidden[:, -1:]),
        hidden={key: value[:, -1:] for key, value in states.items()},
        prompt_hidden=states,
    )
    return draft.begin(call, prefill)


def commit(session, tokens, hidden, accepted):
    """A round that commits ``tokens (1, n)``, the last of which was decided and not drafted."""
    batch, count = tokens.shape
    proposal = Proposal.empty(batch, tokens.device)
    if accepted:
        proposal = Proposal(tokens=tokens[:, :-1], kind="deterministic")
    call, kept = session.call, torch.full((batch,), accepted)
    block = Block(
        path=torch.arange(accepted).expand(batch, -1),
        tokens=tokens,
        num_accepted=kept,
        num_drafted=kept,
        count=kept + 1,
        ended=torch.zeros(batch, dtype=torch.bool),
    )
    end = call.prompt_length + int(call.rows.length[0])
    call.rows.ids[:, end : end + count] = tokens
    call.rows.length += count
    call.rows.cur_len = int(call.rows.length.max())
    scores = BranchOutput(logits=call.plan.adapter.head(hidden), hidden={"last": hidden})
    session.observe(proposal, scores, block)
