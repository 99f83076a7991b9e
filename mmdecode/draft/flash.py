"""FLASH: a drafter that reads latents instead of images, and drafts several tokens a pass.

The first K levels of a tree come from the states at the last committed row. Then one pass reads the
nodes of all K levels, each with the state that was predicted for it, and so on. Within K levels a
node's children do not depend on the node, only the probability of its path does. The model is in
`mmdecode.models.flash`.

Source: Wang et al. 2025, arXiv:2505.12728. Differs from it: there is no released routine for
drafting; a pass reads all tokens drafted since the last one and not the last alone, so that the
drafter's cache has no holes, at the price of a wider pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.draft.features import FeatureDraft, FeatureSession
from mmdecode.draft.growing import extended, tree_mask
from mmdecode.draft.target import gathered
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput
from mmdecode.models.feature_drafter import FeatureDrafter, Rows
from mmdecode.models.flash import FlashModel


class Flash(FeatureDraft):
    """Drafts with a FLASH model; see `FeatureDraft` for the options."""

    summary = "a layer that drafts several tokens a pass and reads latents of each image"
    source = "FLASH, Wang et al. 2025"
    modules: ClassVar[Mapping[str, type[FeatureDrafter]]] = {FlashModel.kind: FlashModel}

    def begin(self, call: Call, prefill: BranchOutput) -> FlashSession:
        """Reads the prompt."""
        return FlashSession(self, call, prefill)


class FlashSession(FeatureSession):
    """A call of a `Flash`: a pass reads the nodes of all levels since the last one."""

    def reader(self, levels: int) -> tuple[Tensor, Callable[[int, Tensor, Tensor], Tensor]]:
        """Same as in `FeatureSession`, but only every ``drafter.steps`` levels take a pass."""
        assert self.state is not None, "observe was not called"
        drafter, adapter = self.drafter, self.call.plan.adapter
        assert isinstance(drafter, FlashModel)
        width, steps = drafter.width, drafter.steps
        made, attended = self.state, None  # states of the frontier, (B, k, steps * H)
        unread: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # levels since the last pass
        logits = drafter.logits(made[..., :width], adapter)
        visible = self.slots(levels, logits.shape[-1])

        def step(level: int, tokens: Tensor, above: Tensor) -> Tensor:
            nonlocal made, attended
            tokens, above = self.target.each(tokens), self.target.each(above)
            top_k, index = tokens.shape[1], level % steps
            made, attended = gathered(made, above), extended(attended, above)
            states = made.unflatten(-1, (steps, width))
            slots = (self.cache.start + level)[:, None].expand(-1, top_k)
            unread.append((tokens, states[:, :, index], slots, attended))
            if index < steps - 1:
                return drafter.logits(states[:, :, index + 1], adapter)
            parts = list(zip(*unread, strict=True))
            unread.clear()
            rows = Rows(
                embeds=drafter.embed(torch.cat(parts[0], 1), adapter),
                features=torch.cat(parts[1], 1),
                positions=self.positions(torch.cat(parts[2], 1)),
            )
            seen = torch.cat(
                [pad(own, (0, attended.shape[2] - own.shape[2])) for own in parts[3]], 1
            )
            mask = tree_mask(self.cache.start, self._pads, seen, visible, rows.embeds.dtype)
            first = (level - index) * top_k
            made = self._run(rows, mask, visible, offset=first)[:, -top_k:]
            return drafter.logits(made[..., :width], adapter)

        return logits, step
