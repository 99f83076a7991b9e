"""Lookahead: n-grams that the model guessed for places ahead are drafted when they begin to fit.

Beside the candidates every pass scores a window of guesses for the places ahead. Column i of the
window holds what Jacobi iterations of the last rounds made of place i and those behind it, so that
a column and the token that the model puts behind it are an n-gram of the model's own. N-grams go
into a pool per row; those that begin with the last committed token are the next candidates. Window
and candidates are one tree: the first row of the window is a chain below the root, each column
hangs below its token of that chain. No parameters, no second model; the passes are wide.

Source: Fu et al. 2024 (Lookahead Decoding), arXiv:2402.02057, sections 3.1 to 3.3. Differs from the
reference: the window begins with the likeliest tokens behind the prompt, where it draws at random;
its guesses are candidates too; a batch has a pool per row, which forgets the oldest.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter, Outcome
from mmdecode.engine.proposal import Kind, Proposal, Tree
from mmdecode.errors import OptionError

POOL = 512
"""N-grams that a row remembers."""


class Lookahead(Drafter):
    """Drafts n-grams of the model's own trajectory.

    Args:
        window: Columns of the window, W.
        ngram: Tokens of an n-gram, the one that it is found by included: N.
        guesses: N-grams that are candidates at once, G. With ``window=0`` neutral.

    A pass scores ``(W + G) * (N - 1)`` nodes beside the root; the reference's example is W = G = 7
    and N = 5. Siblings may repeat one another. Lossless under every exact rule.
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
        self._rows: list[Tensor] = []  # of the window, each (B, W)
        self._pool: Tensor | None = None  # (B, POOL, N), -1 where nothing is known
        self._next = 0  # where the next n-grams go

    def begin(self, call: Call, prefill: BranchOutput, kind: Kind) -> None:
        """The first guesses; nothing is known yet."""
        vocab = prefill.logits.shape[-1]
        best = prefill.logits[:, -1].topk(min(self.window, vocab)).indices
        self._rows = [
            best[:, torch.arange(self.window, device=call.device) % max(best.shape[1], 1)]
        ]
        self._pool = torch.full((call.batch, POOL, self.ngram), -1, device=call.device)
        self._next = 0

    def propose(self, call: Call, budget: int) -> Proposal:
        """N-grams that begin with the root, newest first, then the window."""
        if budget <= 0 or not self.window:
            return Proposal.empty(call.batch, call.device)
        assert self._pool is not None, "begin was not called"
        age = (self._next - 1 - torch.arange(POOL, device=call.device)) % POOL
        fits = self._pool[:, :, 0] == call.last(1)
        best = torch.where(fits, POOL - age, 0).topk(self.guesses, dim=1)
        place = best.indices[..., None].expand(-1, -1, self.ngram - 1)
        known = self._pool[:, :, 1:].gather(1, place)
        known = known.masked_fill((best.values == 0)[..., None], -1).flatten(1)
        tree = _tree(self.guesses, self.ngram - 1, self.window, len(self._rows))
        tokens = torch.cat([known, *self._rows], 1)
        return Proposal(tokens=tokens, kind="deterministic", tree=tree)

    def observe(
        self, call: Call, proposal: Proposal, scores: BranchOutput, outcome: Outcome
    ) -> None:
        """Guesses anew behind every column, and notes the n-grams of full ones."""
        assert self._pool is not None
        first = self.guesses * (self.ngram - 1)
        if proposal.size < first + len(self._rows) * self.window or not self.window:
            return  # the prompt's round, or one at the end that was cut short
        last = self._rows[-1]
        scored = proposal.tokens[:, -self.window :] >= 0
        guess = torch.where(scored, scores.logits[:, -self.window :].argmax(-1), last)
        self._rows.append(guess)
        if len(self._rows) < self.ngram:
            return
        grams = torch.stack(self._rows, 2)  # (B, W, N)
        again = (self._pool[:, :, None] == grams[:, None]).all(-1).any(2)
        self._pool.masked_fill_(again[..., None], -1)  # each is known once
        places = (self._next + torch.arange(self.window, device=call.device)) % POOL
        self._pool[:, places] = grams
        self._next = (self._next + self.window) % POOL
        del self._rows[0]

    def reorder(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``."""
        self._rows = [row[rows] for row in self._rows]
        self._pool = None if self._pool is None else self._pool[rows]

    def reset(self) -> None:
        """Forgets the call."""
        self._rows, self._pool = [], None


@lru_cache
def _tree(guesses: int, length: int, window: int, rows: int) -> Tree:
    """Chains below the root, then a window whose first row is a chain and whose columns hang."""
    parents = [node - 1 if node % length else -1 for node in range(guesses * length)]
    first = len(parents)
    parents += [first + node - 1 if node else -1 for node in range(window)]
    parents += [first + node for node in range((rows - 1) * window)]
    return Tree(tuple(parents))
