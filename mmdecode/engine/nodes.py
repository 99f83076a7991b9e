"""The tokens before each node of a proposal: prefix lengths, last tokens, ancestors."""

from __future__ import annotations

from functools import cached_property, lru_cache

import torch
from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.proposal import Proposal


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
        """Token before the root and before each node on its path, ``(B, N + 1)``; -1: none."""
        return self.suffix(2)[..., 0]

    def committed(self) -> tuple[Tensor, Tensor]:
        """Prompt and committed ids, and which are in use, ``(B, W)`` each; W is the longest row."""
        width = self.call.prompt_length + self.call.rows.cur_len
        ids = self.call.rows.ids[:, : max(width, 1)]
        return ids, self.vocabulary(ids.shape[1]) < self.call.end()[:, None]

    def on_path(self) -> Tensor:
        """Nodes on the path to each score row, itself included, ``(B or 1, N + 1, N)``."""
        return self.ancestors[:, :, 1:]

    def path_tokens(self) -> Tensor:
        """Tokens of the nodes on the path to each row, -1 elsewhere, ``(B, N + 1, N)``."""
        return torch.where(self.on_path(), self._drafted[:, None], -1)

    def suffix(self, count: int) -> Tensor:
        """The last ``count`` tokens of each row's prefix, oldest first, ``(B, N + 1, count)``.

        -1 where the prefix is shorter.
        """
        if count == 0:
            return self.tokens.new_empty((*self.tokens.shape, 0))
        columns = self.call.end()[:, None] - 1 - self.vocabulary(count)
        above = self.call.rows.ids.gather(1, columns.clamp_min(0))
        above = above.masked_fill(columns < 0, -1)  # before the root, newest first
        levels = [self.tokens]
        parents = self.parents.expand(len(self.tokens), -1)
        for back in range(1, count):
            inner = levels[-1].gather(1, parents)
            levels.append(torch.cat([above[:, back, None], inner], 1))
        return torch.stack(levels[::-1], -1)

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
