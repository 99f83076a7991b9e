"""Lookahead decoding: drafts n-grams that the model itself guessed for later positions.

Every pass scores two things: candidate n-grams, and a window of guesses for later positions. Column
i of the window holds the guesses of the last rounds (Jacobi iterations) for position i and the
positions after it. A column together with the model's prediction after it is an n-gram. N-grams are
stored in a pool per row; stored n-grams that begin with the last committed token are the candidates
of the next round. The window and the candidates are scored as one tree: the first guesses of all
columns form a chain after the last committed token, and the rest of each column is attached to its
first guess. No parameters and no second model are needed, but the passes are wide.

Source: Fu et al. 2024 (Lookahead Decoding), arXiv:2402.02057, sections 3.1 to 3.3. Differs from the
reference: the window starts with the most likely tokens after the prompt instead of random ones;
guesses of the window may be accepted too; each row of a batch has its own pool, in which new
n-grams replace the oldest.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Block, BranchOutput, Drafter, DraftSession
from mmdecode.engine.proposal import Proposal, Tree
from mmdecode.errors import OptionError

POOL = 512
"""Number of n-grams in the pool of a row."""


class Lookahead(Drafter):
    """Drafts n-grams of the model's own guesses (Jacobi trajectory).

    Args:
        window: Number W of columns of the window; 0 drafts nothing.
        ngram: Number N of tokens of an n-gram, including the first, by which it is looked up.
        guesses: Maximum number G of candidate n-grams per pass.

    A pass scores ``(W + G) * (N - 1)`` drafted tokens and the last committed token; the reference's
    example is W = G = 7 and N = 5. Siblings in the tree may have the same token. Lossless under
    every exact acceptance rule.
    """

    summary = "n-grams of the model's own guesses for the positions ahead"
    source = "Lookahead Decoding, Fu et al. 2024"
    # the window is read off the scores of its own nodes
    capabilities = DrafterCapabilities(composable=False)

    def __init__(self, window: int = 5, ngram: int = 4, guesses: int = 5) -> None:
        if window < 0 or ngram < 2 or guesses < 0:
            raise OptionError(
                f"window={window}, ngram={ngram}, guesses={guesses}; expected window >= 0, "
                "ngram >= 2 and guesses >= 0"
            )
        self.window, self.ngram, self.guesses = window, ngram, guesses

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Opens a session whose first guesses are the most likely tokens after the prompt."""
        vocab = prefill.logits.shape[-1]
        best = prefill.logits[:, -1].topk(min(self.window, vocab)).indices
        order = torch.arange(self.window, device=call.device) % max(best.shape[1], 1)
        return LookaheadSession(call, best[:, order], self.ngram, self.guesses)


class LookaheadSession(DraftSession):
    """Session of a `Lookahead` drafter: the window and the pool of n-grams of each row.

    Args:
        call: The generation call.
        guesses: First guess of each column of the window, ``(B, W)``.
        ngram: Number of tokens of an n-gram.
        most: Maximum number of candidate n-grams per pass.
    """

    def __init__(self, call: Call, guesses: Tensor, ngram: int, most: int) -> None:
        super().__init__(call)
        self.ngram, self.most, self.window = ngram, most, guesses.shape[1]
        self.rows = [guesses]  # rows of the window, each (B, W)
        # -1 where nothing is known
        self.pool = torch.full((call.batch, POOL, ngram), -1, device=call.device)
        self.next = 0  # index for the next n-grams

    def propose(self, budget: int) -> Proposal:
        """Proposes n-grams that begin with the last token, newest first, and the window."""
        call = self.call
        if budget <= 0 or not self.window:
            return Proposal.empty(call.batch, call.device)
        age = (self.next - 1 - torch.arange(POOL, device=call.device)) % POOL
        fits = self.pool[:, :, 0] == call.last(1)
        best = torch.where(fits, POOL - age, 0).topk(self.most, dim=1)
        index = best.indices[..., None].expand(-1, -1, self.ngram - 1)
        known = self.pool[:, :, 1:].gather(1, index)
        known = known.masked_fill((best.values == 0)[..., None], -1).flatten(1)
        tree = _tree(self.most, self.ngram - 1, self.window, len(self.rows))
        tokens = torch.cat([known, *self.rows], 1)
        return Proposal(tokens=tokens, kind="deterministic", tree=tree)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Extends every column by a new guess, and stores the n-grams of complete columns."""
        first = self.most * (self.ngram - 1)
        if proposal.size < first + len(self.rows) * self.window or not self.window:
            return  # the prompt's round, or one at the end that was cut short
        last = self.rows[-1]
        scored = proposal.tokens[:, -self.window :] >= 0
        guess = torch.where(scored, output.logits[:, -self.window :].argmax(-1), last)
        self.rows.append(guess)
        if len(self.rows) < self.ngram:
            return
        grams = torch.stack(self.rows, 2)  # (B, W, N)
        again = (self.pool[:, :, None] == grams[:, None]).all(-1).any(2)
        self.pool.masked_fill_(again[..., None], -1)  # each is known once
        slots = (self.next + torch.arange(self.window, device=self.call.device)) % POOL
        self.pool[:, slots] = grams
        self.next = (self.next + self.window) % POOL
        del self.rows[0]


@lru_cache
def _tree(guesses: int, length: int, window: int, rows: int) -> Tree:
    """Builds the tree of candidate chains, then of the window's first row and its columns."""
    parents = [node - 1 if node % length else -1 for node in range(guesses * length)]
    first = len(parents)
    parents += [first + node - 1 if node else -1 for node in range(window)]
    parents += [first + node for node in range((rows - 1) * window)]
    return Tree(tuple(parents))
