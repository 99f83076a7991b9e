"""The law at the nodes: the guide's output under the caller's logits processors and warpers.

A processor of transformers sees one position of every row and the row's whole prefix. Here many
nodes are scored at once, each with its own prefix. Processors of known exact type are evaluated at
all nodes together, without looking at the device. As soon as one of another type is in the list,
the list runs as transformers would run it: node by node along the accepted path, batch-shaped for
each distinct prefix length, never past the first rejection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from mmdecode.engine.contracts import Context
from mmdecode.engine.proposal import Proposal

_PREFIX_FREE = {
    getattr(lp, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
}


class Nodes:
    """Root and nodes of one proposal as score rows: prefix lengths, tokens, ancestors.

    Attributes:
        tokens: The token each row is the law after, ``(B, N + 1)``; row 0 is the root.
        parents: Score row of the parent, ``(B or 1, N)``.
        depths: Nodes on the path to each row, 0 for the root, ``(B or 1, N + 1)``.
        ancestors: ``(B or 1, N + 1, N + 1)``, self included.
    """

    def __init__(self, ctx: Context, proposal: Proposal) -> None:
        self.ctx = ctx
        parents, depths, self.ancestors = proposal.structure()
        self.parents = parents + 1
        self.depths = torch.nn.functional.pad(depths, (1, 0))
        self.tokens = torch.cat([ctx.last(1), proposal.tokens], 1)
        self.positions = ctx.length[:, None] + self.depths  # of the token that the row decides
        self.prefix_length = self.positions + ctx.prompt_length  # (B, N + 1)

    def previous(self) -> Tensor:
        """The token before `tokens`, ``(B, N + 1)``."""
        above = self.tokens.gather(1, self.parents.expand(self.tokens.shape[0], -1))
        return torch.cat([self.ctx.last(2)[:, :1], above], 1)

    def last_on_path(self, wanted: Tensor, base: Tensor) -> Tensor:
        """The last node token on each row's path for which ``wanted (B, N + 1)``, else ``base``."""
        order = torch.arange(1, wanted.shape[1] + 1, device=wanted.device)
        last = ((self.ancestors & wanted[:, None]) * order).amax(-1)  # later in order is deeper
        found = self.tokens.gather(1, (last - 1).clamp_min(0))
        return torch.where(last > 0, found, base[:, None])


Vectorised = Callable[[Tensor, Nodes], Tensor]


def _flat(processor: lp.LogitsProcessor) -> Vectorised:
    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        return processor(None, scores.flatten(0, 1)).view_as(scores)  # type: ignore[arg-type]

    return run


def _suppress_at_begin(processor: lp.SuppressTokensAtBeginLogitsProcessor) -> Vectorised:
    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        ids = processor.begin_suppress_tokens.to(scores.device)
        hit = torch.isin(torch.arange(scores.shape[-1], device=scores.device), ids)
        at_begin = nodes.prefix_length == processor.begin_index
        return scores.masked_fill(at_begin[..., None] & hit, -torch.inf)

    return run


def _min_length(processor: lp.MinLengthLogitsProcessor) -> Vectorised:
    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        ids = processor.eos_token_id.to(scores.device)
        hit = torch.isin(torch.arange(scores.shape[-1], device=scores.device), ids)
        short = nodes.prefix_length < processor.min_length
        return scores.masked_fill(short[..., None] & hit, -torch.inf)

    return run


def _min_new_tokens(processor: lp.MinNewTokensLengthLogitsProcessor) -> Vectorised:
    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        ids = processor.eos_token_id.to(scores.device)
        hit = torch.isin(torch.arange(scores.shape[-1], device=scores.device), ids)
        new = nodes.prefix_length - processor.prompt_length_to_skip
        return scores.masked_fill((new < processor.min_new_tokens)[..., None] & hit, -torch.inf)

    return run


def _whisper_timestamps(processor: lp.WhisperTimeStampLogitsProcessor) -> Vectorised:
    """Timestamps in pairs, never decreasing, first of all, and wherever they outweigh all text."""
    first, begin = processor.timestamp_begin, processor.begin_index
    eos = processor.eos_token_id
    eos = min(eos) if isinstance(eos, (list, tuple)) else int(eos)

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        ctx = nodes.ctx
        vocab = torch.arange(scores.shape[-1], device=scores.device)
        since_begin = nodes.prefix_length - begin
        last_is = (nodes.tokens >= first) & (since_begin >= 1)
        previous_is = (nodes.previous() >= first) | (since_begin < 2)
        columns = torch.arange(ctx.ids.shape[1], device=scores.device)
        stamped = (ctx.ids >= first) & (columns >= begin) & (columns < ctx.end()[:, None])
        latest = torch.where(stamped, columns, -1).amax(1)
        base = torch.where(latest >= 0, ctx.ids.gather(1, latest.clamp_min(0)[:, None])[:, 0], -1)
        is_node = torch.ones_like(last_is)
        is_node[:, 0] = False  # the root is part of base
        last_stamp = nodes.last_on_path((nodes.tokens >= first) & is_node, base)
        floor = last_stamp + (~(last_is & ~previous_is)).long()
        floor = torch.where(last_stamp >= first, floor, first)

        is_stamp = vocab >= first
        banned = (last_is & previous_is)[..., None] & is_stamp
        banned |= (last_is & ~previous_is)[..., None] & (vocab < eos)
        banned |= is_stamp & (vocab < floor[..., None])
        at_begin = (since_begin == 0)[..., None]
        banned |= at_begin & ~is_stamp
        if processor.max_initial_timestamp_index is not None:
            banned |= at_begin & (vocab > first + processor.max_initial_timestamp_index)
        banned |= vocab == processor.no_timestamps_token_id
        scores = scores.masked_fill(banned, -torch.inf)
        if processor._detect_timestamp_from_logprob:
            log_p = scores.log_softmax(-1)
            stamps = log_p[..., first:].logsumexp(-1) > log_p[..., :first].amax(-1)
            scores = scores.masked_fill(stamps[..., None] & ~is_stamp, -torch.inf)
        return scores

    return run


