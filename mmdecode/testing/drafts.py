"""Drafters for tests that propose useless, wrong, ragged, perfect or oddly shaped drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmdecode.engine.call import Call
from mmdecode.engine.contracts import Block, BranchOutput, Drafter, DraftSession
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal, Tree


class TestDrafter(Drafter):
    """A deterministic drafter without state; it proposes nothing, subclasses override `draft`.

    Attributes:
        vocab: Vocabulary size of the target model of the last call.
    """

    __test__ = False  # it is no test
    vocab = 0

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Opens a session whose methods call those of this drafter."""
        self.vocab = prefill.logits.shape[-1]
        return TestSession(call, self)

    def draft(self, call: Call, budget: int) -> Proposal:
        """Returns the next proposal; here an empty draft."""
        return Proposal.empty(call.batch, call.device)

    def learn(self, call: Call, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Receives the result of a verification round; here does nothing."""


class TestSession(DraftSession):
    """A session that calls `draft` and `learn` of its `TestDrafter` in every round."""

    __test__ = False  # it is no test

    def __init__(self, call: Call, drafter: TestDrafter) -> None:
        super().__init__(call)
        self.drafter = drafter

    def propose(self, budget: int) -> Proposal:
        """Returns the drafter's proposal for the next round."""
        return self.drafter.draft(self.call, budget)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Passes the result of a round to the drafter."""
        self.drafter.learn(self.call, proposal, output, block)


class Constant(TestDrafter):
    """Drafts the same token always, which may be the end-of-sequence token."""

    def __init__(self, token: int, length: int = 4) -> None:
        self.token, self.length = token, length

    def draft(self, call: Call, budget: int) -> Proposal:
        """Returns a chain that repeats the token."""
        tokens = torch.full((call.batch, self.length), self.token, device=call.device)
        return Proposal(tokens=tokens, kind="deterministic")


class Random(TestDrafter):
    """Drafts uniformly random tokens in a tree of fixed shape; siblings may be equal.

    Args:
        tree: Shape of the draft; ``None``: a chain of four tokens.
        ragged: Whether each row's draft is cut at a random node.
        seed: Seed of the random tokens.
    """

    def __init__(self, tree: Tree | None = None, ragged: bool = False, seed: int = 0) -> None:
        self.tree, self.ragged = tree or Tree.chain(4), ragged
        self.generator = torch.Generator().manual_seed(seed)

    def draft(self, call: Call, budget: int) -> Proposal:
        """Returns random tokens, cut at a random node if ``ragged``."""
        shape = (call.batch, len(self.tree))
        tokens = torch.randint(self.vocab, shape, generator=self.generator)
        if self.ragged:
            used = torch.randint(len(self.tree) + 1, (call.batch, 1), generator=self.generator)
            tokens = tokens.masked_fill(torch.arange(len(self.tree)) >= used, -1)
        return Proposal(tokens=tokens.to(call.device), kind="deterministic", tree=self.tree)


class RandomTrees(TestDrafter):
    """Drafts random tokens in another random tree for each row and round; some nodes are unused."""

    def __init__(self, nodes: int = 7, seed: int = 0) -> None:
        self.nodes = nodes
        self.generator = torch.Generator().manual_seed(seed)

    def draft(self, call: Call, budget: int) -> Proposal:
        """Returns a tree in which a node's parent is any earlier node, or the last token."""
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
    """Drafts every token at every node of ``depth`` levels, so the right tokens are among them."""

    def __init__(self, depth: int = 2) -> None:
        self.depth = depth

    def draft(self, call: Call, budget: int) -> Proposal:
        """Returns the full tree, with ``V + V^2 + ...`` nodes."""
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
    """Drafts tokens that are known to be the model's output, so that all drafts are right.

    Args:
        rows: Known output of each row.
        length: Drafted tokens per round.
        wrong_at: Positions at which the drafted id is wrong on purpose: one too high.
    """

    def __init__(
        self, rows: Sequence[Sequence[int]], length: int = 4, wrong_at: Sequence[int] = ()
    ) -> None:
        width = max(map(len, rows))
        self.rows = torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])
        self.length, self.wrong_at = length, torch.tensor(list(wrong_at), dtype=torch.long)

    def draft(self, call: Call, budget: int) -> Proposal:
        """Returns the known continuation, with wrong ids at ``wrong_at``."""
        index = call.rows.length[:, None] + torch.arange(self.length, device=call.device)
        rows = self.rows.to(call.device)
        inside = index < rows.shape[1]
        tokens = rows.gather(1, index.clamp_max(rows.shape[1] - 1)).masked_fill(~inside, -1)
        wrong = torch.isin(index, self.wrong_at.to(call.device)) & (tokens >= 0)
        tokens = torch.where(wrong, (tokens + 1) % self.vocab, tokens)
        return Proposal(tokens=tokens, kind="deterministic")


class Bigram(TestDrafter):
    """Drafts a chain from a bigram table q(next | previous), by argmax or sampling.

    Args:
        logits: Logits of the next token by previous token, ``(V, V)``.
        length: Drafted tokens per round.
        kinds: Kinds of proposals that it offers to the acceptance rule: ``deterministic`` (argmax),
            ``iid`` (sampled), ``coupled`` (sampled with the target's Gumbel noise).
        ragged: Whether drafts of a row end at positions that are multiples of three.
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
        """Returns a chain, each token drawn from the table's row of the token before it."""
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
        """Draws one token per row from the logits ``distribution (B, V)``."""
        if call.plan.kind == "deterministic":
            return distribution.argmax(-1)
        role, trial = (
            (Role.TARGET, None) if call.plan.kind == "coupled" else (Role.DRAFT, call.rows.rounds)
        )
        return call.request.noise.sample(distribution[:, None], position, role, trial)[:, 0]


class Siblings(TestDrafter):
    """Drafts a tree from a bigram table q(next | previous), with several children per node.

    Args:
        logits: Logits of the next token by previous token, ``(V, V)``.
        widths: Number of children of each node, by depth.
        kinds: Kinds of proposals that it offers to the acceptance rule: children sampled
            independently (``iid``) or by Gumbel-top-k (``without_replacement``), or the most likely
            ones (``deterministic``).
        ragged: Whether drafts of a row end at positions that are multiples of three.
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
        """Returns the tree, ordered by level, with siblings next to each other."""
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
        """Draws ``width`` children of each node, from ``(B, n, V)`` to ``(B, n, width)``."""
        if call.plan.kind == "deterministic":
            return distribution.topk(width, dim=-1).indices
        batch, nodes, vocab = distribution.shape
        size = nodes * width * vocab
        gumbel = call.request.noise.gumbel(position, Role.DRAFT, size, trial=call.rows.rounds)
        noisy = distribution[:, :, None] + gumbel.view(batch, nodes, width, vocab)
        if call.plan.kind == "iid":
            return noisy.argmax(-1)
        return noisy[:, :, 0].topk(width, dim=-1).indices
