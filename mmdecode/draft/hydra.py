"""Hydra: heads on the model's last state draft a tree, each reading what was drafted before it.

The heads are in `mmdecode.models.hydra`. A tree is grown level by level as in
`mmdecode.draft.growing`, so a head predicts different tokens after different siblings; there is no
cache, and a round costs a few matrices.

Source: Ankner et al. 2024, arXiv:2402.05109, section 3. Differs from the reference: any batch, and
the tree follows the heads' probabilities, where the reference has a fixed one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mmdecode.draft.features import refuse_encoder, refuse_foreign, shipped
from mmdecode.draft.growing import Shape, grown_proposal
from mmdecode.draft.placed import Placed
from mmdecode.draft.target import along_path, followed, gathered
from mmdecode.engine.adapter import Adapter
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Block, BranchOutput, Drafter, DraftSession, Requirements
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
        min_expected_gain: See `mmdecode.draft.features.FeatureDraft`.

    Proposes deterministic or coupled trees, as `mmdecode.draft.features.FeatureDraft` does.
    Lossless under every exact rule, whatever the heads predict. If a guide has other branches, the
    heads run on the states of each, see `mmdecode.draft.target`.

    Raises:
        OptionError: An option is out of range.
        IncompatibleError: At the call: the heads were made for another model.
    """

    summary = "heads on the model's last hidden state that also read the tokens drafted before"
    source = "Hydra, Ankner et al. 2024"
    kinds: tuple[Kind, ...] = ("deterministic", "coupled")
    capabilities = DrafterCapabilities(graph_safe=True, follows_target=True)

    def __init__(
        self,
        heads: HydraHeads,
        depth: int | None = None,
        top_k: int = 8,
        nodes: int = 31,
        min_expected_gain: float | None = None,
    ) -> None:
        depth = len(heads) if depth is None else depth
        if not 0 <= depth <= len(heads) or top_k < 1 or nodes < 1:
            raise OptionError(
                f"depth={depth}, top_k={top_k}, nodes={nodes}; expected depth from 0 to the "
                f"{len(heads)} heads, top_k >= 1 and nodes >= 1"
            )
        self.shape = Shape(depth, top_k, nodes, min_expected_gain)
        self.heads, self.depth, self.top_k, self.nodes = heads.eval(), depth, top_k, nodes
        self.placed = Placed(self.heads)

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        depth: int | None = None,
        top_k: int = 8,
        nodes: int = 31,
        min_expected_gain: float | None = None,
    ) -> Hydra:
        """Loads heads in our layout or the published one: a folder, a Hub id or ``zoo:NAME``."""
        return cls(HydraHeads.from_pretrained(name), depth, top_k, nodes, min_expected_gain)

    @classmethod
    def from_options(
        cls,
        path: str | None = None,
        model_id: str | None = None,
        length: int | None = None,
        depth: int | None = None,
        top_k: int = 8,
        nodes: int = 31,
        min_expected_gain: float | None = None,
    ) -> Hydra:
        """Builds it from a string; ``length`` drafts a chain of so many tokens instead of a tree.

        Without ``path``, the heads that are shipped for the model at hand.
        """
        if length is not None:
            depth, top_k = length, 1
        path = path or shipped([HydraHeads.kind], model_id)
        return cls.from_pretrained(path, depth, top_k, nodes, min_expected_gain)

    def needs(self, adapter: Adapter) -> Requirements:
        """The model's last states.

        Raises:
            IncompatibleError: The model is an encoder-decoder.
        """
        refuse_encoder(self.heads, adapter)
        return Requirements(hidden=frozenset({"last"}))

    def begin(self, call: Call, prefill: BranchOutput) -> HydraSession:
        """Opens a session on the device of the states."""
        return HydraSession(self, call, prefill)


class HydraSession(DraftSession):
    """A call of a `Hydra`: the states that decided the last tokens.

    Args:
        draft: The drafter.
        call: The call.
        prefill: Outputs after the prompt.

    Raises:
        IncompatibleError: The heads were made for another model.
    """

    def __init__(self, draft: Hydra, call: Call, prefill: BranchOutput) -> None:
        super().__init__(call)
        refuse_foreign(draft.heads, call.plan.adapter, prefill)
        self.draft = draft
        self.heads = draft.placed.like(prefill.hidden["last"])
        self.target = followed(call)
        self.unguided = self.target.unguided
        self.state: Tensor | None = None  # decided the root, in each branch, (M * B, 1, H)

    def propose(self, budget: int) -> Proposal:
        """The most likely paths after the last token."""
        levels = min(self.draft.depth, budget)
        if levels <= 0:
            return super().propose(budget)
        assert self.state is not None, "observe was not called"
        heads, adapter, each = self.heads, self.call.plan.adapter, self.target.each
        embeds = each(heads.embed(self.call.last(1), adapter))
        read = torch.cat([self.state, embeds.to(self.state.dtype)], -1)

        def step(level: int, tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal read
            drafted = each(heads.embed(tokens, adapter)).to(read.dtype)
            read = torch.cat([gathered(read, each(above)), drafted], -1)
            return heads.logits(level + 1, read, adapter)

        root = heads.logits(0, read, adapter)
        return grown_proposal(self.target, replace(self.draft.shape, levels=levels), root, step)

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Keeps the states at the end of the accepted path."""
        each = self.target.each
        states = along_path(self.target.hidden(output, "last"), proposal, each(block.path))
        self.state = gathered(states, each(block.num_accepted)[:, None])
