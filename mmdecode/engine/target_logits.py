"""The target distribution at the nodes: the guide's output after logits processors and warpers.

A logits processor of transformers gets the scores of one position per row, and the row's whole
prefix. Here many nodes are scored at once, each with its own prefix. Processors of known types are
evaluated at all nodes together, on the device; the adapter of a model family may add further types.
This library's processors implement ``at_nodes(scores (B, N + 1, V), nodes) -> scores``, which
processes all nodes at once.

If the list has a processor of any other type, all processors run as in transformers: node by node
along the accepted path and up to the first rejection, with rows of equal prefix length as a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from mmdecode.engine.call import Call
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
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
}


class Nodes:
    """Structure of a proposal: tokens, depths and ancestors of its root and its N nodes.

    Index 0 is the root, the last committed token; index i + 1 is node i.

    Attributes:
        parents: Index of each node's parent, ``(B or 1, N)``.
        depths: Depth of root and nodes, 0 for the root, ``(B or 1, N + 1)``.
        ancestors: Whether the second is an ancestor of the first, or the same, ``(B or 1, N + 1,
            N + 1)`` bool.
    """

    def __init__(self, call: Call, proposal: Proposal) -> None:
        self.call, self._drafted = call, proposal.tokens
        parents, depths, self.ancestors = proposal.structure()
        self.parents = parents + 1
        self.depths = torch.nn.functional.pad(depths, (1, 0))

    @cached_property
    def tokens(self) -> Tensor:
        """Token of the root and of each node, ``(B, N + 1)``."""
        return torch.cat([self.call.last(1), self._drafted], 1)

    @cached_property
    def prefix_length(self) -> Tensor:
        """Length of the prefix up to root or node, prompt and padding included, ``(B, N + 1)``."""
        return self.call.rows.length[:, None] + self.depths + self.call.prompt_length

    def previous(self) -> Tensor:
        """Token before the root and before each node on its path, ``(B, N + 1)``."""
        before_root = self.call.last(2)[:, :1]
        if self.tokens.shape[1] == 1:
            return before_root
        above = self.tokens.gather(1, self.parents.expand(self.tokens.shape[0], -1))
        return torch.cat([before_root, above], 1)

    def last_committed(self, first: int, begin: int) -> Tensor:
        """The last committed token with an id of ``first`` or more, ``(B,)``; -1: none.

        Args:
            first: Lowest id that counts.
            begin: First column of the ids that is searched.
        """
        ids = self.call.rows.ids[:, begin:]
        order = self.vocabulary(ids.shape[1])
        end = self.call.rows.length[:, None] + (self.call.prompt_length - begin)
        last = torch.where((ids >= first) & (order < end), order, -1).amax(1)
        found = ids.gather(1, last.clamp_min(0)[:, None])[:, 0]
        return torch.where(last >= 0, found, -1)

    def last_on_path(self, wanted: Tensor, base: Tensor) -> Tensor:
        """The last token on the path to root or node that is wanted, ``(B, N + 1)``.

        Args:
            wanted: Whether the token of root or node counts, ``(B, N + 1)`` bool; the root's value
                is not used.
            base: Result where no node on the path is wanted, ``(B,)``: the last wanted committed
                token.
        """
        if wanted.shape[1] == 1:
            return base[:, None]
        order = self.vocabulary(wanted.shape[1])  # 0 is the root, later in order is deeper
        last = ((self.ancestors & wanted[:, None]) * order).amax(-1)
        return torch.where(last > 0, self.tokens.gather(1, last), base[:, None])

    def vocabulary(self, size: int) -> Tensor:
        """0, 1, ... ``size - 1``."""
        return _arange(size, self.tokens.device)


@lru_cache(maxsize=64)
def _arange(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device)


Vectorised = Callable[[Tensor, Nodes], Tensor]
NodeProcessors = Mapping[type, Callable[..., Vectorised]]
"""Exact type of a processor to a function that turns one into a `Vectorised`."""


def _flat(processor: lp.LogitsProcessor) -> Vectorised:
    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        return processor(None, scores.flatten(0, 1)).view_as(scores)

    return run


class _Mask:
    """A set of token ids as a mask over the vocabulary, cached for one device and size."""

    def __init__(self, ids: Tensor) -> None:
        self._ids, self._mask = ids, torch.empty(0, dtype=torch.bool)

    def like(self, scores: Tensor) -> Tensor:
        """``(V,)`` bool."""
        if len(self._mask) != scores.shape[-1] or self._mask.device != scores.device:
            vocab = torch.arange(scores.shape[-1], device=scores.device)
            self._mask = torch.isin(vocab, self._ids.to(scores.device))
        return self._mask


def _suppress(processor: lp.SuppressTokensLogitsProcessor) -> Vectorised:
    mask = _Mask(processor.suppress_tokens)

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        return scores.masked_fill(mask.like(scores), -torch.inf)

    return run


def _suppress_at_begin(processor: lp.SuppressTokensAtBeginLogitsProcessor) -> Vectorised:
    mask = _Mask(processor.begin_suppress_tokens)

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        if nodes.call.rows.cur_len and processor.begin_index <= nodes.call.prompt_length:
            return scores  # every row is past its first token
        at_begin = nodes.prefix_length == processor.begin_index
        return scores.masked_fill(at_begin[..., None] & mask.like(scores), -torch.inf)

    return run


def _min_length(processor: lp.MinLengthLogitsProcessor) -> Vectorised:
    mask = _Mask(processor.eos_token_id)

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        short = nodes.prefix_length < processor.min_length
        return scores.masked_fill(short[..., None] & mask.like(scores), -torch.inf)

    return run


def _min_new_tokens(processor: lp.MinNewTokensLengthLogitsProcessor) -> Vectorised:
    mask = _Mask(processor.eos_token_id)

    def run(scores: Tensor, nodes: Nodes) -> Tensor:
        short = nodes.prefix_length < processor.prompt_length_to_skip + processor.min_new_tokens
        return scores.masked_fill(short[..., None] & mask.like(scores), -torch.inf)

    return run


_KNOWN: NodeProcessors = {
    **dict.fromkeys(_PREFIX_FREE, _flat),
    lp.SuppressTokensLogitsProcessor: _suppress,
    lp.SuppressTokensAtBeginLogitsProcessor: _suppress_at_begin,
    lp.MinLengthLogitsProcessor: _min_length,
    lp.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
}


def _vectorised(processor: lp.LogitsProcessor, table: NodeProcessors) -> Vectorised | None:
    """The processor as a function of all nodes; ``None``: it must run node by node."""
    known = table.get(type(processor))
    return known(processor) if known else getattr(processor, "at_nodes", None)


def prefix_free(processors: LogitsProcessorList) -> Callable[[Tensor], Tensor] | None:
    """Combines the processors that do not depend on previous tokens, such as temperature.

    Custom processors declare this by a class attribute ``prefix_free``.

    Returns:
        A function of logits ``(..., V)``; ``None`` if there is no such processor.
    """
    found = [
        one
        for one in processors
        if type(one) in _PREFIX_FREE or getattr(type(one), "prefix_free", False)
    ]
    if not found:
        return None
    nothing = torch.empty(0, 0, dtype=torch.long)

    def warp(logits: Tensor) -> Tensor:
        flat = logits.flatten(0, -2)
        for processor in found:
            flat = processor(nothing, flat)
        return flat.view_as(logits)

    return warp


class Processors:
    """The caller's logits processors, with their vectorised forms.

    Args:
        processors: The processors, in order.
        known: Further types that can be evaluated at all nodes together, from the adapter.

    Attributes:
        vectorised: Whether every processor can be evaluated at all nodes together.
    """

    def __init__(
        self, processors: LogitsProcessorList, known: NodeProcessors = MappingProxyType({})
    ) -> None:
        self.processors = processors
        table = {**_KNOWN, **known}
        runs = [_vectorised(processor, table) for processor in processors]
        self._runs = [run for run in runs if run is not None]
        self.vectorised = len(self._runs) == len(runs)

    def run_all(self, scores: Tensor, nodes: Nodes) -> Tensor:
        """Processes the scores of root and nodes at once; only if `vectorised`."""
        for run in self._runs:
            scores = run(scores, nodes)
        return scores


def rows_along(scores: Tensor, path: Tensor) -> Tensor:
    """Scores at the root and at the nodes of a path: ``(B, N + 1, V)`` to ``(B, D + 1, V)``.

    ``path (B, D)`` has the indices of the nodes.
    """
    rows = torch.nn.functional.pad(path + 1, (1, 0))
    return scores.gather(1, rows[..., None].expand(-1, -1, scores.shape[-1]))


class TargetLogits:
    """The target distribution at root and nodes, as unnormalised log-probabilities.

    Args:
        logits: Guided logits, float32 ``(B, N + 1, V)``.
        call: The call.
        proposal: The proposal whose nodes were scored.
        processors: The caller's processors.

    Attributes:
        vectorised: Whether `all` can be called: every processor can be evaluated at all nodes
            together.
    """

    def __init__(
        self, logits: Tensor, call: Call, proposal: Proposal, processors: Processors
    ) -> None:
        self._raw, self._call, self._proposal, self._processors = logits, call, proposal, processors
        self.nodes = Nodes(call, proposal)
        self.vectorised = processors.vectorised
        self._all: Tensor | None = None
        self._memo: dict[tuple[int, int], Tensor] = {}

    def raw(self) -> Tensor:
        """Logits before the caller's processors, ``(B, N + 1, V)``."""
        return self._raw

    def all(self) -> Tensor:
        """Processed logits, ``(B, N + 1, V)``; only if `vectorised`."""
        assert self.vectorised, "processors of unknown type are run at single rows only"
        if self._all is None:
            self._all = self._processors.run_all(self._raw, self.nodes)
        return self._all

    def at(self, rows: Tensor) -> Tensor:
        """Processed logits at one node of each row, ``(B, V)``.

        Args:
            rows: Index in each row, 0 for the root and i + 1 for node i, ``(B,)``; -1: not needed.
        """
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
        """Processed logits at the root and at the nodes of a path, ``(B, D + 1, V)``.

        Args:
            path: Indices of the nodes, ``(B, D)``, padded with -1.
        """
        if self.vectorised:
            return rows_along(self.all(), path)
        rows = torch.nn.functional.pad(path + 1, (1, 0))
        rows = torch.where(torch.nn.functional.pad(path, (1, 0)) < 0, -1, rows)
        rows[:, 0] = torch.where(self._call.rows.active, 0, -1)
        return torch.stack([self.at(column) for column in rows.unbind(1)], 1)

    def _run_lazily(self, keys: list[tuple[int, int]]) -> None:
        if not keys:
            return
        call, width = self._call, self._call.prompt_length
        length = call.rows.length.tolist()
        ancestors, depths = self.nodes.ancestors, self.nodes.depths
        by_length: dict[int, list[tuple[int, int]]] = {}
        for b, row in keys:
            depth = int(depths[b if len(depths) > 1 else 0, row])
            by_length.setdefault(width + length[b] + depth, []).append((b, row))
        for size, group in sorted(by_length.items()):
            # at most one node per batch row at a time, in the shape that transformers would pass
            while group:
                seen: dict[int, int] = {}
                for b, row in group:
                    seen.setdefault(b, row)
                group = [(b, row) for b, row in group if seen[b] != row]
                ids = torch.nn.functional.pad(
                    call.rows.ids, (0, max(0, size - call.rows.ids.shape[1]))
                )
                ids = ids[:, :size].clone()
                scores = self._raw[:, 0].clone()
                for b, row in seen.items():
                    above = ancestors[b if len(ancestors) > 1 else 0, row, 1:]
                    ids[b, width + length[b] :] = self._proposal.tokens[b, above]
                    scores[b] = self._raw[b, row]
                scores = self._processors.processors(ids, scores)
                for b, row in seen.items():
                    self._memo[b, row] = scores[b]
