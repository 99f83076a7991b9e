"""Drafts by the model itself behind the keys and values that the model has already computed.

The prompt is not read a second time: a cache of the draft's own begins as a copy of the main
branch's, whole or in part, and each round's committed tokens are copied into it. So the draft reads
one token behind what the model knows, never a rejected one, and what other drafts proposed is there
too. It costs the memory of the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmdecode.draft.assistant import Assistant
from mmdecode.engine.cache import bucket
from mmdecode.engine.call import Call
from mmdecode.engine.capabilities import DrafterCapabilities
from mmdecode.engine.contracts import BranchOutput, Guide, Outcome
from mmdecode.engine.proposal import Kind, Proposal
from mmdecode.errors import IncompatibleError


class CacheCopyDrafter(Assistant):
    """Drafts ``length`` tokens with the model behind a copy of its cache: a base for others.

    Args:
        length: Tokens per round; 0 is neutral.
        risk: As of `mmdecode.draft.assistant.Assistant`.

    On its own it drafts what the model would write, and everything is accepted.

    Raises:
        IncompatibleError: At the call: the main branch keeps no cache that could be copied, or the
            adapter does not show the inside of the model.
    """

    # where a row stands decides which slots are copied
    capabilities = DrafterCapabilities(graph_safe=False)

    def __init__(self, length: int = 4, risk: float = 1.0) -> None:
        super().__init__(None, length, risk=risk)
        self._main: Any = None
        self._rows = slice(0)
        self._prompt: Any = None  # slots of the main branch's prompt, per row

    def under(self, guide: Guide | None, warp: Callable[[Tensor], Tensor] | None) -> Assistant:
        """This draft with the target's warp; it has one branch, which is not guided."""
        return super().under(None, warp)

    def begin(self, call: Call, prefill: BranchOutput, kind: Kind) -> None:
        """Copies what the model keeps of the prompt."""
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
        self._kind, self._main = kind, call.plan.main
        self._rows = self._main.rows_of("main")
        self._prompt = self._main.cache.start[self._rows].clone()
        self._branch = self._main.fork("main")
        slots, kept = self._chosen(call, prefill)
        width = slots[0].shape[2]
        self._branch.cache.copy(self._main.cache, self._rows, slots, bucket(width))
        self._branch.cache.set_start(torch.full_like(kept, width))
        tokens = self._prompt - self._main.pads[self._rows]
        self._branch.width, self._branch.pads = width, width - kept
        self._branch.left_out = tokens - kept

    def _chosen(self, call: Call, prefill: BranchOutput) -> tuple[Sequence[Tensor], Tensor]:
        """Slots of the prompt by layer, ``(B, heads or 1, n)``, and how many count, from the right.

        Here all of them.
        """
        pads = self._main.pads[self._rows]
        width = self._main.width
        # a narrower prompt that was joined with a wider one lies at the left
        columns = torch.arange(width, device=call.device) - width + self._prompt[:, None]
        slots = columns.clamp_min(0)[:, None]
        return [slots] * len(self._main.cache.layers), self._prompt - pads

    def _lag(self, call: Call) -> int:
        return 1  # all but the root is there

    def observe(
        self, call: Call, proposal: Proposal, scores: BranchOutput, outcome: Outcome
    ) -> None:
        """Copies what was committed; what else was copied is overwritten before it is read."""
        assert self._branch is not None
        self._copy(call, self._branch.cache.start - self._branch.width, proposal.size + 1)
        super().observe(call, proposal, scores, outcome)

    def _copy(self, call: Call, first: Tensor, count: int) -> None:
        """Copies ``count`` generated tokens from ``first (B,)`` on, behind the write position."""
        assert self._branch is not None
        order = torch.arange(count, device=call.device)
        slots = ((self._prompt + first)[:, None] + order).clamp_min(0)
        visible = bucket(self._branch.width + call.rows.cur_len + count)
        layers = self._main.cache.layers
        self._branch.cache.copy(
            self._main.cache, self._rows, [slots[:, None]] * len(layers), visible
        )

    def reorder(self, rows: Tensor) -> None:
        """Keeps the rows ``rows``."""
        super().reorder(rows)
        if self._prompt is not None:
            self._prompt = self._prompt[rows]

    def reset(self) -> None:
        """Forgets the call."""
        super().reset()
        self._main = self._prompt = None
