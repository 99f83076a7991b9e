"""Base classes of drafters, guides, acceptance rules and branch runners, and what they exchange.

`mmdecode.engine.loop` calls them.

Conventions: B rows, N nodes, V vocabulary. Row 0 of every score tensor is the root (the last
committed token, not yet in the cache); row u + 1 scores the token after node u. In round 0 there is
no root: row 0 is the last token of the prompt, and N = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.adapter import Adapter, BranchSpec
from mmdecode.engine.call import Call, WindowMode
from mmdecode.engine.capabilities import DrafterCapabilities, Part, RuleCapabilities
from mmdecode.engine.proposal import Kind, Proposal

if TYPE_CHECKING:
    from mmdecode.engine.attention import AttentionEdit
    from mmdecode.engine.prompt_cache import Found
    from mmdecode.engine.target_logits import TargetLogits


@dataclass(frozen=True, kw_only=True)
class BranchOutput:
    """Scores and states of one branch at the root and every node.

    Attributes:
        logits: float32, ``(B, N + 1, V)``; ``(B, N + 1, K)`` where ``candidates`` are given.
        argmax: Most likely tokens, ``(B, N + 1)``, of a round whose logits no part reads: these are
            then ``(B, N + 1, 0)``. ``None``: there are logits.
        candidates: Ids of the main vocabulary that were scored, ``(B, N + 1, K)``, -1 unused.
        hidden: Layer to ``(B, N + 1, H)``: ``hidden[i]`` is the input of layer i,
            ``hidden["last"]`` the state after the final norm.
        prompt_hidden: At prefill, the same for the whole prompt, ``(B, P, H)``, where asked for.
        early_exit_logits: Layer to ``(B, N + 1, V)``: logits of ``hidden[i]`` through the
            final norm and head.
        attention: Layer to weights over the columns of the prompt, ``(B, heads, N + 1, P)``.
        text_attention: At prefill, layer to the mean attention weights of the prompt's text tokens,
            ``(B, heads, P)``, where asked for.
        images: Columns of the prompt that hold image tokens, ``(B, P)``, along with ``attention``
            and ``text_attention``.
        other_branches: Outputs of the guide's other branches, by name. Set only on the main
            branch's output that is passed to the drafter.
        prefixes: At prefill with a prompt cache, the prefix that each row of the prompt takes, or
            ``None``.
    """

    logits: Tensor
    argmax: Tensor | None = None
    candidates: Tensor | None = None
    hidden: Mapping[int | str, Tensor] = field(default_factory=dict)
    early_exit_logits: Mapping[int, Tensor] = field(default_factory=dict)
    attention: Mapping[int, Tensor] = field(default_factory=dict)
    text_attention: Mapping[int, Tensor] = field(default_factory=dict)
    images: Tensor | None = None
    prompt_hidden: Mapping[int | str, Tensor] = field(default_factory=dict)
    other_branches: Mapping[str, BranchOutput] = field(default_factory=dict)
    prefixes: Sequence[Found | None] = ()

    def rows(self, rows: slice) -> BranchOutput:
        """The outputs of some rows, without `other_branches`."""

        def those(values: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
            return {key: value[rows] for key, value in values.items()}

        return BranchOutput(
            logits=self.logits[rows],
            argmax=None if self.argmax is None else self.argmax[rows],
            candidates=None if self.candidates is None else self.candidates[rows],
            hidden=those(self.hidden),
            early_exit_logits=those(self.early_exit_logits),
            attention=those(self.attention),
            text_attention=those(self.text_attention),
            images=None if self.images is None else self.images[rows],
            prompt_hidden=those(self.prompt_hidden),
            prefixes=self.prefixes[rows],
        )


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """Internals that a part needs from the forward passes.

    Attributes:
        hidden: Layers whose hidden states are needed: indices, or ``"last"``.
        prompt_hidden: Whether the hidden states of the whole prompt are needed at prefill.
        window_modes: How the rest of a rejected chain is refilled for a Jacobi drafter, by the kind
            of proposal that drafter and rule agree on; see `WindowMode`.
        early_exit_logits: Layers whose early-exit logits are needed.
        attention: Layers whose attention weights over the prompt are needed.
        text_attention: Whether the mean attention of the prompt's text tokens is needed at prefill,
            in all layers.
        argmax_only: Whether rounds need no logits, but for their argmax: decided for all parts of a
            call, see `mmdecode.engine.capabilities.DrafterCapabilities`.
    """

    hidden: frozenset[int | str] = frozenset()
    prompt_hidden: bool = False
    window_modes: Mapping[Kind, WindowMode] = field(default_factory=dict)
    early_exit_logits: frozenset[int] = frozenset()
    attention: frozenset[int] = frozenset()
    text_attention: bool = False
    argmax_only: bool = False

    def union(self, other: Requirements) -> Requirements:
        """Requirements of both."""
        return Requirements(
            hidden=self.hidden | other.hidden | self.early_exit_logits | other.early_exit_logits,
            prompt_hidden=self.prompt_hidden or other.prompt_hidden,
            window_modes={**other.window_modes, **self.window_modes},
            early_exit_logits=self.early_exit_logits | other.early_exit_logits,
            attention=self.attention | other.attention,
            text_attention=self.text_attention or other.text_attention,
        )


@dataclass(frozen=True, kw_only=True)
class DraftWindow:
    """Rest of a Jacobi drafter's chain after a round; see `mmdecode.engine.window`.

    Attributes:
        tokens: Tokens after ``next_token``, ``(B, N)``, left-aligned, -1 padded.
        logits: Unnormalised log-probabilities that each token was sampled from, ``(B, N, V)``.
    """

    tokens: Tensor
    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Decision of an acceptance rule; the loop may cut it short where a row ends.

    Attributes:
        path: Accepted nodes from the root down, ``(B, D)``, -1 padded.
        num_accepted: Nodes on the path, ``(B,)``; excludes ``next_token``.
        next_token: The token after the path, ``(B,)``; the loop sets -1 in inactive rows.
        choices: The target's own token at root and every node, ``(B, N + 1)``, where the rule has
            decided all of them with the target's noise.
        window: Next window of a Jacobi drafter; set by the loop where `Requirements.window_modes`
            asks for it.
    """

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    choices: Tensor | None = None
    window: DraftWindow | None = None

    def tokens(self, proposal: Proposal) -> Tensor:
        """Tokens of the path and the token after it, ``(B, D + 1)``."""
        if not self.path.shape[1]:
            return self.next_token[:, None]
        along = pad(proposal.tokens.gather(1, self.path.clamp_min(0)), (0, 1))
        order = torch.arange(along.shape[1], device=along.device)
        return torch.where(order < self.num_accepted[:, None], along, self.next_token[:, None])

    def of_active(self, active: Tensor) -> Outcome:
        """The same outcome with nothing kept or decided in rows that are not ``active (B,)``."""
        return Outcome(
            path=self.path.masked_fill(~active[:, None], -1) if self.path.shape[1] else self.path,
            num_accepted=torch.where(active, self.num_accepted, 0),
            next_token=torch.where(active, self.next_token, -1),
            choices=self.choices,
            window=self.window,
        )


