"""Linear combinations of branches' logits, restricted to tokens likely in the main branch.

A branch is a pass of the model with its own inputs; the main branch has the caller's inputs. The
guided logits are ``sum_i w_i z_i``, with the raw logits z_i of the main branch and the others. Then
the plausibility cut excludes tokens whose probability in the main branch is below ``beta`` times
the largest probability there. With weights ``(1 + alpha, -alpha)`` this is contrastive decoding in
the form of VCD. Let S be the sum of the weights: where all branches agree, the guided distribution
is the main distribution at temperature 1 / S, so S > 1 sharpens it without any contrast.

Source: Li et al. 2023, arXiv:2210.15097, equations 2 and 3; Leng et al. 2024, arXiv:2311.16922,
equations 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal
from warnings import warn

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError


class Linear(Guide):
    """Computes a weighted sum of the logits of branches, then applies the plausibility cut.

    A token with logit ``-inf`` in any branch whose weight is not 0 is excluded.

    Args:
        branches: Branches other than the main one; branches with weight 0 are not run.
        weights: Weight of the main branch, then one weight per entry of ``branches``.
        beta: Plausibility cut, 0 to 1: keeps tokens with a probability of at least ``beta * max p``
            in the main branch. ``0`` keeps all tokens.
        log_space: Whether log-probabilities are combined instead of raw logits, as in guidance of
            text. The distribution is the same, but logits processors such as the repetition penalty
            treat the two differently. Without other branches raw logits are returned.

    With weight 1 for the main branch, 0 for all others and ``beta`` 0, the guide has no effect.
    """

    def __init__(
        self,
        branches: Sequence[BranchSpec],
        weights: Sequence[float],
        beta: float = 0.0,
        log_space: bool = False,
    ) -> None:
        if len(weights) != len(branches) + 1:
            raise OptionError(
                f"{len(weights)} weights for the main branch and {len(branches)} others; give "
                f"{len(branches) + 1}"
            )
        used = [pair for pair in zip(branches, weights[1:], strict=True) if pair[1]]
        self.branches = [branch for branch, _ in used]
        self.weights = [weights[0], *(weight for _, weight in used)]
        self.beta, self.log_space = checked_cut("beta", beta), log_space
        self.neutral = self.weights == [1] and not beta

    @staticmethod
    def contrast(branch: BranchSpec, alpha: float = 1.0, beta: float = 0.1) -> Linear:
        """Builds ``(1 + alpha) * main - alpha * branch``; ``alpha = 0`` applies only the cut."""
        return Linear([branch], contrast(alpha), beta)

    @property
    def total(self) -> float:
        """Returns S, the sum of the weights."""
        return float(sum(self.weights))

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Warns if a branch should have other images but has the same logits; computes nothing."""
        if "image" in self.requires_inputs:
            for branch in self.branches:
                warn_inactive(type(self).__name__, call, prefill, branch.name)

    def weigh(self, call: Call, proposal: Proposal) -> Sequence[float | Tensor]:
        """Returns the weights of the main branch and the others.

        Returns:
            Numbers, or, if weights depend on the position, tensors broadcastable to ``(B, N + 1,
            V)``.
        """
        return self.weights

    def combine(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the combined logits before the plausibility cut, ``(B, N + 1, V)``."""
        values = [outputs[name].logits for name in ("main", *(b.name for b in self.branches))]
        if self.log_space and self.branches:
            values = [value.log_softmax(-1) for value in values]
        weights = self.weigh(call, proposal)
        combined = weights[0] * values[0]
        for weight, value in zip(weights[1:], values[1:], strict=True):
            combined = combined + weight * value
        if len(values) == 1:
            return combined
        return combined.masked_fill(~(combined < torch.inf), -torch.inf)  # inf - inf is nan

    def apply(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the guided logits; see `mmdecode.engine.contracts.Guide.apply`."""
        combined = self.combine(constants, call, proposal, outputs)
        return plausible(combined, outputs["main"].logits, self.beta)


class Contrast(Linear):
    """Contrast with a branch that has another prompt or changed inputs.

    Args:
        alpha: Strength of the contrast, ``(1 + alpha) * main - alpha * branch``.
        beta: Plausibility cut, see `Linear`.
        prompt: Prompt of the other branch: the ``"same"`` as in the main branch, or only its last
            token, ``"last_token"``.
        transform: Name of a change to the inputs of the other branch, such as ``no_image``.
    """

    summary = "linear combination of branches with a plausibility cut"
    source = "Li et al. 2023; in the form of VCD, Leng et al. 2024"

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 0.1,
        prompt: Literal["same", "last_token"] = "same",
        transform: str | None = None,
    ) -> None:
        if prompt not in ("same", "last_token"):
            raise OptionError(f"prompt must be 'same' or 'last_token', got {prompt!r}")
        if prompt == "same" and transform is None:
            raise OptionError(
                "contrast needs a branch with other inputs; give prompt=last_token or a transform"
            )
        branch = BranchSpec(name="contrast", prompt=prompt, transform=transform)
        super().__init__([branch], contrast(alpha), beta)

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Warns if the transform changes no logits; computes nothing in advance."""
        for branch in self.branches:
            if branch.transform is not None:
                warn_inactive(type(self).__name__, call, prefill, branch.name)


def contrast(alpha: float) -> list[float]:
    """Returns the weights of main and negative branch, ``[1 + alpha, -alpha]``."""
    return [1 + not_negative("alpha", alpha), -alpha]


def not_negative(name: str, value: float) -> float:
    """Checks that an option is a finite number of at least 0, and returns it.

    Raises:
        OptionError: The value is negative, infinite or no number.
    """
    if isinstance(value, str) or not 0 <= value < math.inf:
        raise OptionError(f"{name} must be >= 0, got {value}; use 0 to switch it off")
    return value


def checked_cut(name: str, value: float) -> float:
    """Checks that an option is a number from 0 to 1, such as a plausibility cut, and returns it.

    Raises:
        OptionError: The value is not in 0..1.
    """
    if not 0 <= value <= 1:
        raise OptionError(f"{name} must be in 0..1, got {value}; 0 switches the cut off")
    return value


def plausible(combined: Tensor, main: Tensor, beta: float) -> Tensor:
    """Sets logits to ``-inf`` where the main branch's probability is below ``beta * max p``.

    Args:
        combined: Guided logits, ``(..., V)``.
        main: Logits of the main branch, ``(..., V)``.
        beta: Plausibility cut, as a share of the largest probability; 0: no cut.
    """
    if beta == 0:
        return combined
    floor = main.amax(-1, keepdim=True) + math.log(beta)
    return combined.masked_fill(main < floor, -torch.inf)


def generated(call: Call, proposal: Proposal) -> Tensor:
    """Returns the index of the token after the root and after each drafted node, ``(B, N + 1)``.

    The root is the last committed token. Indices count generated tokens from 0, without the prompt.
    """
    _, depths, _ = proposal.structure()
    return call.rows.length[:, None] + pad(depths, (1, 0))


def warn_inactive(guide: str, call: Call, prefill: Mapping[str, BranchOutput], name: str) -> None:
    """Warns if a branch has the same logits as the main branch in every row that has an image."""
    if call.plan.is_draft:
        return
    # the same tokens may be read by another kernel, which changes the last bits
    same = torch.isclose(prefill[name].logits, prefill["main"].logits, rtol=1e-5, atol=1e-4)
    same = same.flatten(1).all(1)
    has_image = call.plan.adapter.spans("image", call.request.prompt_ids).any(1)
    if bool((same | (has_image.any() & ~has_image)).all()):
        warn(
            f"guide {guide} is inactive: its branch {name!r} has the same scores for these prompts "
            "as the model without it; check that the prompts have images and that the guide's "
            "options change the branch's input",
            stacklevel=2,
        )


def warn_inert(guide: str, call: Call) -> None:
    """Warns if a guide that affects sampling alone is used in greedy decoding."""
    if not (call.request.do_sample or call.plan.is_draft):
        warn(
            f"guide {guide} is inert in greedy generation, where it changes no token; set "
            "do_sample=True, or leave it out",
            stacklevel=3,
        )
