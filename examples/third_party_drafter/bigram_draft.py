"""A drafter that proposes the token that last followed each token in the prompt or the output."""

import torch

from mmdecode import Drafter, DraftSession
from mmdecode.engine.proposal import Proposal


class Bigram(Drafter):
    """Proposes a chain of up to `length` tokens; 0 is neutral."""

    summary = "what followed each token when it was last seen"  # for `mmdecode methods`

    def __init__(self, length: int = 4):
        self.length = length

    def begin(self, call, prefill):
        return BigramSession(call, self.length, vocab=prefill.logits.shape[-1])


class BigramSession(DraftSession):
    """Table of the last successor of each token of one call, by row."""

    def __init__(self, call, length, vocab):
        super().__init__(call)
        self.length = length
        # one more column, for tokens that are not recorded
        self.successor = torch.full((call.batch, vocab + 1), -1, device=call.device)
        self.learn(call.request.prompt_ids)

    def learn(self, ids):
        token, following = ids[:, :-1], ids[:, 1:]
        unknown = self.successor.shape[1] - 1  # for ids outside of the output vocabulary
        token = token.masked_fill((token >= unknown) | (following >= unknown), unknown)
        # the last of equal tokens counts; scatter_ alone has no defined order
        order = torch.arange(1, ids.shape[1], device=ids.device).expand_as(token)
        last = torch.zeros_like(self.successor).scatter_reduce(1, token, order, "amax")
        self.successor = torch.where(last > 0, ids.gather(1, last), self.successor)

    def propose(self, budget):
        chain = [self.call.last(1)]
        for _ in range(min(self.length, budget)):
            token = chain[-1]
            following = self.successor.gather(1, token.clamp_min(0))
            chain.append(torch.where(token >= 0, following, -1))  # -1 is an unused node
        return Proposal(tokens=torch.cat(chain, 1)[:, 1:], kind="deterministic")

    def observe(self, proposal, output, block):
        self.learn(self.call.last(block.tokens.shape[1] + 1))
