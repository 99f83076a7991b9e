"""Growing a draft tree level by level, for drafters that predict a distribution at every node.

The frontier is the set of nodes of the last level that get children. Each gets its ``top_k`` most
likely children, and the ``top_k`` children with the most likely paths form the next frontier. In
the end the nodes with the most likely paths are kept. A path is never more likely than its
beginning, so the kept nodes form a tree.

Sources: Li et al. 2024 (EAGLE-2), arXiv:2406.16858, section 4; Wang et al. 2025 (OPT-Tree),
arXiv:2406.17276, for the depth (see `Worth`). Differs from the references: no loop over nodes and
no synchronisation within a round, ties go to the earlier node, and children may be chosen with the
target's Gumbel noise added (coupled drafts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdecode.draft.target import TargetDistribution, noise_of
from mmdecode.engine import host
from mmdecode.engine.call import Call
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError


@dataclass(frozen=True)
class Shape:
    """Size limits of a draft tree to grow.

    Attributes:
        levels: Number of tokens on the longest path.
        top_k: Number of children per expanded node, and of expanded nodes per level; 1: a chain.
        nodes: Number of nodes to keep; chains and sampled trees keep all.
        min_expected_gain: Expected accepted tokens that a level must add for another to follow;
            ``None``: no such limit.

    Raises:
        OptionError: The expected gain is negative.
    """

    levels: int
    top_k: int
    nodes: int
    min_expected_gain: float | None = None

    def __post_init__(self) -> None:
        if self.min_expected_gain is not None and self.min_expected_gain < 0:
            raise OptionError(
                f"min_expected_gain={self.min_expected_gain}; expected 0 or more tokens a level"
            )


class Worth:
    """Stop condition per row: a tree ends once a level adds too few expected accepted tokens.

    A node is assumed to be accepted with the probability that the drafter gives to its path. The
    expected number of accepted tokens is then the sum of these probabilities over the ``nodes``
    most likely nodes. If a level adds nothing to this sum, no later level can. On a CPU growing
    stops when all rows have ended. On other devices reading the condition would need a
    synchronisation, so all levels are grown, and later nodes of ended rows are not proposed.

    Args:
        min_expected_gain: A further level is grown if the last one added more than this to the
            expected number of accepted tokens; the last level is kept in any case.
        nodes: Number of nodes that a tree keeps.
        call: The generation call.

    Source: Wang et al. 2025 (OPT-Tree), arXiv:2406.17276, section 3. Differs from its code, whose
    sum does not include the level that was grown last.
    """

    def __init__(self, min_expected_gain: float, nodes: int, call: Call) -> None:
        self.min_expected_gain, self.nodes = min_expected_gain, nodes
        self.may_sync = host.may_read(call.device) and not call.plan.static_shapes
        self.going = call.rows.active[:, None]
        self._best = torch.zeros(call.batch, 0, device=call.device)
        self._expected = torch.zeros(call.batch, 1, device=call.device)

    def masked(self, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Marks tokens and scores of a level, ``(B, n)``, as unused in rows that have ended."""
        ended = ~self.going
        return tokens.masked_fill(ended, -1), scores.masked_fill(ended, -torch.inf)

    def ended(self, scores: Tensor) -> bool:
        """Adds the scores of a level; returns whether growing can stop (only on a CPU)."""
        both = torch.cat([self._best, scores.exp()], 1)
        self._best = both.topk(min(self.nodes, both.shape[1]), dim=1).values
        expected = self._best.sum(1, keepdim=True)
        self.going = (
            expected - self._expected > self.min_expected_gain
        )  # nothing is added where it ended
        self._expected = expected
        return self.may_sync and not bool(self.going.any())


