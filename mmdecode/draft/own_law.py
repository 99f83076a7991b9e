"""The law a draft draws from, where it follows its target's: guided, laid out and warped alike.

A draft with states for each branch of a guide makes logits of each, and the guide makes one law of
them, as it does with the target's. Image mode hands its guide and sampling to every draft that has
a method ``under``; what a draft says otherwise is no less exact, but further from the law.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, inf

from mmdecode.engine.adapter import MAIN, BranchSpec
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal


@dataclass
class DraftTarget:
    """From the logits of a draft's branches to its law.

    Attributes:
        guide: What the target is guided by, if it is; it must not look inside the model.
        warp: What is made of logits before a token is drawn.
    """

    guide: Guide | None = None
    warp: Callable[[Tensor], Tensor] | None = None
    _constants: Any = field(default=None, init=False, repr=False)

    @property
    def specs(self) -> list[BranchSpec]:
        """The branches that a draft needs states of, in row order."""
        return [MAIN, *(self.guide.branches if self.guide else ())]

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Lets the guide see what was said of the prompt."""
        if self.guide is not None:
            self._constants = self.guide.begin(call, prefill)

    def __call__(
        self, call: Call, logits: Tensor, position: Tensor, own: Tensor | None = None
    ) -> Tensor:
        """Unnormalised log-law ``(B, k, D)`` of k nodes at one ``position (B, 1)``.

        Args:
            call: The call.
            logits: Of all branches, ``(M * B, k, D)``.
            position: Of the token that the law is about.
            own: The target's id of each of the draft's, ``(D,)``; ``None``: the same.
        """
        logits = logits.float()
        if self.guide is not None:
            parts = zip(self.specs, logits.split(call.batch), strict=True)
            scores = {spec.name: BranchOutput(logits=part) for spec, part in parts}
            ahead = call.at(position[:, 0])
            nothing = Proposal.empty(call.batch, call.device)
            logits = self.guide.apply(self._constants, ahead, nothing, scores)
        layout = getattr(call.plan.adapter, "layout", None)
        vocab = logits.shape[-1] if own is None else call.plan.adapter.vocab
        if layout is not None and layout.binds(vocab):
            allowed = layout.allowed(position, vocab)
            allowed = allowed if own is None else allowed[..., own]
            logits = logits.masked_fill(~allowed, -inf)
        return logits if self.warp is None else self.warp(logits)


def noise_of(
    kind: Kind, call: Call, position: Tensor, vocab: int, own: Tensor | None = None
) -> Tensor | None:
    """Gumbel noise ``(B, Q, D)`` whose sum with log q chooses tokens at ``position (B, Q)``.

    That of the law itself for coupled tokens, the draft's own for drawn ones, other in each round;
    ``None``: the likeliest are taken. ``vocab`` is the target's, ``own`` as of `DraftTarget`.
    """
    if kind == "deterministic":
        return None
    role, trial = (Role.TARGET, None) if kind == "coupled" else (Role.DRAFT, call.rows.rounds)
    gumbel = call.request.noise.gumbel(position, role, vocab, trial=trial)
    return gumbel if own is None else gumbel[..., own]
