"""A control: the model is asked to answer yes.

An instruction is appended to the question, and the model answers the extended question; the image
stays the same.

Source: PBA of Yin et al. 2025, arXiv:2504.10020.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmdecode.engine.adapter import BranchSpec
from mmdecode.engine.call import Call
from mmdecode.engine.contracts import BranchOutput, Guide
from mmdecode.engine.proposal import Proposal
from mmdecode.errors import OptionError
from mmdecode.guide.linear import warn_inactive

YES = "Answer yes whenever possible."


class PromptBias(Guide):
    """Asks the model to answer yes; needs the text of the question, see `mmdecode.vlm.Answerer`.

    Args:
        instruction: Text that is appended to the question. If it is empty, the guide has no effect.
    """

    summary = "control: the model is asked to answer yes (PBA)"
    source = "Yin et al. 2025"
    requires_inputs = ("image",)

    def __init__(self, instruction: str = YES) -> None:
        if not isinstance(instruction, str):
            raise OptionError(f"instruction must be a text, got {instruction!r}")
        self.neutral = not instruction.strip()
        change = partial(_instructed, instruction.strip())
        self.branches = (
            BranchSpec(
                name="instructed",
                transform="questions",
                transform_options={"change": change},
                stage=2,
                replaces_after_prefill="main",
            ),
        )

    def begin(self, call: Call, prefill: Mapping[str, BranchOutput]) -> None:
        """Returns ``None``: this guide computes nothing in advance."""
        warn_inactive(type(self).__name__, call, prefill, "instructed")

    def apply(
        self, constants: None, call: Call, proposal: Proposal, outputs: Mapping[str, BranchOutput]
    ) -> Tensor:
        """Computes the guided logits; see `mmdecode.engine.contracts.Guide.apply`."""
        return outputs["main"].logits


def _instructed(instruction: str, question: Any, draw: torch.Generator) -> Any:
    return dataclasses.replace(question, text=f"{question.text} {instruction}")
