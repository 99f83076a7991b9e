"""Applies the call's guide and logits warpers to a draft's logits, as to the target's logits.

A guide combines the logits of several branches, which are passes of the model with different inputs
(for example with and without the image). A drafter that runs on every branch has logits for each,
and the guide combines them in the same way. The output distribution is the same with or without
this, but drafts from the guided distribution are accepted more often.

`mmdecode.engine.call.Plan.draft_target` holds the guide and the warpers.
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
    """Returns why a guide cannot be applied to a draft's logits; ``None`` if it can be.

    A guide cannot be applied if one of its branches is run by another model or by a runner of its
    own, if a branch replaces another one after the prompt, or if the guide reads more than logits
    (hidden states, attention or tokens). ``None`` is also returned if there is no guide.
    """
    if guide is None:
        return None
    name = type(guide).__name__
    for spec in guide.branches:
        if spec.build is not None or spec.model is not None or spec.replaces_after_prefill:
            return f"guide {name} has branches of its own, which no draft runs: {spec.name!r}"
    if guide.needs(adapter) != Requirements():
        return f"guide {name} reads more than logits"
    if guide.on_host:
        return f"guide {name} reads tokens, which a draft does not know yet"
    return None


def branches_of(target: DraftTarget) -> list[BranchSpec]:
    """Returns the branches whose logits are needed to apply a guide, the main branch first."""
    return [MAIN, *(target.guide.branches if target.guide else ())]


def followed(call: Call) -> TargetDistribution:
    """Returns the guided and warped distribution, for drafters on the target's hidden states."""
    target = call.plan.draft_target
    reason = why_unguided(target.guide, call.plan.adapter)
    return TargetDistribution(call, target, reason)


def warp_alone(call: Call) -> TargetDistribution:
    """Returns the warped distribution without the guide, for drafters that run one branch."""
    target = call.plan.draft_target
    reason = None if target.guide is None else "the drafter has one branch"
    return TargetDistribution(call, target, reason)


def outputs_by_name(main: BranchOutput) -> dict[str, BranchOutput]:
    """Returns the outputs of all branches by name, given the main branch's output."""
    return {MAIN.name: main, **main.other_branches}


def branch_prompt(call: Call, spec: BranchSpec) -> Prompt:
    """Returns the prompt that a branch has read; see `BranchSpec.replaces_after_prefill`.

    If the main branch's runner did not run this branch, the prompt is built again, including the
    encoding of its images or audio.
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
        call: The generation call.
        target: Guide and warpers to apply.
        unguided: Reason why the guide is not applied; ``None``: it is applied, or there is none.

    Attributes:
        specs: Branches whose logits are needed, in the order of their rows.
        unguided: The reason, for `mmdecode.engine.contracts.DraftSession.unguided`.
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
        """Repeats values of the rows ``(B, ...)`` for each of the M branches, ``(M * B, ...)``."""
        branches = len(self.specs)
        return values if branches == 1 else values.repeat(branches, *[1] * (values.ndim - 1))

    def hidden(self, output: BranchOutput, *levels: int | str) -> Tensor:
        """Returns states of all M branches, layers joined: ``(M * B, N + 1, levels * H)``."""
        outputs = outputs_by_name(output)
        of_branches = [
            _joined([outputs[spec.name].hidden[level] for level in levels], -1)
            for spec in self.specs
        ]
        return _joined(of_branches, 0)

    @property
    def plain(self) -> bool:
        """Whether logits are returned unchanged: no guide, no warper, no image layout."""
        bare = self.target.guide is None and self.target.warp is None
        return bare and self.call.plan.adapter.layout is None

    def __call__(self, logits: Tensor, position: Tensor, own: Tensor | None = None) -> Tensor:
        """Returns unnormalised log-probabilities ``(B, k, D)`` after k nodes of one level.

        Args:
            logits: Logits of all M branches, ``(M * B, k, D)``.
            position: Index of the predicted token among the generated tokens, ``(B, 1)``.
            own: The target's id of each token of the drafter's vocabulary, ``(D,)``; ``None``: both
                vocabularies are the same.
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
    """Selects the entries ``rows (B, n)`` of states ``(B, Q, H)``, ``(B, n, H)``."""
    return states.gather(1, rows[..., None].expand(-1, -1, states.shape[-1]))


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """Concatenates tensors; a single tensor is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def along_path(states: Tensor, proposal: Proposal, path: Tensor) -> Tensor:
    """Selects the states of the root and the accepted path, ``(B, D + 1, H)``.

    For a chain all states are returned, since they are in the order of the path.

    Args:
        states: States of the root and the drafted nodes, ``(B, N + 1, H)``.
        proposal: The drafted nodes.
        path: Accepted nodes, ``(B, D)``, padded with -1.
    """
    if proposal.is_chain:
        return states
    return gathered(states, pad(path + 1, (1, 0)))  # root first


def _laid_out(call: Call, logits: Tensor, position: Tensor, own: Tensor | None) -> Tensor:
    """Sets logits ``(B, k, D)`` to -inf at tokens that the image's layout does not allow."""
    layout = call.plan.adapter.layout if call.plan.adapter is not None else None
    vocab = logits.shape[-1] if own is None else call.plan.adapter.vocab
    if layout is None or not layout.binds(vocab):
        return logits
    allowed = layout.allowed(position, vocab)
    return logits.masked_fill(~(allowed if own is None else allowed[..., own]), -inf)


def noise_of(
    kind: Kind, call: Call, position: Tensor, vocab: int, own: Tensor | None = None
) -> Tensor | None:
    """Returns Gumbel noise ``(B, Q, D)`` to add to log q when tokens are chosen by argmax.

    For coupled drafts it is the target's noise at ``position (B, Q)``; for sampled drafts the
    drafter's own noise, new in each round. ``None``: the most likely tokens are drafted. ``vocab``
    is the size of the target's vocabulary, and ``own`` is explained in `TargetDistribution`.
    """
    if kind == "deterministic":
        return None
    role, trial = (Role.TARGET, None) if kind == "coupled" else (Role.DRAFT, call.rows.rounds)
    return call.request.noise.gumbel(position, role, vocab if own is None else own, trial)