@dataclass(frozen=True, kw_only=True)
class Block:
    """Tokens that a round committed, after stop rules cut them.

    Attributes:
        path: Accepted nodes from the root down, ``(B, D)``, -1 padded.
        tokens: Tokens of the path and the one that was decided after it, ``(B, D + 1)``.
        num_accepted: Nodes on the path, ``(B,)``; 0 in inactive rows.
        num_drafted: Nodes that were proposed, ``(B,)``.
        count: Tokens that were committed, ``(B,)``: ``num_accepted + 1``, fewer where the row
            ended, 0 in rows that had ended before.
        ended: Rows that ended in this block, ``(B,)``.
        window: Next window of a Jacobi drafter, as in `Outcome`.
    """

    path: Tensor
    tokens: Tensor
    num_accepted: Tensor
    num_drafted: Tensor
    count: Tensor
    ended: Tensor
    window: DraftWindow | None = None

    @classmethod
    def of(
        cls, outcome: Outcome, proposal: Proposal, tokens: Tensor, count: Tensor, ended: Tensor
    ) -> Block:
        """Block of an outcome and the proposal that it judged."""
        return cls(
            path=outcome.path,
            tokens=tokens,
            num_accepted=outcome.num_accepted,
            num_drafted=(proposal.tokens >= 0).sum(1) if proposal.size else outcome.num_accepted,
            count=count,
            ended=ended,
            window=outcome.window,
        )

    @property
    def next_token(self) -> Tensor:
        """The token after the path, ``(B,)``; -1 in inactive rows."""
        return self.tokens.gather(1, self.num_accepted[:, None])[:, 0]

    def counts(self) -> Tensor:
        """Counts for `mmdecode.engine.stats.Stats.scored`, ``(B, 4)``."""
        if self.num_drafted is self.num_accepted:  # there were no nodes
            return self.count[:, None] * _alone(self.count.device)
        took_part = (self.count > 0).long()
        return torch.stack([took_part, self.num_drafted, self.num_accepted, self.count], 1)


