"""Drafting from a source text that the output mostly copies: proposes its next tokens.

Examples of source texts are a recogniser's hypotheses that a model corrects, the last partial
transcript of a stream, and a sentence to be edited. The draft continues the source after the
position whose preceding tokens have the longest match with the last committed tokens. If several
positions match equally well, the one nearest to the expected position is chosen: the last matched
position plus the number of tokens generated since. So a substituted word costs one round, and
repeated words are not confused. A row may have several source texts, each with its own expected
position; the text with the longest match is continued, and ties go to the text that has agreed with
most output tokens, then to the first text.

Source: Sun et al. 2021, arXiv:2106.04970 (aggressive decoding), section 3; Yang et al. 2023,
arXiv:2304.04487 (inference with reference). Both decode token by token while nothing matches; here
the draft then continues as if one token of the source had been replaced. They also use a
single source text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmdecode.draft.lookup import suffix_matches
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter, DraftSession
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import InputError, OptionError

_MANY = 1 << 20
"""Larger than the number of tokens in any text."""


class Source(Drafter):
    """Copies ``length`` tokens from a source text, after the longest match with the output.

    Args:
        length: Maximum number of tokens proposed per round; 0 drafts nothing.
        ngram: Maximum number of last output tokens that are looked up in the source.
        least: Minimum number of last output tokens that must match; if fewer tokens were generated,
            all of them must match. With 0 the draft also continues after a mismatch, as if one
            token had been replaced, which suits outputs that copy nearly all of the source.
        ids: Token ids of the source: one sequence per row, or a single one for all rows. An entry
            may be a list of several sequences. ``None``: ``mm_inputs["source_ids"]`` of the call.

    Lossless under every exact acceptance rule, whatever the source contains.

    Raises:
        InputError: No source was given, or not one entry per row, or an id is outside the
            vocabulary.
    """

    summary = "continues a given text that the output mostly copies"
    source = "Sun et al. 2021 (aggressive decoding); Yang et al. 2023"
    capabilities = DrafterCapabilities(graph_safe=True, argmax_only=True)

    def __init__(
        self,
        length: int = 16,
        ngram: int = 3,
        ids: Sequence[Sequence[int] | Sequence[Sequence[int]]] | None = None,
        least: int = 0,
    ) -> None:
        if length < 0 or ngram < 1 or not 0 <= least <= ngram:
            raise OptionError(
                f"length={length}, ngram={ngram}, least={least}; expected length >= 0, ngram >= 1 "
                "and least from 0 to ngram"
            )
        self.length, self.ngram, self.least, self.ids = length, ngram, least, ids

    @classmethod
    def from_options(cls, length: int = 16, ngram: int = 3, least: int = 0) -> Source:
        """Builds the drafter from the options of a string; the call provides the source texts."""
        return cls(length, ngram, least=least)

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Opens a session with the source texts of all rows, padded with -1."""
        given: Any = self.ids if self.ids is not None else call.request.inputs.get("source_ids")
        if given is None:
            raise InputError(
                "draft Source has no source text; pass mm_inputs={'source_ids': [ids per row]} "
                "through mm.generate, or Source(ids=...)"
            )
        try:
            rows = [_texts_of(row) for row in given]
        except TypeError as error:
            raise InputError(
                f"source ids are {given!r}; expected one sequence of ids per row, or a single one "
                "for all: write ids=[[1, 2, 3]]"
            ) from error
        if not rows or call.batch % len(rows):
            raise InputError(
                f"{len(rows)} source texts for {call.batch} rows; give one per row, or one for all"
            )
        vocab = prefill.logits.shape[-1]
        texts = [text for row in rows for text in row]
        wrong = [token for text in texts for token in text if not 0 <= token < vocab]
        if wrong:
            raise InputError(
                f"source id {wrong[0]} is outside the model's vocabulary of {vocab} tokens; encode "
                "the source with the tokenizer of the model that decodes"
            )
        return self.session(call, rows)

    def session(self, call: Call, rows: Sequence[Sequence[Sequence[int]]]) -> SourceSession:
        """Opens a session with the given source texts.

        Args:
            call: The generation call.
            rows: Texts of each row, one or more; or those of each group of as many rows.
        """
        width, most = max(len(text) for row in rows for text in row), max(map(len, rows))
        padded = [
            [[*text, *[-1] * (width - len(text))] for text in [*row, *[[]] * (most - len(row))]]
            for row in rows
        ]
        source = torch.tensor(padded, dtype=torch.long)
        texts_of_rows = source.repeat_interleave(call.batch // len(rows), 0).to(call.device)
        return SourceSession(call, texts_of_rows, self.length, self.ngram, self.least)


class SourceSession(DraftSession):
    """Session of a `Source` drafter: tracks the expected position in each source text of each row.

    Args:
        call: The generation call.
        texts: T source texts per row, ``(B, T, W)``, padded with -1 at the end.
        length: Maximum number of tokens proposed per round.
        ngram: Maximum number of last output tokens that are looked up.
        least: Minimum number of tokens that must match, see `Source`.
    """

    def __init__(self, call: Call, texts: Tensor, length: int, ngram: int, least: int) -> None:
        super().__init__(call)
        self.length, self.ngram, self.least = length, ngram, least
        # a column per token, and one after the last, for the end of the text
        self.texts = torch.nn.functional.pad(texts, (0, 1), value=-1)
        self.expected = call.rows.length.new_zeros(texts.shape[:2])  # current position in each text
        self.agreed = torch.zeros_like(self.expected)  # output tokens that each text predicted
        self.seen = torch.zeros_like(call.rows.length)

    def propose(self, budget: int) -> Proposal:
        """Proposes a chain per row; nothing in rows without a match or at the end of the text."""
        call, texts, written = self.call, self.texts, self.call.rows.length
        length, width = min(self.length, budget), texts.shape[2]
        order = torch.arange(self.ngram, device=call.device)
        own = order >= self.ngram - written[:, None]  # the prompt's tokens are not looked up
        tail = call.last(self.ngram).masked_fill(~own, -2).repeat_interleave(texts.shape[1], 0)
        flat = texts.flatten(0, 1)
        longest = suffix_matches(flat, flat >= 0, tail).view_as(texts)
        new = (written - self.seen)[:, None]
        standing = self.expected + new
        distance = (torch.arange(width, device=call.device) - standing[..., None]).abs()
        if self.least:
            enough = written.clamp_max(self.least)[:, None, None]
            usable = (longest > 0) & (longest >= enough)
        else:
            # a single matching token counts only close to the row's position
            near = (longest > 0) & (distance <= self.length)
            usable = (longest >= min(2, self.ngram)) | near | (distance == 0)
        rank = (longest * _MANY - distance).masked_fill(~usable, -_MANY * _MANY)
        best = rank.argmax(2, keepdim=True)  # in each text
        found = usable.gather(2, best)[..., 0]
        matched = longest.gather(2, best)[..., 0].where(found, 0)
        self.expected.copy_(torch.where(found, best[..., 0], standing))
        self.agreed.add_(new * (matched >= new.clamp_max(self.ngram)))
        self.seen.copy_(written)
        if length <= 0:
            return Proposal.empty(call.batch, call.device)
        standings = (matched * _MANY + self.agreed).masked_fill(~found, -1)
        text = standings.argmax(1, keepdim=True)
        columns = best.gather(1, text[..., None])[..., 0] + torch.arange(length, device=call.device)
        chosen = texts.gather(1, text[..., None].expand(-1, -1, width))[:, 0]
        tokens = chosen.gather(1, columns.clamp_max(width - 1))
        return Proposal(tokens=tokens.masked_fill(~found.gather(1, text), -1), kind="deterministic")


def _texts_of(row: Any) -> list[list[int]]:
    """Returns the source texts of one row as lists of ids, given one sequence of ids or several."""
    parts = list(row.tolist() if isinstance(row, Tensor) else row)
    if parts and hasattr(parts[0], "__len__"):
        return [list(part.tolist() if isinstance(part, Tensor) else part) for part in parts]
    return [parts]
