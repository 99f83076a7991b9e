"""Proposals of a drafter: tokens in a tree, and how they were chosen.

Row b proposes nodes ``0..N-1``. ``parents`` holds -1 for children of the root (the last committed
token), else the index of an earlier node. Unused nodes hold token -1, never 0, because 0 is an
ordinary token. Siblings have different tokens, in the order in which they were sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from mmdecode.errors import OptionError, ShapeError

Kind = Literal["deterministic", "iid", "without_replacement", "coupled"]
KINDS: tuple[Kind, ...] = ("deterministic", "iid", "without_replacement", "coupled")

MAX_NODES = 256
"""Most nodes of a proposal."""


@dataclass(frozen=True)
class Tree:
    """Shape of a tree that all rows share, as host integers.

    Attributes:
        parents: ``parents[u] < u``; -1 is the root.
        depths: 1 for children of the root.
        is_chain: Whether node u is a child of node u - 1, for all u.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False)
    is_chain: bool = field(init=False)

    def __post_init__(self) -> None:
        depths: list[int] = []
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ShapeError(
                    f"node {node} names parent {parent}; a parent is -1 or an earlier node"
                )
            depths.append(1 if parent < 0 else depths[parent] + 1)
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "is_chain", self.parents == tuple(range(-1, len(depths) - 1)))

    @classmethod
    def chain(cls, length: int) -> Tree:
        """A chain of ``length`` nodes."""
        return _chain(length)

    @classmethod
    def from_paths(cls, paths: list[tuple[int, ...]]) -> tuple[Tree, list[tuple[int, ...]]]:
        """The tree of Medusa's rank paths: ``(0,), (0, 1), (1,)`` ...; missing prefixes are added.

        Returns:
            The tree, and for each node its rank path, by depth and then by rank.
        """
        closed = {path[:i] for path in paths for i in range(1, len(path) + 1)}
        order = sorted(closed, key=lambda path: (len(path), path))
        index = {path: node for node, path in enumerate(order)}
        return cls(tuple(index.get(path[:-1], -1) for path in order)), order

    def narrow(self, nodes: int) -> Tree:
        """The first ``nodes`` nodes."""
        return self if nodes == len(self.parents) else _narrow(self, nodes)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Length of the longest path."""
        return max(self.depths, default=0)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Parents ``(N,)``, depths ``(N,)`` and ancestors ``(N + 1, N + 1)``, cached per device.

        Ancestors include the node itself; row 0 is the root.
        """
        return _tree_tensors(self, device)


@lru_cache(maxsize=256)
def _chain(length: int) -> Tree:
    return Tree(tuple(range(-1, length - 1)))


@lru_cache(maxsize=256)
def _narrow(tree: Tree, nodes: int) -> Tree:
    return Tree(tree.parents[:nodes])


