"""Hydra: drafts a tree with heads that read the last hidden state and the tokens drafted so far.

The heads are in `mmdecode.models.hydra`. `mmdecode.draft.growing` grows the tree level by level; a
head predicts different tokens after different siblings. The heads have no cache, and a round costs
a few matrix products.

Source: Ankner et al. 2024, arXiv:2402.05109, section 3. Differs from the reference: batches of any
size, and the shape of the tree follows the heads' probabilities instead of being fixed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mmdecode.draft.features import refuse_encoder, refuse_foreign
from mmdecode.draft.growing import Shape, grown_proposal
from mmdecode.draft.shipped import shipped
from mmdecode.draft.target import along_path, followed, gathered
from mmdecode.engine.adapter import Adapter
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Block, BranchOutput, Drafter, DraftSession, Requirements
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import OptionError
from mmdecode.models.hydra import HydraHeads
from mmdecode.models.placed import Placed


class Hydra(Drafter):
    """Drafts trees with Hydra heads.

    Args:
        heads: The trained heads; head k proposes the k-th token after the last committed one.
        depth: Number of tokens on the longest path; ``None``: the number of heads. 0 drafts
            nothing.
        top_k: Number of children per expanded node, and of expanded nodes per level; 1: a chain.
        nodes: Number of nodes that are proposed.
        min_expected_gain: Minimum gain of a level, see `mmdecode.draft.features.FeatureDraft`.

    Proposes deterministic or coupled trees, as `mmdecode.draft.features.FeatureDraft` does.
    Lossless under every exact acceptance rule, whatever the heads predict. With a guide that has
    several branches, the heads run on the states of each; see `mmdecode.draft.target`.

    Raises:
        OptionError: An option is out of range.
        IncompatibleError: When decoding begins: the heads were trained for another model.
    """

    summary = "heads on the model's last hidden state that also read the tokens drafted before"
    source = "Hydra, Ankner et al. 2024"
    kinds: tuple[Kind, ...] = ("deterministic", "coupled")
    capabilities = DrafterCapabilities(graph_safe=True, follows_target=True, argmax_only=True)

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
        """Loads heads from a folder, a Hub id or ``zoo:NAME``, also in the published layout."""
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
        """Builds the drafter from a string's options; ``length=n`` drafts a chain of n tokens.

        Without ``path``, loads the heads that this library ships for the target ``model_id``.
        """
        if length is not None:
            depth, top_k = length, 1
        path = path or shipped([HydraHeads.kind], model_id)
        return cls.from_pretrained(path, depth, top_k, nodes, min_expected_gain)

    def needs(self, adapter: Adapter) -> Requirements:
        """Returns what the heads need: the target's hidden states after the final norm.

        Raises:
            IncompatibleError: The model is an encoder-decoder.
        """
        refuse_encoder(self.heads, adapter)
        return Requirements(hidden=frozenset({"last"}))

    def begin(self, call: Call, prefill: BranchOutput) -> HydraSession:
        """Opens a session, with the heads on the device of the target's states."""
        return HydraSession(self, call, prefill)


class HydraSession(DraftSession):
    """Session of a `Hydra` drafter: keeps the states that the last committed tokens came from.

    Args:
        draft: The drafter.
        call: The generation call.
        prefill: Outputs of the prompt's pass.

    Raises:
        IncompatibleError: The heads were trained for another model.
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
        """Grows a tree of the most likely continuations of the last committed token."""
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
