"""Drafting by the model itself on a copy of the keys and values that it has already computed.

The prompt is not read a second time: the drafter's cache begins as a copy of the main branch's,
whole or in part, and each round's committed tokens are copied into it. So it holds all committed
tokens but the last, whichever drafter proposed them, and never a rejected one. It costs the memory
of the copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmdecode.draft.assistant import Assistant, AssistantSession
from mmdecode.draft.target import warp_alone
from mmdecode.engine.cache import bucket
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import Block, BranchOutput
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import IncompatibleError


class CacheCopyDrafter(Assistant):
    """Drafts ``length`` tokens with the model on a copy of its cache: a base for others.

    Args:
        length: Tokens per round; 0 is neutral.
        max_rejection_probability: See `mmdecode.draft.assistant.Assistant`.

    On its own it drafts the model's own tokens, and everything is accepted.

    Raises:
        IncompatibleError: At the call: the main branch keeps no cache that could be copied, or the
            adapter does not show the inside of the model.
    """

    # not graph-safe: the length of each row decides which slots are copied
    capabilities = DrafterCapabilities(graph_safe=False, follows_target=True)

    def __init__(self, length: int = 4, max_rejection_probability: float = 1.0) -> None:
        super().__init__(None, length, max_rejection_probability=max_rejection_probability)

    def begin(self, call: Call, prefill: BranchOutput) -> CopySession:
        """Copies what the model keeps of the prompt."""
        self._refuse(call)
        return CopySession(call, prefill, self)

    def _refuse(self, call: Call) -> None:
        """Refuses a call without a cache to copy."""
        if call.plan.main is None:
            raise IncompatibleError.between(
                f"draft {type(self).__name__}",
                "the guide",
                "the guide scores the main branch itself, and shows no keys and values",
                "use a draft that has a cache of its own: layer_skip, amateur or assistant",
            )
        if not call.plan.adapter.shows_inside:
            raise IncompatibleError.between(
                f"draft {type(self).__name__}",
                call.plan.adapter.name,
                f"{type(call.plan.adapter).__name__} does not show the inside of its model",
                "use layer_skip or assistant, or a decoder-only or vision-language model",
            )


class CopySession(AssistantSession):
    """One call of a `CacheCopyDrafter`.

    Args:
        call: The call.
        prefill: The main branch's output at the prompt.
        drafter: The drafter, for its options.

    Attributes:
        main: Runner of the main branch, whose cache is copied.
        rows: Rows of the main branch in that cache.
        prompt: Slots of its prompt, ``(B,)``.
    """

    lag = 1  # all committed tokens but the root are in the cache

    def __init__(self, call: Call, prefill: BranchOutput, drafter: CacheCopyDrafter) -> None:
        main = call.plan.main
        assert main is not None, "refused by the drafter"
        branch = main.fork("main")
        super().__init__(
            call, branch, warp_alone(call), drafter.length, drafter.max_rejection_probability
        )
        self.main, self.rows = main, main.rows_of("main")
        self.prompt = main.cache.start[self.rows].clone()
        slots, kept = self.chosen(prefill)
        width = slots[0].shape[2]
        branch.cache.copy(main.cache, self.rows, slots, bucket(width))
        branch.cache.set_start(torch.full_like(kept, width))
        tokens = self.prompt - main.pads[self.rows]
        branch.width, branch.pads = width, width - kept
        branch.left_out = tokens - kept

    def chosen(self, prefill: BranchOutput) -> tuple[Sequence[Tensor], Tensor]:
        """Slots of the prompt by layer, ``(B, heads or 1, n)``, and how many count, from the right.

        Here all of them.
        """
        width = self.main.width
        # a narrower prompt that was joined with a wider one lies at the left
        columns = torch.arange(width, device=self.call.device) - width + self.prompt[:, None]
        slots = columns.clamp_min(0)[:, None]
        return [slots] * len(self.main.cache.layers), self.prompt - self.main.pads[self.rows]

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Copies what was committed; what else was copied is overwritten before it is read."""
        self.copy(self.branch.cache.start - self.branch.width, proposal.size + 1)
        super().observe(proposal, output, block)

    def copy(self, first: Tensor, count: int) -> None:
        """Copies ``count`` generated tokens from ``first (B,)`` on, after the write position."""
        order = torch.arange(count, device=self.call.device)
        slots = ((self.prompt + first)[:, None] + order).clamp_min(0)
        visible = bucket(self.branch.width + self.call.rows.cur_len + count)
        layers = [slots[:, None]] * len(self.main.cache.layers)
        self.branch.cache.copy(self.main.cache, self.rows, layers, visible)
