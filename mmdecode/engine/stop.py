"""Stopping criteria, which cut a round's tokens: end tokens, length, and the caller's criteria.

Criteria get the same prefixes as in plain ``generate``: after each token of the block (the accepted
tokens of a round and the one after them), in order. Criteria of known types are evaluated at once;
others are called prefix by prefix, for the whole batch.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from mmdecode.engine.call import Call


class Stopping:
    """The stopping criteria of one call.

    Args:
        criteria: Stopping criteria as ``generate`` built them.
        eos_token_ids: Ids that end a row, ``(n,)``; they replace the criteria for end tokens.
        max_new_tokens: Maximum number of generated tokens per row.
    """

    uncaptured: ClassVar = {"per_call", "others"}  # with these, no round is captured whole

    def __init__(
        self, criteria: StoppingCriteriaList, eos_token_ids: Tensor, max_new_tokens: int
    ) -> None:
        self.eos_token_ids, self.max_new_tokens = eos_token_ids, max_new_tokens
        self._eos = eos_token_ids if len(eos_token_ids) else eos_token_ids.new_full((1,), -2)
        self.per_call = [c for c in criteria if type(c) is MaxTimeCriteria]
        known = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
        self.others = [c for c in criteria if type(c) not in known]

    def cut(self, call: Call, block: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Cuts each row's block after the first token that ends the row.

        Args:
            call: The call, before the block is committed.
            block: Accepted tokens and the one after them, ``(B, D + 1)``.
            count: Number of tokens in each row's block, ``(B,)``; 0 for inactive rows.

        Returns:
            Number of tokens to commit, ``(B,)``, at least 1 for active rows; and whether the row
            ends, ``(B,)`` bool.
        """
        size = block.shape[1]
        if len(self._eos) == 1:
            stop = block == self._eos
        else:
            stop = (block[..., None] == self.eos_token_ids).any(-1)
        order = torch.arange(1, size + 1, device=block.device) if size > 1 else 1
        if call.rows.cur_len + size >= self.max_new_tokens:  # else no row can be that long
            stop |= (call.rows.length[:, None] + order) >= self.max_new_tokens
        if self.others:
            stop |= self._ask(call, block, count)
        if size == 1:
            ended = stop[:, 0] if call.rows.full else stop[:, 0] & (count > 0)
        else:
            first = torch.where(stop, order, size + 1).amin(1)
            ended = first <= count
            count = torch.minimum(count, first)
        if self.per_call:
            late = _verdict(self.per_call, call.rows.ids)
            ended = ended | (late & call.rows.active)
        return count, ended

    def _ask(self, call: Call, block: Tensor, count: Tensor) -> Tensor:
        stop = torch.zeros_like(block, dtype=torch.bool)
        ends, counts = call.end().tolist(), count.tolist()
        sizes = sorted({e + i + 1 for e, n in zip(ends, counts, strict=True) for i in range(n)})
        for size in sizes:
            ids = torch.nn.functional.pad(
                call.rows.ids, (0, max(0, size - call.rows.ids.shape[1]))
            )[:, :size]
            ids = ids.clone()
            for b, (end, n) in enumerate(zip(ends, counts, strict=True)):
                if n:
                    taken = min(n, max(0, size - end))
                    ids[b, end : end + taken] = block[b, :taken]
            verdict = _verdict(self.others, ids)
            for b, (end, n) in enumerate(zip(ends, counts, strict=True)):
                if 0 < size - end <= n:
                    stop[b, size - end - 1] |= verdict[b]
        return stop


def _verdict(criteria: list[Any], ids: Tensor) -> Tensor:
    """Whether any criterion ends each row, ``(B,)``; a criterion may return one value for all."""
    answers = [torch.as_tensor(c(ids, None), device=ids.device).reshape(-1) for c in criteria]
    return torch.stack([answer.bool().expand(len(ids)) for answer in answers]).any(0)