_KNOWN: dict[type, Callable[..., Vectorised]] = {
    **dict.fromkeys(_PREFIX_FREE, _flat),
    lp.SuppressTokensAtBeginLogitsProcessor: _suppress_at_begin,
    lp.MinLengthLogitsProcessor: _min_length,
    lp.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    lp.WhisperTimeStampLogitsProcessor: _whisper_timestamps,
}


class Processors:
    """The caller's processors, sorted once per call into vectorised ones and others.

    Attributes:
        vectorised: Whether every processor is of a known exact type.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.processors = processors
        self.vectorised = all(type(p) in _KNOWN for p in processors)
        self._runs = [_KNOWN[type(p)](p) for p in processors] if self.vectorised else []

    def run_all(self, scores: Tensor, nodes: Nodes) -> Tensor:
        """All score rows at once; only where `vectorised`."""
        for run in self._runs:
            scores = run(scores, nodes)
        return scores


class Law:
    """See `mmdecode.engine.contracts.LawView`.

    Args:
        logits: What the guide made of the branches, float32 ``(B, N + 1, V)``.
        ctx: The rows.
        proposal: The nodes.
        processors: The caller's.
    """

    def __init__(
        self, logits: Tensor, ctx: Context, proposal: Proposal, processors: Processors
    ) -> None:
        self._raw, self._ctx, self._proposal, self._processors = logits, ctx, proposal, processors
        self.nodes = Nodes(ctx, proposal)
        self.vectorised = processors.vectorised
        self._all: Tensor | None = None
        self._memo: dict[tuple[int, int], Tensor] = {}

    def raw(self) -> Tensor:
        """Before the caller's processors, ``(B, N + 1, V)``."""
        return self._raw

    def all(self) -> Tensor:
        """Processed, ``(B, N + 1, V)``; only where `vectorised`."""
        assert self.vectorised, "processors of unknown type are run at single rows only"
        if self._all is None:
            self._all = self._processors.run_all(self._raw, self.nodes)
        return self._all

    def at(self, rows: Tensor) -> Tensor:
        """Processed, at one score row per batch row; -1 where none is asked. ``(B,)`` to ``(B, V)``."""
        if self.vectorised:
            index = rows.clamp_min(0)[:, None, None].expand(-1, 1, self._raw.shape[-1])
            return self.all().gather(1, index)[:, 0]
        wanted = [(b, row) for b, row in enumerate(rows.tolist()) if row >= 0]
        missing = [key for key in wanted if key not in self._memo]
        self._run_lazily(missing)
        result = torch.zeros_like(self._raw[:, 0])
        for b, row in wanted:
            result[b] = self._memo[b, row]
        return result

    def along(self, path: Tensor) -> Tensor:
        """Processed, at the root and along ``path (B, D)``: ``(B, D + 1, V)``."""
        rows = torch.nn.functional.pad(path + 1, (1, 0))
        if self.vectorised:
            index = rows[..., None].expand(-1, -1, self._raw.shape[-1])
            return self.all().gather(1, index)
        rows = torch.where(torch.nn.functional.pad(path, (1, 0)) < 0, -1, rows)
        rows[:, 0] = torch.where(self._ctx.open, 0, -1)
        return torch.stack([self.at(column) for column in rows.unbind(1)], 1)

    def _run_lazily(self, keys: list[tuple[int, int]]) -> None:
        if not keys:
            return
        ctx, width = self._ctx, self._ctx.prompt_length
        length = ctx.length.tolist()
        ancestors, depths = self.nodes.ancestors, self.nodes.depths
        by_length: dict[int, list[tuple[int, int]]] = {}
        for b, row in keys:
            depth = int(depths[b if len(depths) > 1 else 0, row])
            by_length.setdefault(width + length[b] + depth, []).append((b, row))
        for size, group in sorted(by_length.items()):
            # one key per batch row at a time, in the shape that transformers would show
            while group:
                seen: dict[int, int] = {}
                for b, row in group:
                    seen.setdefault(b, row)
                group = [(b, row) for b, row in group if seen[b] != row]
                ids = torch.nn.functional.pad(ctx.ids, (0, max(0, size - ctx.ids.shape[1])))
                ids = ids[:, :size].clone()
                scores = self._raw[:, 0].clone()
                for b, row in seen.items():
                    above = ancestors[b if len(ancestors) > 1 else 0, row, 1:]
                    ids[b, width + length[b] :] = self._proposal.tokens[b, above]
                    scores[b] = self._raw[b, row]
                scores = self._processors.processors(ids, scores)
                for b, row in seen.items():
                    self._memo[b, row] = scores[b]