@lru_cache(maxsize=256)
def _tree_tensors(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    size = len(tree) + 1
    ancestors = torch.zeros(size, size, dtype=torch.bool)
    ancestors[:, 0] = True
    for node, parent in enumerate(tree.parents):
        ancestors[node + 1] |= ancestors[parent + 1]
        ancestors[node + 1, node + 1] = True
    parents = torch.tensor(tree.parents, dtype=torch.long)
    depths = torch.tensor(tree.depths, dtype=torch.long)
    return parents.to(device), depths.to(device), ancestors.to(device)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Nodes to be scored in one pass.

    Attributes:
        tokens: ``(B, N)`` int64, -1 where unused.
        kind: How the tokens were chosen: by a function of the committed prefix (``deterministic``),
            sampled independently from ``log_q`` (``iid``), sampled without replacement in
            Gumbel-top-k order (``without_replacement``), or as the argmax of log q plus the
            target's own Gumbel noise (``coupled``). There is no default: it decides which
            acceptance rules are exact.
        tree: Shape shared by all rows; a chain when neither ``tree`` nor ``parents`` is given.
        parents: ``(B, N)``, when rows have different shapes.
        log_q: ``(B, N, V)``, log-probabilities of the distribution that each node was sampled from,
            before earlier siblings were removed.
    """

    tokens: Tensor
    kind: Kind
    tree: Tree | None = None
    parents: Tensor | None = None
    log_q: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"kind {self.kind!r} is not one of {', '.join(KINDS)}")
        if self.tokens.ndim != 2 or self.tokens.dtype != torch.long:
            raise ShapeError(
                f"tokens are {self.tokens.dtype} of shape {tuple(self.tokens.shape)}; "
                "expected int64 (B, N)"
            )
        if self.tree is None and self.parents is None:
            object.__setattr__(self, "tree", Tree.chain(self.tokens.shape[1]))
        if self.tree is not None and len(self.tree) != self.tokens.shape[1]:
            raise ShapeError(
                f"the tree has {len(self.tree)} nodes, tokens have {self.tokens.shape[1]}"
            )
        if self.parents is not None and self.parents.shape != self.tokens.shape:
            raise ShapeError(
                f"parents {tuple(self.parents.shape)} and tokens {tuple(self.tokens.shape)} differ"
            )
        if self.kind in ("iid", "without_replacement") and self.log_q is None:
            raise OptionError(
                f"a proposal of kind {self.kind!r} needs log_q, what its tokens were sampled from"
            )

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> Proposal:
        """A proposal without nodes: the round decides one token per row."""
        return _empty(batch, device)

    @property
    def size(self) -> int:
        """Nodes per row, N."""
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """Whether every row is a chain, known without a transfer."""
        return self.tree is not None and self.tree.is_chain

    def width(self) -> Tensor:
        """Nodes up to the last one in use in any row, ``()``."""
        order = torch.arange(1, self.size + 1, device=self.tokens.device)
        return (order * (self.tokens >= 0)).amax()

    @property
    def deepest(self) -> int:
        """Depth of the deepest node, or more where rows have different trees."""
        return self.size if self.tree is None else self.tree.depth

    def narrow(self, nodes: int) -> Proposal:
        """The first ``nodes`` nodes of every row; the others must be unused."""
        if nodes == self.size:
            return self
        tree = None if self.tree is None else self.tree.narrow(nodes)
        return self.map(lambda held: held[:, :nodes], tree)

    def map(self, change: Callable[[Tensor], Tensor], tree: Tree | None = None) -> Proposal:
        """The proposal with ``change`` applied to each of its tensors, and ``tree`` if given."""
        return replace(
            self,
            tokens=change(self.tokens),
            tree=self.tree if tree is None else tree,
            parents=None if self.parents is None else change(self.parents),
            log_q=None if self.log_q is None else change(self.log_q),
        )

    def masked(self, keep: Tensor) -> Proposal:
        """Marks nodes where ``keep (B, N)`` is false as unused; their descendants must be too."""
        return replace(self, tokens=self.tokens.masked_fill(~keep, -1))

    def structure(self) -> tuple[Tensor, Tensor, Tensor]:
        """``parents``, ``depths`` and ``ancestors`` with a batch axis (size 1 when shared)."""
        device = self.tokens.device
        if self.tree is not None:
            return _batched(self.tree, device)
        assert self.parents is not None
        return _structure(self.parents)


@lru_cache(maxsize=8)
def root_depth(device: torch.device) -> Tensor:
    """Depth of a root without nodes: 0, ``(1, 1)``."""
    return torch.zeros(1, 1, dtype=torch.long, device=device)


@lru_cache(maxsize=512)
def _batched(tree: Tree, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    parents, depths, ancestors = tree.tensors(device)
    return parents[None], depths[None], ancestors[None]


@lru_cache(maxsize=64)
def _empty(batch: int, device: torch.device) -> Proposal:
    tokens = torch.empty(batch, 0, dtype=torch.long, device=device)
    return Proposal(tokens=tokens, kind="deterministic")


def _structure(parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ancestor closure by repeated squaring: no host loop over nodes."""
    batch, nodes = parents.shape
    size = nodes + 1
    up = torch.zeros(batch, size, size, device=parents.device)
    up.scatter_(2, torch.cat([parents.new_full((batch, 1), -1), parents], 1)[..., None] + 1, 1.0)
    closure = up + torch.eye(size, device=parents.device)
    reach = 1
    while reach < size:
        closure = (closure @ closure).clamp_max(1.0)
        reach *= 2
    ancestors = closure > 0
    return parents, ancestors.sum(-1)[:, 1:] - 1, ancestors


def width_bucket(width: int, size: int) -> int:
    """Nodes to score when the widest row uses ``width`` of ``size``: 0, powers of two, or all."""
    if width == 0:
        return 0
    return min(size, 1 << (width - 1).bit_length())
