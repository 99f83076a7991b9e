"""Input-guided drafting: proposes the tokens that come next in a source text.

For outputs that mostly copy a text that is at hand: a recogniser's hypotheses under correction, the
last partial transcript of a stream, a sentence to be edited. The draft continues in the source
after the position that matches the last committed tokens best. Where several match equally well,
the one nearest to the row's position wins, counted as if it had copied token by token since its
last match; so a substituted word costs one round, and repeated words do not lead astray. A row may
have several texts, each with its own position: the draft goes on in the one that matches best; ties
go to the one that has agreed with most of the output, then to the first.

Source: Sun et al. 2021, arXiv:2106.04970 (aggressive decoding), section 3; Yang et al. 2023,
arXiv:2304.04487 (inference with reference). Differs from both: after a mismatch without any match
the draft goes on as if one token had been replaced, where they decode token by token; and a row may
have several texts.
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
"""More than a text has tokens."""


class Source(Drafter):
    """Copies ``length`` tokens from a source text, after the best match of at most ``ngram``.

    Args:
        length: Most tokens proposed per round; 0 is neutral.
        ngram: Longest suffix of the output that is looked up in the source.
        least: Tokens that have to match before anything is proposed; all, while there are fewer. 0
            also goes on after a mismatch, as if one token had been replaced, for outputs that copy
            nearly all of the source.
        ids: Token ids of the source, one sequence per row or one for all, or instead of a sequence
            a list of several; ``None``: the call gives them as ``mm_inputs["source_ids"]``.

    Lossless under every exact rule, whatever the source contains.

    Raises:
        InputError: No source was given, or not one entry per row, or an id is not of the
            vocabulary.
    """

    summary = "continues a given text that the output mostly copies"
    source = "Sun et al. 2021 (aggressive decoding); Yang et al. 2023"
    capabilities = DrafterCapabilities(graph_safe=True)

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
        """Builds it from a string; the source comes with the call."""
        return cls(length, ngram, least=least)

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Stacks the texts of the rows, padded with -1."""
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
                f"source id {wrong[0]} is not of the vocabulary of {vocab}; encode the source with "
                "the tokenizer of the model that decodes"
            )
        width, most = max(map(len, texts)), max(map(len, rows))
        padded = [
            [[*text, *[-1] * (width - len(text))] for text in [*row, *[[]] * (most - len(row))]]
            for row in rows
        ]
        source = torch.tensor(padded, dtype=torch.long)
        texts_of_rows = source.repeat_interleave(call.batch // len(rows), 0).to(call.device)
        return SourceSession(call, texts_of_rows, self.length, self.ngram, self.least)


class SourceSession(DraftSession):
    """Copies from the texts of each row, at the index that each row has reached.

    Args:
        call: The call.
        texts: T texts per row, ``(B, T, W)``, -1 after their ends.
        length: See `Source`, as for the next two.
        ngram: Longest suffix that is looked up.
        least: Tokens that have to match.
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
        """A chain per row, or nothing at the end of its texts."""
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
    """The texts of one row: a sequence of ids, or several."""
    parts = list(row.tolist() if isinstance(row, Tensor) else row)
    if parts and hasattr(parts[0], "__len__"):
        return [list(part.tolist() if isinstance(part, Tensor) else part) for part in parts]
    return [parts]
