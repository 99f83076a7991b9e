"""Drafting where a target's states are given as tensors instead of computed by a model."""

import torch

from mmdecode.engine.contracts import BranchOutput, Context, Outcome, Prompt
from mmdecode.engine.noise import Noise
from mmdecode.engine.proposal import Proposal


class Given:
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

    def prompt(self, ctx, spec):
        return Prompt(ids=ctx.prompt_ids, mask=ctx.prompt_mask)

    def image_mask(self, ids):
        return self.images

    def image_sizes(self, prompt):
        return None


def begin(draft, adapter, ids, hidden, merged):
    """A call behind a prompt of given states ``hidden`` and merged embeddings ``(1, P, H)``."""
    batch = len(ids)
    ctx = Context(
        prompt_ids=ids,
        prompt_mask=torch.ones_like(ids, dtype=torch.bool),
        ids=torch.nn.functional.pad(ids, (0, 40)),
        length=torch.zeros(batch, dtype=torch.long),
        open=torch.ones(batch, dtype=torch.bool),
        rounds=torch.zeros(batch, dtype=torch.long),
        noise=Noise(0, torch.arange(batch)),
        limit=40,
        adapter=adapter,
    )
    states = {"last": hidden, 0: merged}
    prefill = BranchOutput(
        logits=adapter.head(hidden[:, -1:]),
        hidden={key: value[:, -1:] for key, value in states.items()},
        prompt_hidden=states,
    )
    draft.begin(ctx, prefill, "deterministic")
    return ctx


def commit(draft, ctx, tokens, hidden, accepted):
    """A round that commits ``tokens (1, n)``, the last of which was decided and not drafted."""
    batch, count = tokens.shape
    proposal = Proposal.empty(batch, tokens.device)
    if accepted:
        proposal = Proposal(tokens=tokens[:, :-1], kind="deterministic")
    outcome = Outcome(
        path=torch.arange(accepted).expand(batch, -1),
        num_accepted=torch.full((batch,), accepted),
        next_token=tokens[:, -1],
    )
    end = ctx.prompt_length + int(ctx.length[0])
    ctx.ids[:, end : end + count] = tokens
    ctx.length += count
    ctx.longest = int(ctx.length.max())
    scores = BranchOutput(logits=ctx.adapter.head(hidden), hidden={"last": hidden})
    draft.observe(ctx, proposal, scores, outcome)
