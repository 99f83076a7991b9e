"""Drafts what followed each token when it was last seen, in the prompt or in the output."""

import torch

from mmdecode.engine.contracts import Needs
from mmdecode.engine.proposal import Proposal


class Bigram:
    """A chain of up to `length` tokens; 0 proposes nothing."""

    summary = "what followed each token when it was last seen"  # for `mmdecode methods`
    law = "exact"
    kinds = ("deterministic",)
    needs = Needs()

    def __init__(self, length: int = 4):
        self.length = length

    def begin(self, ctx, prefill, kind):
        vocab = prefill.logits.shape[-1]
        self.successor = torch.full((ctx.batch, vocab), -1, device=ctx.device)
        self.learn(ctx.prompt_ids)

    def learn(self, ids):
        self.successor.scatter_(1, ids[:, :-1], ids[:, 1:])

    def propose(self, ctx, budget):
        chain = [ctx.last(1)]
        for _ in range(min(self.length, budget)):
            token = chain[-1]
            following = self.successor.gather(1, token.clamp_min(0))
            chain.append(torch.where(token >= 0, following, -1))  # -1 is an unused node
        return Proposal(tokens=torch.cat(chain, 1)[:, 1:], kind="deterministic")

    def observe(self, ctx, proposal, scores, outcome):
        self.learn(ctx.last(outcome.path.shape[1] + 2))

    def reorder(self, rows):
        self.successor = self.successor[rows]

    def reset(self):
        self.successor = None