@lru_cache(maxsize=8)
def _alone(device: torch.device) -> Tensor:
    """Counts of a row that committed one token, without a draft."""
    return torch.tensor([1, 0, 0, 1], device=device)


class DraftSession(Part):
    """Base of a drafter's state for one call: its caches, and its work in every round.

    The base itself drafts nothing.

    Args:
        call: The call it serves; the loop advances ``call.rows``.

    Attributes:
        call: The same.
        unguided: Why this session does not draft from the guided distribution, where its drafter
            can; ``None``: it does, or there is no guide. Collected in ``Stats.unguided``.
        paths: How its drafter read the prompt; see `mmdecode.engine.stats.Stats`.
    """

    uncaptured: ClassVar = {"paths"}

    call: Call
    unguided: str | None = None
    paths: Mapping[str, int] = MappingProxyType({})

    def __init__(self, call: Call) -> None:
        self.call = call

    def propose(self, budget: int) -> Proposal:
        """Tokens after the root, at most ``budget`` levels deep; may be empty."""
        return Proposal.empty(self.call.batch, self.call.device)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Called after every commit, round 0 included, with the main branch's output."""

    def close(self) -> None:
        """Called once when the call ends, even if it failed."""


class Drafter(Part):
    """Base of everything that proposes tokens: configuration and weights, which outlive calls.

    State of a call belongs to its `DraftSession`, so that one drafter serves several calls at a
    time. State that a drafter keeps between calls is guarded by a lock. A drafter owns its caches,
    and never reads the noise that the acceptance rule uses.

    Attributes:
        kinds: Kinds of proposals it can make; ``call.plan.kind`` is the one to make.
        capabilities: Its `DrafterCapabilities`; a drafter that wraps others sets them in
            ``__init__``.
    """

    kinds: tuple[Kind, ...] = ("deterministic",)
    capabilities: DrafterCapabilities = DrafterCapabilities()

    def needs(self, adapter: Adapter) -> Requirements:
        """Internals needed from the forward passes of the adapter's model."""
        return Requirements()

    def begin(self, call: Call, prefill: BranchOutput) -> DraftSession:
        """Opens a session, after the prompt was read and the first token was decided."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class StateEdit:
    """A change to the hidden states of one branch, the same for every row of every pass.

    Attributes:
        branch: Name of the branch.
        layers: First and last layer to edit as fractions of the depth, both included, as in
            `mmdecode.engine.attention.AttentionEdit`.
        change: ``(layer, states (B, Q, H), earlier) -> states``: edits a layer's output, where
            ``earlier`` are the edited outputs of all layers before it. The edit of a position may
            depend on that position's states only, so that a cached pass equals a full one.
    """

    branch: str
    change: Callable[[int, Tensor, Sequence[Tensor]], Tensor]
    layers: tuple[float, float] = (0.0, 1.0)


class BranchRunner(Part):
    """Base of runners, which score one or more branches together.

    Attributes:
        stage: Runners of a later stage are given the outputs of earlier ones.
        paths: Number of passes by the way that each took; see `mmdecode.engine.stats.Stats`.
        graph_safe: Whether every `score` and `commit` of one shape runs the same operations on the
            same tensors, so that a CUDA graph of them can be replayed.
    """

    stage: int = 1
    paths: Mapping[str, int] = MappingProxyType({})
    graph_safe: bool = False

    def prefill(self, call: Call, earlier: Mapping[str, BranchOutput]) -> dict[str, BranchOutput]:
        """Reads the whole prompt.

        Args:
            call: The call.
            earlier: Outputs of earlier stages, by branch.

        Returns:
            Outputs of this runner's branches, by branch.
        """
        raise NotImplementedError

    def score(
        self, call: Call, proposal: Proposal, earlier: Mapping[str, BranchOutput]
    ) -> dict[str, BranchOutput]:
        """Scores root and nodes, which come after the committed tokens; otherwise as `prefill`."""
        raise NotImplementedError

    def commit(self, path: Tensor, count: Tensor, chain: bool) -> None:
        """Commits root and accepted nodes: ``path (B, D)``, ``count (B,)`` slots, root included."""
        raise NotImplementedError

    def select_rows(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``, in that order; a repeated row is forked."""
        raise NotImplementedError


