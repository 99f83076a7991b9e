"""Input-guided drafting: propose that the output goes on as its source text does.

For outputs that mostly copy a text that is at hand: a recogniser's first hypothesis under
correction, the last partial transcript of a stream, a sentence to be edited. The draft continues in
the source behind the place that matches the last committed tokens best. Where several match equally
well, the nearest to where the row would stand had it copied one for one since its last match wins;
so a substituted word costs one round, and repeated words do not lead astray.

Source: Sun et al. 2021, arXiv:2106.04970 (aggressive decoding), section 3; Yang et al. 2023,
arXiv:2304.04487 (inference with reference). Differs from both: after a mismatch without any match
the draft goes on as if one token had been replaced, where they decode token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmdecode.draft.lookup import suffix_matches
from mmdecode.engine.contracts import Context, Needs, Outcome, Scores
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import InputError, OptionError


class Source:
    """Copies ``length`` tokens from a source text, behind the best match of at most ``ngram``.

    Args:
        length: Most tokens proposed per round; 0 is neutral.
        ngram: Longest suffix of the output that is looked up in the source.
        least: Tokens that have to match before anything is proposed, or all while there are fewer.
            0 also goes on behind a mismatch, as if one token had been replaced, for outputs that
            copy nearly all of the source.
        ids: Token ids of the source, one sequence per row or one for all; ``None``: the call gives
            them as ``mm_inputs["source_ids"]``.

    Lossless under every exact rule, whatever the source says.

    Raises:
        InputError: No source was given, or not one list per row, or an id is not of the vocabulary.
    """

    kinds: tuple[Kind, ...] = ("deterministic",)
    needs = Needs()
    static = True

    def __init__(
        self,
        length: int = 16,
        ngram: int = 3,
        ids: Sequence[Sequence[int]] | None = None,
        least: int = 0,
    ) -> None:
        if length < 0 or ngram < 1 or not 0 <= least <= ngram:
            raise OptionError(
                f"length={length}, ngram={ngram}, least={least}; expected length >= 0, ngram >= 1 "
                "and least from 0 to ngram"
            )
        self.length, self.ngram, self.least, self.ids = length, ngram, least, ids
        self._source: Tensor | None = None
        self._expected: Tensor | None = None
        self._seen: Tensor | None = None

    @classmethod
    def from_options(cls, length: int = 16, ngram: int = 3, least: int = 0) -> Source:
        """From a string; the source comes with the call."""
        return cls(length, ngram, least=least)

    def begin(self, ctx: Context, prefill: Scores, kind: Kind) -> None:
        """Lines up the sources of the rows, -1 behind their ends."""
        given: Any = self.ids if self.ids is not None else ctx.mm_inputs.get("source_ids")
        if given is None:
            raise InputError(
                "draft Source has no source text; pass mm_inputs={'source_ids': [ids per row]} "
                "through mm.generate, or Source(ids=...)"
            )
        try:
            texts = [list(text.tolist() if isinstance(text, Tensor) else text) for text in given]
        except TypeError as error:
            raise InputError(
                f"source ids are {given!r}; expected one sequence of ids per row, or a single one "
                "for all: write ids=[[1, 2, 3]]"
            ) from error
        if not texts or ctx.batch % len(texts):
            raise InputError(
                f"{len(texts)} source texts for {ctx.batch} rows; give one per row, or one for all"
            )
        vocab = prefill.logits.shape[-1]
        wrong = [token for text in texts for token in text if not 0 <= token < vocab]
        if wrong:
            raise InputError(
                f"source id {wrong[0]} is not of the vocabulary of {vocab}; encode the source with "
                "the tokenizer of the model that decodes"
            )
        width = max(map(len, texts))
        padded = [[*text, *[-1] * (width - len(text))] for text in texts]
        rows = torch.tensor(padded, dtype=torch.long)
        self._source = rows.repeat_interleave(ctx.batch // len(texts), 0).to(ctx.device)
        self._expected = torch.zeros_like(ctx.length)
        self._seen = torch.zeros_like(ctx.length)

    def propose(self, ctx: Context, budget: int) -> Proposal:
        """A chain per row, or nothing where the source is at its end."""
        source, length = self._source, min(self.length, budget)
        assert source is not None and self._expected is not None and self._seen is not None
        # a column per token, and one behind the last: there the source is at its end
        ids = torch.nn.functional.pad(source, (0, 1), value=-1)
        real = ids >= 0
        place = torch.arange(ids.shape[1], device=ctx.device)
        order = torch.arange(self.ngram, device=ctx.device)
        own = order >= self.ngram - ctx.length[:, None]  # the prompt's tokens are not looked up
        longest = suffix_matches(ids, real, ctx.last(self.ngram).masked_fill(~own, -2))
        expected = (self._expected + ctx.length - self._seen)[:, None]
        distance = (place - expected).abs()
        if self.least:
            usable = (longest > 0) & (longest >= ctx.length.clamp_max(self.least)[:, None])
        else:
            # a single token occurs in many places: it counts only close by
            near = (longest > 0) & (distance <= self.length)
            usable = (longest >= min(2, self.ngram)) | near | (distance == 0)
        rank = (longest * 2 * ids.shape[1] - distance).masked_fill(~usable, -(1 << 40))
        best = rank.argmax(1, keepdim=True)
        found = usable.gather(1, best)
        self._expected.copy_(torch.where(found, best, expected)[:, 0])
        self._seen.copy_(ctx.length)
        if length <= 0:
            return Proposal.empty(ctx.batch, ctx.device)
        columns = best + torch.arange(length, device=ctx.device)
        tokens = ids.gather(1, columns.clamp_max(ids.shape[1] - 1)).masked_fill(~found, -1)
        return Proposal(tokens=tokens, kind="deterministic")

    def observe(self, ctx: Context, proposal: Proposal, scores: Scores, outcome: Outcome) -> None:
        """Nothing to learn: the context holds what was committed."""

    def reorder(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``."""
        if self._source is not None and self._expected is not None and self._seen is not None:
            self._source, self._seen = self._source[rows], self._seen[rows]
            self._expected = self._expected[rows]

    def reset(self) -> None:
        """Forgets the call."""
        self._source = self._expected = self._seen = None
