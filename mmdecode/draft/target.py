"""Drafting from the target distribution: a draft's logits are guided and warped as the model's are.

A drafter that runs on each branch of a guide has logits for each, and the guide combines them as it
combines the model's. These drafts are not more exact than others, but closer to the distribution
that verifies them, so that more tokens are accepted.

The guide and warpers to follow are `mmdecode.engine.call.Plan.draft_target`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, inf
from torch.nn.functional import pad

from mmdecode.engine.adapter import MAIN, Adapter, BranchSpec, Prompt
from mmdecode.engine.call import Call, DraftTarget
from mmdecode.engine.contracts import BranchOutput, Guide, Requirements
from mmdecode.engine.noise import Role
from mmdecode.engine.proposal import Kind, Proposal


def why_unguided(guide: Guide | None, adapter: Adapter) -> str | None:
    """Why a guide cannot be applied to a draft's logits, one set for each of its branches.

    ``None``: it can, or there is none. It cannot where a branch is run by another model or by a
    runner of the guide's own, takes over from another after the prompt, or where the guide reads
    more than logits.
    """
    if guide is None:
        return None
    name = type(guide).__name__
    for spec in guide.branches:
        if spec.build is not None or spec.model is not None or spec.replaces_after_prefill:
            return f"guide {name} has branches of its own, which no draft runs: {spec.name!r}"
    if guide.needs(adapter) != Requirements():
        return f"guide {name} reads more than logits"
    return None


def branches_of(target: DraftTarget) -> list[BranchSpec]:
    """Branches that a draft needs logits of to follow a target, the main one first."""
    return [MAIN, *(target.guide.branches if target.guide else ())]


def followed(call: Call) -> TargetDistribution:
    """The distribution for a drafter on the model's own states, which all branches have."""
    target = call.plan.draft_target
    reason = why_unguided(target.guide, call.plan.adapter)
    return TargetDistribution(call, target, reason)


def warp_alone(call: Call) -> TargetDistribution:
    """The distribution for a drafter with one branch: warped, not guided."""
    target = call.plan.draft_target
    reason = None if target.guide is None else "the drafter has one branch"
    return TargetDistribution(call, target, reason)


def outputs_by_name(main: BranchOutput) -> dict[str, BranchOutput]:
    """The outputs of all branches by name, from the main branch's output."""
    return {MAIN.name: main, **main.other_branches}


def branch_prompt(call: Call, spec: BranchSpec) -> Prompt:
    """The prompt that a branch has read; see `BranchSpec.replaces_after_prefill`.

    If another runner than the main branch's has read it, as one of a later stage, it is made again,
    and its images or audio are encoded again.
    """
    main = call.plan.main
    names = [] if main is None else [one.name for one in main.specs]
    if main is not None and spec.name in names:
        index = names.index(spec.name)
        if main.prompts:
            return main.prompts[index]
        spec = main.specs[index]
    return call.plan.adapter.prompt(call, spec)


class TargetDistribution:
    """Turns the logits of a session's branches into the distribution to draft from.

    Args:
        call: The call.
        target: Guide and warpers to apply.
        unguided: Why the guide is not applied; ``None``: it is, or there is none.

    Attributes:
        specs: Branches whose logits are needed, in row order.
        unguided: The same, for `mmdecode.engine.contracts.DraftSession.unguided`.
    """

    def __init__(
        self,
        call: Call,
        target: DraftTarget,
        unguided: str | None = None,
    ) -> None:
        if unguided is not None:
            target = replace(target, guide=None)
        self.call, self.target, self.specs = call, target, branches_of(target)
        self.unguided = unguided

    def each(self, values: Tensor) -> Tensor:
        """Values of the rows ``(B, ...)``, repeated for every branch, ``(M * B, ...)``."""
        branches = len(self.specs)
        return values if branches == 1 else values.repeat(branches, *[1] * (values.ndim - 1))

    def hidden(self, output: BranchOutput, *levels: int | str) -> Tensor:
        """States of all branches, several levels concatenated, ``(M * B, N + 1, levels * H)``."""
        outputs = outputs_by_name(output)
        of_branches = [
            _joined([outputs[spec.name].hidden[level] for level in levels], -1)
            for spec in self.specs
        ]
        return _joined(of_branches, 0)

    @property
    def plain(self) -> bool:
        """Whether logits are left as they are."""
        bare = self.target.guide is None and self.target.warp is None
        return bare and self.call.plan.adapter.layout is None

    def __call__(self, logits: Tensor, position: Tensor, own: Tensor | None = None) -> Tensor:
        """Unnormalised log-probabilities ``(B, k, D)`` of k nodes at one ``position (B, 1)``.

        Args:
            logits: Logits of all branches, ``(M * B, k, D)``.
            position: Index of the token they are about, counted from the first generated one.
            own: The target's id of each of the drafter's tokens, ``(D,)``; ``None``: they are the
                same.
        """
        call, guide, logits = self.call, self.target.guide, logits.float()
        if guide is not None:
            parts = zip(self.specs, logits.split(call.batch), strict=True)
            scores = {spec.name: BranchOutput(logits=part) for spec, part in parts}
            nothing = Proposal.empty(call.batch, call.device)
            logits = guide.apply(self.target.constants, call.at(position[:, 0]), nothing, scores)
        logits = _laid_out(call, logits, position, own)
        return logits if self.target.warp is None else self.target.warp(logits)


def gathered(states: Tensor, rows: Tensor) -> Tensor:
    """The rows ``(B, n)`` of states ``(B, Q, H)``."""
    return states.gather(1, rows[..., None].expand(-1, -1, states.shape[-1]))


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """The parts in one tensor; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def along_path(states: Tensor, proposal: Proposal, path: Tensor) -> Tensor:
    """States of root and nodes ``(B, N + 1, H)``; for a tree, of root and accepted path.

    Args:
        states: In the order of the nodes.
        proposal: The nodes.
        path: Accepted nodes, ``(B, D)``, -1 padded.
    """
    if proposal.is_chain:
        return states
    return gathered(states, pad(path + 1, (1, 0)))  # root first


def _laid_out(call: Call, logits: Tensor, position: Tensor, own: Tensor | None) -> Tensor:
    """Logits ``(B, k, D)`` with -inf at tokens that the image's layout does not allow there."""
    layout = call.plan.adapter.layout if call.plan.adapter is not None else None
    vocab = logits.shape[-1] if own is None else call.plan.adapter.vocab
    if layout is None or not layout.binds(vocab):
        return logits
    allowed = layout.allowed(position, vocab)
    return logits.masked_fill(~(allowed if own is None else allowed[..., own]), -inf)


def noise_of(
    kind: Kind, call: Call, position: Tensor, vocab: int, own: Tensor | None = None
) -> Tensor | None:
    """Gumbel noise ``(B, Q, D)``; its sum with log q chooses the tokens at ``position (B, Q)``.

    For coupled tokens it is the target's noise; for sampled ones the drafter's own, new in each
    round; ``None``: the most likely tokens are chosen. ``vocab`` is the target's, ``own`` as in
    `TargetDistribution`.
    """
    if kind == "deterministic":
        return None
    role, trial = (Role.TARGET, None) if kind == "coupled" else (Role.DRAFT, call.rows.rounds)
    gumbel = call.request.noise.gumbel(position, role, vocab, trial=trial)
    return gumbel if own is None else gumbel[..., own]