class Guide(Part):
    """Base of guides, which make the target distribution from the outputs of all branches.

    A guide is a pure function of constants, prefix and outputs. At each node it may read the ids of
    the node's path, and the node's logits and hidden states in every branch. An edit inside a model
    applies to every pass alike, from the prompt on. A guide keeps nothing between rounds, since
    rejected nodes could not be undone. Its only state of a call are the constants that `begin`
    returns, which is why guides have no session as drafters do.

    Attributes:
        branches: Further conditionings of the model, in addition to the main one.
        edits: Edits of attention or hidden states inside branches.
        requires_inputs: Kinds of inputs that the model must accept: ``"image"``, ``"audio"``.
        lookback: Whether it reads the distributions of earlier positions.
        lookahead: Whether it reads distributions after tokens that are not chosen yet. A
            verification round provides neither, so `mmdecode.decoder.Decoder` refuses such a guide.
        on_host: Whether `apply` reads values of tensors in Python, so that no round is captured.
        neutral: Whether the settings leave the main branch's logits unchanged; the guide is then
            not run.
    """

    branches: Sequence[BranchSpec] = ()
    edits: Sequence[AttentionEdit | StateEdit] = ()
    requires_inputs: Sequence[str] = ()
    lookback: bool = False
    lookahead: bool = False
    on_host: bool = False
    neutral: bool

    def needs(self, adapter: Adapter) -> Requirements:
        """Internals needed from the forward passes of the adapter's model."""
        return Requirements()

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> Any:
        """Constants of each row, computed once from the prompt's outputs and passed to `apply`."""

    def apply(
        self, constants: Any, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Unnormalised log-probabilities at root and nodes, ``(B, N + 1, V)``."""
        raise NotImplementedError

    def combine(
        self, constants: Any, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor | None:
        """`apply` without the plausibility cut, for a trace; ``None``: there is no cut."""
        return None

    @property
    def total(self) -> float | None:
        """S, the sum of the branch weights, if it is the same at all positions; else ``None``.

        If S is not 1, branches that agree sharpen or flatten the distribution.
        """
        return None

    def totals(
        self, constants: Any, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> float | Tensor | None:
        """S, for a trace, ``(B, N + 1)`` if positions differ; ``None``: there are no weights."""
        return self.total


def plain_main(guide: Guide | None) -> bool:
    """Whether the main branch is the unguided model: the guide neither edits nor replaces it.

    Otherwise the unguided model's scores would need another forward pass.
    """
    if guide is None or guide.neutral:
        return True
    edited = [edit.branch for edit in guide.edits]
    return "main" not in edited + [spec.replaces_after_prefill for spec in guide.branches]


class AcceptanceRule(Part):
    """Base of acceptance rules, which decide how much of a proposal is kept.

    Attributes:
        guarantee: ``exact``, ``exact for ...`` or ``lossy``, see `mmdecode.registry.Entry`.
        kinds: Kinds of proposals it takes, preferred first.
        modes: Modes it works in: ``greedy``, ``sample`` or both.
        capabilities: Its `RuleCapabilities`.
    """

    guarantee: str
    kinds: tuple[Kind, ...]
    modes: frozenset[str]
    capabilities: RuleCapabilities = RuleCapabilities()

    def __call__(self, proposal: Proposal, target: TargetLogits, call: Call) -> Outcome:
        """The accepted path, and the token after it."""
        raise NotImplementedError