@dataclass(frozen=True, kw_only=True)
class Grown:
    """The nodes of a draft tree for each row, parents before children.

    Attributes:
        tokens: Token ids in the drafter's vocabulary, ``(B, M)``; -1 where unused.
        parents: Index of each node's parent, ``(B, M)``; -1 for children of the root, which is the
            last committed token.
        scores: Log-probability of each node's path, ``(B, M)``.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor

    def best(self, nodes: int) -> Grown:
        """Keeps the most likely nodes; ties go to the earlier node, so that parents stay."""
        size = self.tokens.shape[1]
        if nodes >= size:
            return self
        kept = self.scores.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
        kept = kept.sort(dim=1).values
        order = torch.arange(nodes, device=kept.device).expand_as(kept)
        new_index = kept.new_full((len(kept), size), -1).scatter(1, kept, order)
        above = self.parents.gather(1, kept)
        parents = new_index.gather(1, above.clamp_min(0)).masked_fill(above < 0, -1)
        return Grown(
            tokens=self.tokens.gather(1, kept),
            parents=parents,
            scores=self.scores.gather(1, kept),
        )


def grow(
    root: Tensor,
    step: Callable[[int, Tensor, Tensor], Tensor],
    levels: int,
    top_k: int,
    noise: Callable[[int], Tensor | None] = lambda level: None,
    worth: Worth | None = None,
) -> Grown:
    """Grows a tree of ``levels`` levels with ``top_k + (levels - 1) * top_k ** 2`` nodes.

    Args:
        root: Logits after the last committed token, ``(B, 1, D)``.
        step: Function of a level, counted from 0, the tokens of its frontier ``(B, k)``, and the
            index of each token's parent in the previous frontier ``(B, k)``; returns the logits
            after these tokens, ``(B, k, D)``.
        levels: Number of tokens on the longest path.
        top_k: Number of children per frontier node, and of frontier nodes per level.
        noise: Function of a level; returns noise ``(B, 1, D)`` that is added to log q when children
            are chosen, but not when paths are ranked. ``None``: the most likely are chosen.
        worth: Stop condition of rows; ``None``: all rows grow to ``levels``.
    """
    batch = len(root)
    tokens, parents, scores = [], [], []
    logits, first = root, 0
    node = torch.full((batch, 1), -1, device=root.device)  # nodes of the frontier
    weight = torch.zeros(batch, 1, device=root.device)
    for level in range(levels):
        log_q = logits.float().log_softmax(-1)
        added = noise(level)
        ranked = log_q if added is None else log_q + added
        chosen = ranked.topk(top_k, dim=-1).indices  # (B, n, k)
        # rounding must not make a child more likely than its parent
        log_prob = log_q.gather(-1, chosen).clamp_max(0)
        score = (weight[..., None] + log_prob).flatten(1)
        chosen = chosen.flatten(1)
        drafted = (chosen, score) if worth is None else worth.masked(chosen, score)
        # a warped distribution may leave fewer tokens than a node should have children
        tokens.append(drafted[0].masked_fill(drafted[1] == -torch.inf, -1))
        parents.append(node.repeat_interleave(top_k, 1))
        scores.append(drafted[1])
        if level == levels - 1 or (worth is not None and worth.ended(drafted[1])):
            break
        going = score.topk(top_k, dim=1).indices
        node, weight = first + going, score.gather(1, going)
        first += score.shape[1]
        logits = step(level, chosen.gather(1, going), going // top_k)
    return Grown(
        tokens=torch.cat(tokens, 1), parents=torch.cat(parents, 1), scores=torch.cat(scores, 1)
    )


def grown_proposal(
    target: TargetDistribution,
    shape: Shape,
    root: Tensor,
    step: Callable[[int, Tensor, Tensor], Tensor],
    own: Tensor | None = None,
) -> Proposal:
    """Grows a tree and makes it a proposal: of its most likely nodes, or of all sampled nodes.

    Args:
        target: Turns logits into the distribution to draft from.
        shape: Size of the tree.
        root: Logits after the last committed token, of all M branches, ``(M * B, 1, D)``.
        step: Function that reads a level, see `grow`; returns logits of all branches.
        own: The target's id of each token of the drafter's vocabulary, ``(D,)``; ``None``: both
            vocabularies are the same.
    """
    call, kind = target.call, target.call.plan.kind
    vocab, top_k = call.plan.adapter.vocab, min(shape.top_k, root.shape[-1])
    nodes = max(shape.nodes, shape.levels) if top_k == 1 else shape.nodes
    log_qs: list[Tensor] = []  # of the nodes of each level

    def distribution_of(level: int, logits: Tensor) -> Tensor:
        position = (call.rows.length + level)[:, None]
        log_qs.append(target(logits, position, own))
        return log_qs[-1]

    grown = grow(
        distribution_of(0, root),
        lambda level, tokens, above: distribution_of(level + 1, step(level, tokens, above)),
        shape.levels,
        top_k,
        lambda level: noise_of(kind, call, (call.rows.length + level)[:, None], vocab, own),
        None if shape.min_expected_gain is None else Worth(shape.min_expected_gain, nodes, call),
    )
    log_q = None
    if kind in ("iid", "without_replacement"):
        log_q = torch.cat([of.repeat_interleave(top_k, 1) for of in log_qs], 1)
        if own is not None:
            whole = log_q.new_full((*log_q.shape[:2], vocab), -torch.inf)
            log_q = whole.index_copy(2, own, log_q)
    else:
        grown = grown.best(nodes)
    tokens = grown.tokens
    if own is not None:
        tokens = own[tokens.clamp_min(0)].masked_fill(tokens < 0, -1)
    parents = None if top_k == 1 else grown.parents
    return Proposal(tokens=tokens, kind=kind, parents=parents, log_q=log_q)


def tree_mask(
    begin: Tensor, pads: Tensor, attended: Tensor, visible: int, dtype: torch.dtype
) -> Tensor:
    """Returns the additive attention mask of one level of a tree, ``(B, 1, k, visible)``.

    Args:
        begin: Cache slot of the tree's first node, after the committed entries, ``(B,)``.
        pads: Number of unused cache slots at the left of each row, ``(B,)``.
        attended: Whether each node may attend to each of the W nodes so far, itself included,
            ``(B, k, W)`` bool.
        visible: Number of cache slots that attention covers.
        dtype: The dtype of the mask, which is the model's.
    """
    slots = torch.arange(visible, device=begin.device)
    relative = slots - begin[:, None]
    width = attended.shape[-1]
    column = relative.clamp(0, width - 1)[:, None].expand(-1, attended.shape[1], -1)
    inside = ((relative >= 0) & (relative < width))[:, None]
    committed = ((relative < 0) & (slots >= pads[:, None]))[:, None]
    seen = torch.where(inside, attended.gather(2, column), committed)
    low = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=begin.device)
    return torch.where(seen, 0.0, low)[:, None]


def extended(attended: Tensor | None, above: Tensor) -> Tensor:
    """Returns the nodes that a level's nodes may attend to: their ancestors and themselves."""
    batch, width = above.shape
    itself = torch.eye(width, dtype=torch.bool, device=above.device).expand(batch, -1, -1)
    if attended is None:
        return itself
    inherited = attended.gather(1, above[..., None].expand(-1, -1, attended.shape[-1]))
    return torch.cat([inherited, itself], -1)
