"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the last tokens.

It needs no parameters and no model pass, and gains where the output repeats its prompt or itself.
Padding is never matched, nor are ids that the model reads but never generates, such as image
placeholders. Differs from the prompt lookup of transformers, which takes the leftmost match: here
the longest match is taken, and the most recent of equally long ones.

Source: Saxena 2023, prompt lookup decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter, DraftSession
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError


class PromptLookup(Drafter):
    """Copies ``length`` tokens that follow the longest earlier match of at most ``ngram`` tokens.

    Args:
        length: Maximum number of tokens proposed per round; 0 drafts nothing.
        ngram: Maximum number of last tokens that are looked up; fewer are tried down to one.

    Lossless under every exact acceptance rule.
    """

    summary = "copies what followed the last tokens where they occurred before"
    source = "Saxena 2023, prompt lookup decoding (PLD)"
    capabilities = DrafterCapabilities(graph_safe=True, argmax_only=True)

    def __init__(self, length: int = 10, ngram: int = 3) -> None:
        if length < 0 or ngram < 1:
            raise OptionError(
                f"length={length}, ngram={ngram}; expected length >= 0 and ngram >= 1"
            )
        self.length, self.ngram = length, ngram

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Opens a session; prompt ids outside the generated vocabulary are never matched."""
        return LookupSession(call, self.length, self.ngram, prefill.logits.shape[-1])


class LookupSession(DraftSession):
    """Session of a `PromptLookup` drafter: looks up the last tokens of each row in that row."""

    def __init__(self, call: Call, length: int, ngram: int, vocab: int) -> None:
        super().__init__(call)
        self.length, self.ngram, self.vocab = length, ngram, vocab

    def propose(self, budget: int) -> Proposal:
        """Proposes a chain per row; nothing in rows without a match."""
        call, length = self.call, min(self.length, budget)
        if length <= 0:
            return Proposal.empty(call.batch, call.device)
        ids, end = call.rows.ids, call.end()[:, None]
        columns = torch.arange(ids.shape[1], device=call.device)
        mask, generated = call.request.prompt_mask, ids.shape[1] - call.prompt_length
        real = pad(mask, (0, generated), value=True) & (ids < self.vocab)
        longest = suffix_matches(ids, real, call.last(self.ngram))
        usable = (columns < end) & (longest > 0)
        rank = torch.where(usable, longest * ids.shape[1] + columns, -1)
        best = rank.argmax(1, keepdim=True)
        found = rank.gather(1, best) >= 0
        source = best + torch.arange(length, device=call.device)
        inside = source.clamp_max(ids.shape[1] - 1)
        drafted = found & (source < end) & real.gather(1, inside)
        drafted = drafted.long().cumprod(1).bool()  # nothing after an id that is never generated
        tokens = ids.gather(1, inside).masked_fill(~drafted, -1)
        return Proposal(tokens=tokens, kind="deterministic")


def suffix_matches(ids: Tensor, real: Tensor, tail: Tensor) -> Tensor:
    """Counts how many tokens before each column equal the last tokens of the row.

    Args:
        ids: Tokens to search, ``(B, W)``.
        real: Whether each token may be matched, ``(B, W)`` bool.
        tail: The last n tokens of each row, ``(B, n)``.

    Returns:
        Length of the match that ends just before each column, 0 to n, ``(B, W)``.
    """
    width, size = ids.shape[1], tail.shape[1]
    longest = torch.zeros_like(ids)
    alive = torch.ones_like(real)
    for back in range(1, size + 1):
        before = pad(ids, (back, 0), value=-1)[:, :width]
        known = pad(real, (back, 0), value=False)[:, :width]
        alive = alive & (before == tail[:, size - back, None]) & known
        longest = longest + alive
    return longest
