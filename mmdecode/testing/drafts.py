"""Drafts that try to break a rule or the loop: useless, wrong, ragged, perfect, or oddly shaped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import Block, BranchOutput, Drafter, DraftSession
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal, Tree


class TestDrafter(Drafter):
    """A deterministic drafter without state; subclasses override `draft`, which here is empty.

    Attributes:
        vocab: Tokens of the target at the last call.
    """

    __test__ = False  # it is no test
    vocab = 0

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Opens a session that calls this drafter."""
        self.vocab = prefill.logits.shape[-1]
        return TestSession(call, self)

    def draft(self, call: Call, budget: int) -> Proposal:
        """Next proposal."""
        return Proposal.empty(call.batch, call.device)

    def learn(self, call: Call, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Called with the result of a round."""


class TestSession(DraftSession):
    """Calls its drafter's `draft` and `learn` in every round."""

    __test__ = False  # it is no test

    def __init__(self, call: Call, drafter: TestDrafter) -> None:
        super().__init__(call)
        self.drafter = drafter

    def propose(self, budget: int) -> Proposal:
        """Session of the drafter for the call."""
        return self.drafter.draft(self.call, budget)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Passes a round on."""
        self.drafter.learn(self.call, proposal, output, block)


class Constant(TestDrafter):
    """Always one token: an ordinary one, or the end of sequence."""

    def __init__(self, token: int, length: int = 4) -> None:
        self.token, self.length = token, length

    def draft(self, call: Call, budget: int) -> Proposal:
        """A chain of the token."""
        tokens = torch.full((call.batch, self.length), self.token, device=call.device)
        return Proposal(tokens=tokens, kind="deterministic")


class Random(TestDrafter):
    """Uniform tokens in a fixed shape; siblings may repeat each other.

    Args:
        tree: The shape; default a chain of four.
        ragged: Whether each row is cut at a random node.
        seed: Seed of its own generator.
    """

    def __init__(self, tree: Tree | None = None, ragged: bool = False, seed: int = 0) -> None:
        self.tree, self.ragged = tree or Tree.chain(4), ragged
        self.generator = torch.Generator().manual_seed(seed)

    def draft(self, call: Call, budget: int) -> Proposal:
        """Random tokens, cut if ``ragged``."""
        shape = (call.batch, len(self.tree))
        tokens = torch.randint(self.vocab, shape, generator=self.generator)
        if self.ragged:
            used = torch.randint(len(self.tree) + 1, (call.batch, 1), generator=self.generator)
            tokens = tokens.masked_fill(torch.arange(len(self.tree)) >= used, -1)
        return Proposal(tokens=tokens.to(call.device), kind="deterministic", tree=self.tree)


class RandomTrees(TestDrafter):
    """Another random tree for each row and round, with random tokens; nodes at the end unused."""

    def __init__(self, nodes: int = 7, seed: int = 0) -> None:
        self.nodes = nodes
        self.generator = torch.Generator().manual_seed(seed)

    def draft(self, call: Call, budget: int) -> Proposal:
        """Parents are any earlier node, or the root."""
        shape = (call.batch, self.nodes)
        limits = torch.arange(self.nodes) + 1
        parents = (torch.rand(shape, generator=self.generator) * limits).long() - 1
        tokens = torch.randint(self.vocab, shape, generator=self.generator)
        used = torch.randint(self.nodes + 1, (call.batch, 1), generator=self.generator)
        tokens = tokens.masked_fill(torch.arange(self.nodes) >= used, -1)
        return Proposal(
            tokens=tokens.to(call.device), kind="deterministic", parents=parents.to(call.device)
        )


class FullTree(TestDrafter):
    """Every token at every node, ``depth`` levels deep: whatever is chosen was drafted."""

    def __init__(self, depth: int = 2) -> None:
        self.depth = depth

    def draft(self, call: Call, budget: int) -> Proposal:
        """``V + V^2 + ...`` nodes."""
        parents: list[int] = []
        tokens: list[int] = []
        level = [-1]
        for _ in range(self.depth):
            below = []
            for parent in level:
                for token in range(self.vocab):
                    below.append(len(parents))
                    parents.append(parent)
                    tokens.append(token)
            level = below
        rows = torch.tensor(tokens, device=call.device).expand(call.batch, -1)
        return Proposal(tokens=rows, kind="deterministic", tree=Tree(tuple(parents)))


class Known(TestDrafter):
    """Proposes the tokens that a row is known to end with: everything it drafts is right.

    Args:
        rows: The generated tokens of each row.
        length: Tokens per round.
        wrong_at: Positions where it errs on purpose, by one id.
    """

    def __init__(
        self, rows: Sequence[Sequence[int]], length: int = 4, wrong_at: Sequence[int] = ()
    ) -> None:
        width = max(map(len, rows))
        self.rows = torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])
        self.length, self.wrong_at = length, torch.tensor(list(wrong_at), dtype=torch.long)

    def draft(self, call: Call, budget: int) -> Proposal:
        """True continuation, shifted by one id at the wrong positions."""
        index = call.rows.length[:, None] + torch.arange(self.length, device=call.device)
        rows = self.rows.to(call.device)
        inside = index < rows.shape[1]
        tokens = rows.gather(1, index.clamp_max(rows.shape[1] - 1)).masked_fill(~inside, -1)
        wrong = torch.isin(index, self.wrong_at.to(call.device)) & (tokens >= 0)
        tokens = torch.where(wrong, (tokens + 1) % self.vocab, tokens)
        return Proposal(tokens=tokens, kind="deterministic")


class Bigram(TestDrafter):
    """A chain from a table q(next | previous), as the rule prefers: argmax, iid or coupled.

    Args:
        logits: ``(V, V)``.
        length: Tokens per round.
        kinds: Kinds that it offers.
        ragged: Whether a row stops drafting after each multiple of three positions.
    """

    def __init__(
        self,
        logits: Tensor,
        length: int = 3,
        kinds: tuple[Kind, ...] = ("deterministic", "iid", "coupled"),
        ragged: bool = False,
    ) -> None:
        self.logits, self.length, self.kinds, self.ragged = logits, length, kinds, ragged

    def draft(self, call: Call, budget: int) -> Proposal:
        """Token after token, each from the row of the token before."""
        previous, tokens, distributions = call.last(1)[:, 0], [], []
        table = self.logits.to(call.device)
        for step in range(self.length):
            distribution = table[previous]
            position = (call.rows.length + step)[:, None]
            previous = self.draw(call, distribution, position)
            distributions.append(distribution)
            tokens.append(previous)
        drafted = torch.stack(tokens, 1)
        if self.ragged:
            index = call.rows.length[:, None] + torch.arange(self.length, device=call.device)
            ended = (index % 3 == 0).long().cumsum(1) > 0
            drafted = drafted.masked_fill(ended, -1)
        log_q = torch.stack(distributions, 1) if call.plan.kind == "iid" else None
        return Proposal(tokens=drafted, kind=call.plan.kind, log_q=log_q)

    def draw(self, call: Call, distribution: Tensor, position: Tensor) -> Tensor:
        """One token per row from ``distribution (B, V)``."""
        if call.plan.kind == "deterministic":
            return distribution.argmax(-1)
        role, trial = (
            (Role.TARGET, None) if call.plan.kind == "coupled" else (Role.DRAFT, call.rows.rounds)
        )
        gumbel = call.request.noise.gumbel(position, role, distribution.shape[-1], trial=trial)
        return (distribution + gumbel[:, 0]).argmax(-1)


class Siblings(TestDrafter):
    """A tree from a table q(next | previous), several children a node, as the rule prefers.

    Args:
        logits: ``(V, V)``.
        widths: Children of each node, by depth.
        kinds: Kinds that it offers: ``iid`` draws may repeat, ``without_replacement`` are in
            Gumbel-top-k order, ``deterministic`` ones the most likely.
        ragged: Whether a row stops drafting after each multiple of three positions.
    """

    def __init__(
        self,
        logits: Tensor,
        widths: Sequence[int] = (2, 2),
        kinds: tuple[Kind, ...] = ("without_replacement", "iid", "deterministic"),
        ragged: bool = False,
    ) -> None:
        self.logits, self.widths, self.kinds, self.ragged = logits, tuple(widths), kinds, ragged
        parents: list[int] = []
        level = [-1]
        for width in self.widths:
            below = [(parent, child) for parent in level for child in range(width)]
            level = list(range(len(parents), len(parents) + len(below)))
            parents += [parent for parent, _ in below]
        self.tree = Tree(tuple(parents))

    def draft(self, call: Call, budget: int) -> Proposal:
        """Level by level, siblings side by side."""
        level = call.last(1)
        tokens: list[Tensor] = []
        distributions: list[Tensor] = []
        table = self.logits.to(call.device)
        for step, width in enumerate(self.widths):
            distribution = table[level]  # (B, n, V)
            position = (call.rows.length + step)[:, None]
            chosen = self.draw(call, distribution, position, width)  # (B, n, width)
            ended = ((position % 3 == 0) & self.ragged) | (tokens[-1][:, :1] < 0 if step else False)
            level = chosen.flatten(1)
            tokens.append(level.masked_fill(ended, -1))
            distributions.append(distribution.repeat_interleave(width, 1))
        log_q = None if call.plan.kind == "deterministic" else torch.cat(distributions, 1)
        return Proposal(
            tokens=torch.cat(tokens, 1), kind=call.plan.kind, tree=self.tree, log_q=log_q
        )

    def draw(self, call: Call, distribution: Tensor, position: Tensor, width: int) -> Tensor:
        """``width`` tokens for each of the nodes, ``(B, n, V)`` to ``(B, n, width)``."""
        if call.plan.kind == "deterministic":
            return distribution.topk(width, dim=-1).indices
        batch, nodes, vocab = distribution.shape
        size = nodes * width * vocab
        gumbel = call.request.noise.gumbel(position, Role.DRAFT, size, trial=call.rows.rounds)
        noisy = distribution[:, :, None] + gumbel.view(batch, nodes, width, vocab)
        if call.plan.kind == "iid":
            return noisy.argmax(-1)
        return noisy[:, :, 0].topk(width, dim=-1).indices
