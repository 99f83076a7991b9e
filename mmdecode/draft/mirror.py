"""Base of drafters that run the target model on a copy of its own key-value cache.

The drafter does not run on the prompt: its cache starts as a copy of the target's cache (or of a
part of it), and after each round the keys and values of the committed tokens are copied from there.
So the drafter's cache contains all committed tokens except the last, also if another drafter
proposed them, and no rejected tokens. The cost is the memory of the copy.
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
    """Base class of drafters that run the target model on a copy of its own cache.

    Args:
        length: Drafted tokens per round; 0 drafts nothing.
        max_rejection_probability: See `mmdecode.draft.assistant.Assistant`.

    This class itself runs the whole model on the whole cache, so every drafted token is accepted.
    Subclasses skip layers or cache entries to draft faster.

    Raises:
        IncompatibleError: When decoding begins: the target has no cache that can be copied, or its
            adapter gives no access to the model's layers.
    """

    capabilities = DrafterCapabilities(graph_safe=True, follows_target=True)

    def __init__(self, length: int = 4, max_rejection_probability: float = 1.0) -> None:
        super().__init__(None, length, max_rejection_probability=max_rejection_probability)

    def begin(self, call: Call, prefill: BranchOutput) -> CopySession:
        """Opens a session with a copy of the prompt's keys and values."""
        self._refuse(call)
        return CopySession(call, prefill, self)

    def _refuse(self, call: Call) -> None:
        """Raises an error for calls without a cache that can be copied."""
        if call.plan.main is None:
            raise IncompatibleError.between(
                f"draft {type(self).__name__}",
                "the guide",
                "the guide runs the main branch itself, so its keys and values cannot be copied",
                "use a drafter with a cache of its own: layer_skip, amateur or assistant",
            )
        if not call.plan.adapter.shows_inside:
            raise IncompatibleError.between(
                f"draft {type(self).__name__}",
                call.plan.adapter.name,
                f"{type(call.plan.adapter).__name__} does not show the inside of its model",
                "use layer_skip or assistant, or a decoder-only or vision-language model",
            )


class CopySession(AssistantSession):
    """Session of a `CacheCopyDrafter`.

    Args:
        call: The generation call.
        prefill: The target's outputs of the prompt's pass.
        drafter: The drafter, whose options are used.

    Attributes:
        main: Runner of the target's main branch, whose cache is copied.
        rows: Indices of the main branch's rows in that cache.
        prompt: Number of cache slots of the prompt in each row, ``(B,)``.
    """

    lag = 1  # all committed tokens but the root are in the cache

    def __init__(self, call: Call, prefill: BranchOutput, drafter: CacheCopyDrafter) -> None:
        main = call.plan.main
        assert main is not None, "refused by the drafter"
        branch = main.fork("main", call.reserved(main.width))
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
        """Chooses the cache slots of the prompt to copy; here all of them.

        Returns:
            For each layer, indices of slots ``(B, heads or 1, n)``; and the number of valid indices
            in each row, ``(B,)``: the last ones of the n, the others are padding.
        """
        width = self.main.width
        # a narrower prompt that was joined with a wider one lies at the left
        columns = torch.arange(width, device=self.call.device) - width + self.prompt[:, None]
        slots = columns.clamp_min(0)[:, None]
        return [slots] * len(self.main.cache.layers), self.prompt - self.main.pads[self.rows]

    def observe(self, proposal: Proposal, output: BranchOutput, block: Block) -> None:
        """Copies the round's entries; rejected ones are overwritten before they are attended to."""
        self.copy(self.branch.cache.start - self.branch.width, proposal.size + 1)
        super().observe(proposal, output, block)

    def copy(self, first: Tensor, count: int) -> None:
        """Copies keys and values of ``count`` generated tokens, from index ``first (B,)`` on."""
        order = torch.arange(count, device=self.call.device)
        slots = ((self.prompt + first)[:, None] + order).clamp_min(0)
        visible = bucket(self.branch.width + self.call.rows.cur_len + count)
        layers = [slots[:, None]] * len(self.main.cache.layers)
        self.branch.cache.copy(self.main.cache, self.rows, layers, visible)
