"""ICD: contrasts the model with itself under a disturbing instruction.

The guided logits are ``(1 + alpha) z(question) - alpha z(instruction, question)``; then implausible
tokens are excluded, see `mmdecode.guide.linear`. The instruction is put before the text of the
question, after images at its beginning. One of five instructions is chosen at random for each
request.

Source: Wang et al. 2024, arXiv:2403.18715; the instructions are the release's.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import torch

from mmdecode.engine.adapter import BranchSpec
from mmdecode.errors import OptionError
from mmdecode.guide.linear import Linear, contrast

ROLES = (
    "You are an object detector to recognize every different objects.",
    "You are an object detector to recognize every different objects by focusing the shapes, "
    "colors and relationships of objects.",
    "I want you avoid any specific identification or categorization of the objects depicted.",
    "You are a confused objects detector to provide a fuzzy overview or impression of the image.",
    "You are an object detector to provide a general overview or impression of the image.",
)


class ICD(Linear):
    """Instruction contrastive decoding; needs the question's text, see `mmdecode.vlm.Answerer`.

    Args:
        alpha: Strength of the contrast.
        beta: Plausibility cut: excludes tokens with a main probability below ``beta * max p``.
        role: Index into `ROLES`, or another instruction; ``None``: one at random per request.

    The guide has no effect with ``alpha`` 0 and ``beta`` 0.
    """

    summary = "away from the model's scores under a disturbing instruction"
    source = "Wang et al. 2024"
    requires_inputs = ("image",)

    def __init__(self, alpha: float = 1.0, beta: float = 0.1, role: int | str | None = None):
        roles: tuple[str, ...] = ROLES
        if isinstance(role, str) and role.strip():
            roles = (role.strip(),)
        elif role is not None:
            if isinstance(role, (bool, str)) or not 0 <= role < len(ROLES):
                raise OptionError(
                    f"role must be an instruction, or one of 0..{len(ROLES) - 1}, got {role!r}"
                )
            roles = (ROLES[role],)
        change = partial(_instructed, roles)
        branch = BranchSpec(
            name="disturbed", transform="questions", transform_options={"change": change}
        )
        super().__init__([branch], contrast(alpha), beta)


def _instructed(roles: tuple[str, ...], question: Any, draw: torch.Generator) -> Any:
    role = roles[int(torch.randint(len(roles), (), generator=draw))]
    images = re.match(rf"(({'|'.join(_marks(question))})\s*)*", question.text)
    head = images.group() if images else ""
    text = f"{head}{role} {question.text[len(head) :]}"
    return dataclasses.replace(question, text=text)


def _marks(question: Any) -> list[str]:
    """Patterns of image placeholders: ``<image>``, and a processor's special tokens."""
    added = getattr(getattr(question, "tokenizer", None), "added_tokens_decoder", {}).values()
    return [re.escape(mark) for mark in ("<image>", *(str(own) for own in added if own.special))]
