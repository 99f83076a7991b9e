"""Hydra: heads on the model's last state draft a tree, each reading what was drafted before it.

The heads are in `mmdecode.models.hydra`. A tree is grown level by level as in
`mmdecode.draft.growing`, so what a head says of one node is not what it says of its sibling; there
is no cache, and a round costs a few matrices.

Source: Ankner et al. 2024, arXiv:2402.05109, section 3. Differs from the reference: any batch, and
the tree follows the heads' probabilities, where the reference has a fixed one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mmdecode.draft.features import placed, refuse_foreign, shipped
from mmdecode.draft.growing import Shape, gathered, grown_proposal
from mmdecode.draft.target import DraftTarget
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Drafter, Outcome, Requirements
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import OptionError
from mmdecode.models.hydra import HydraHeads


class Hydra(Drafter):
    """Drafts with Hydra heads.

    Args:
        heads: The model; head k proposes the k-th token after the root.
        depth: Tokens on the longest path; ``None``: as many as heads. 0 is neutral.
        top_k: Children of a node, and nodes of a level that go on; 1 drafts a chain.
        nodes: Nodes that are kept.
        gain: As of `mmdecode.draft.features.FeatureDraft`.

    Proposes what that does: deterministic trees, or coupled ones. Lossless under every exact rule,
    whatever the heads say.

    Raises:
        OptionError: An option is out of range.
        IncompatibleError: At the call: the heads were made for another model.
    """

    summary = "heads on the model's own last state that read what is drafted before them"
    source = "Hydra, Ankner et al. 2024"
    kinds: tuple[Kind, ...] = ("deterministic", "coupled")
    needs = Requirements(hidden=frozenset({"last"}))
    capabilities = DrafterCapabilities(graph_safe=True)

    def __init__(
        self,
        heads: HydraHeads,
        depth: int | None = None,
        top_k: int = 8,
        nodes: int = 31,
        gain: float | None = None,
    ) -> None:
        depth = len(heads) if depth is None else depth
        if not 0 <= depth <= len(heads) or top_k < 1 or nodes < 1:
            raise OptionError(
                f"depth={depth}, top_k={top_k}, nodes={nodes}; expected depth from 0 to the "
                f"{len(heads)} heads, top_k >= 1 and nodes >= 1"
            )
        self._shape = Shape(depth, top_k, nodes, gain)
        self.heads, self.depth, self.top_k, self.nodes = heads.eval(), depth, top_k, nodes
        self._running = self.heads
        self._kind: Kind = "deterministic"
        self._state: Tensor | None = None  # that decided the root, (B, 1, H)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        depth: int | None = None,
        top_k: int = 8,
        nodes: int = 31,
        gain: float | None = None,
    ) -> Hydra:
        """Loads heads in our layout or the published one: a folder, a Hub id or ``zoo:NAME``."""
        return cls(HydraHeads.from_pretrained(name), depth, top_k, nodes, gain)

    @classmethod
    def from_options(
        cls,
        path: str | None = None,
        model_id: str | None = None,
        length: int | None = None,
        depth: int | None = None,
        top_k: int = 8,
        nodes: int = 31,
        gain: float | None = None,
    ) -> Hydra:
        """From a string; ``length`` drafts a chain of so many tokens instead of a tree.

        Without ``path``, the heads that are shipped for the model at hand.
        """
        if length is not None:
            depth, top_k = length, 1
        path = path or shipped([HydraHeads.kind], model_id)
        return cls.from_pretrained(path, depth, top_k, nodes, gain)

    def begin(self, call: Call, prefill: BranchOutput, kind: Kind) -> None:
        """Moves the heads to the states."""
        refuse_foreign(self.heads, call.plan.adapter, prefill)
        self._kind = kind
        self._running = placed(self.heads, self._running, prefill.hidden["last"])

    def propose(self, call: Call, budget: int) -> Proposal:
        """The likeliest paths below the last token."""
        levels = min(self.depth, budget)
        if levels <= 0:
            return Proposal.empty(call.batch, call.device)
        assert self._state is not None, "observe was not called"
        heads, adapter = self._running, call.plan.adapter
        embeds = heads.embed(call.last(1), adapter)
        read = torch.cat([self._state, embeds.to(self._state.dtype)], -1)

        def step(level: int, tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal read
            drafted = heads.embed(tokens, adapter).to(read.dtype)
            read = torch.cat([gathered(read, above), drafted], -1)
            return heads.logits(level + 1, read, adapter)

        root = heads.logits(0, read, adapter)
        shape = replace(self._shape, levels=levels)
        return grown_proposal(call, self._kind, DraftTarget(), shape, root, step)

    def observe(
        self, call: Call, proposal: Proposal, scores: BranchOutput, outcome: Outcome
    ) -> None:
        """Keeps the state at the end of the accepted path."""
        hidden = scores.hidden["last"]
        if not proposal.is_chain:  # along the path, root first
            hidden = gathered(hidden, torch.nn.functional.pad(outcome.path + 1, (1, 0)))
        self._state = gathered(hidden, outcome.num_accepted[:, None])

    def reorder(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``."""
        if self._state is not None:
            self._state = self._state[rows]

    def reset(self) -> None:
        """Forgets the call."""
        self._state = None
