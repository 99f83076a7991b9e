"""FLASH: drafts several tokens per pass, and reads a few latent vectors instead of each image.

A pass predicts K states, one for each of the next K levels of the draft tree. The first pass reads
the last committed tokens; each further pass reads the nodes of the K levels before, each with the
state that was predicted for its level. Within K levels, all nodes of a level therefore get children
from the same distribution. The model is in `mmdecode.models.flash`.

Source: Wang et al. 2025, arXiv:2505.12728. There is no released drafting code. Differs from the
paper: a pass reads all tokens that were drafted since the previous pass, not only the last one, so
the drafter's cache has an entry for every token; the passes are wider.
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
    """Drafts with a FLASH model; the options are those of `FeatureDraft`."""

    summary = "a layer that drafts several tokens a pass and reads latents of each image"
    source = "FLASH, Wang et al. 2025"
    modules: ClassVar[Mapping[str, type[FeatureDrafter]]] = {FlashModel.kind: FlashModel}

    def begin(self, call: Call, prefill: BranchOutput) -> FlashSession:
        """Opens a session, in which the drafter reads the prompt."""
        return FlashSession(self, call, prefill)


class FlashSession(FeatureSession):
    """Session of a `Flash` drafter: a pass reads all nodes drafted since the previous pass."""

    def reader(self, levels: int) -> tuple[Tensor, Callable[[int, Tensor, Tensor], Tensor]]:
        """Same as in `FeatureSession`, but with one pass per ``drafter.steps`` levels."""
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
