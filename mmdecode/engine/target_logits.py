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

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.nodes import Nodes
from mmdecode.engine.processors import Processors
from mmdecode.engine.proposal import Proposal

if TYPE_CHECKING:
    from mmdecode.engine.adapter import Adapter


def rows_along(scores: Tensor, path: Tensor) -> Tensor:
    """Scores at the root and at the nodes of a path: ``(B, N + 1, V)`` to ``(B, D + 1, V)``.

    ``path (B, D)`` has the indices of the nodes.
    """
    rows = torch.nn.functional.pad(path + 1, (1, 0))
    return scores.gather(1, rows[..., None].expand(-1, -1, scores.shape[-1]))


LOGITS = 2**24
"""Most logits that are computed at once on a CPU where only their argmax is needed; elsewhere four
times as many, since a GPU reads the output matrix again for the next ones."""


class TargetLogits:
    """The target distribution at root and nodes, as unnormalised log-probabilities.

    Args:
        logits: Guided logits, float32 ``(B, N + 1, V)``.
        call: The call.
        proposal: The proposal whose nodes were scored.
        processors: The caller's processors.
        argmax: Most likely tokens, ``(B, N + 1)``, of a pass that computed no logits.

    Attributes:
        vectorised: Whether `all` can be called: every processor can be evaluated at all nodes
            together.
    """

    def __init__(
        self,
        logits: Tensor,
        call: Call,
        proposal: Proposal,
        processors: Processors,
        argmax: Tensor | None = None,
    ) -> None:
        self._argmax = argmax
        self._raw, self._call, self._proposal, self._processors = logits, call, proposal, processors
        self.vectorised = processors.vectorised
        self._all: Tensor | None = None
        self._memo: dict[tuple[int, int], Tensor] = {}

    @cached_property
    def nodes(self) -> Nodes:
        """Prefixes of root and nodes; read before the block is committed."""
        return Nodes(self._call, self._proposal)

    def raw(self) -> Tensor:
        """Logits before the caller's processors, ``(B, N + 1, V)``."""
        return self._raw

    def all(self) -> Tensor:
        """Processed logits, ``(B, N + 1, V)``; only if `vectorised`."""
        assert self.vectorised, "processors of unknown type are run at single rows only"
        if self._all is None:
            without = not self._processors.processors
            self._all = self._raw if without else self._processors.run_all(self._raw, self.nodes)
        return self._all

    def choices(self, choose: Callable[[Tensor, Tensor], Tensor], depths: Tensor) -> Tensor:
        """Tokens ``(B, N + 1)`` that a function chooses, or their argmax. If `vectorised`.

        Args:
            choose: Function of processed logits ``(B, N + 1, V)`` and depths.
            depths: Depth of each node, root included.
        """
        return choose(self.all(), depths) if self._argmax is None else self._argmax

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
        self._processors.paths["processors on the host"] += 1
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


def argmax_of(adapter: Adapter, states: Tensor) -> Tensor:
    """Most likely tokens of states, ``(R, Q, H)`` to ``(R, Q)``; of equal ones the lowest id.

    Logits are computed for some rows at a time, so that there is no tensor of all of them.
    """
    rows, most = states.flatten(0, 1), LOGITS if states.device.type == "cpu" else 4 * LOGITS
    parts = rows.split(max(1, most // adapter.vocab))
    if len(parts) == 1:
        return adapter.head(states).argmax(-1)
    found = [adapter.head(part[None])[0].argmax(-1) for part in parts]
    return torch.cat(found).view(states.shape[:2])
