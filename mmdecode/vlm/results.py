"""`Answer`: what a model answers to one question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from mmdecode.engine.trace import Round

if TYPE_CHECKING:
    from mmdecode.runs.items import Failed
    from mmdecode.vlm.requests import AnswerRequest


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model says to one question.

    Attributes:
        id: Of the request: the given one, else its place in the input.
        index: Its place in the input.
        images: Names of its images: paths, or ``image 2``.
        question: As it was asked.
        text: The answer; empty where there is an error.
        token_ids: It as ids; the one that ends it is among them.
        margin: How much rather the model begins with yes than with no, see `yes_no_margin`, by the
            logits of its main branch: no processor, and no guide but one that edits or replaces
            that branch. ``None``: its tokenizer has no such words, or margins were not asked for.
        margins: The same by branch, ``main`` as in ``margin``, and under ``guided`` with the
            guide, before a plausibility cut; infinite where the guide leaves one of the words
            alone. ``None``: as for ``margin``, or a trace was not asked for.
        first_logits: Logits that the first token was decided from, after guide and processors,
            ``(V,)``; ``None``: not requested.
        prompt: The question as the processor was given it; empty where there is an error.
        seconds: Of its batch, over the batch's size; reading images is not counted.
        passes: Scoring passes of its batch after the prompts were read.
        trace: Its rounds, see `mmdecode.engine.trace.Round`; ``None``: not asked for.
        error: What was wrong, what was expected and what to do; ``None``: nothing was.
        kind: Name of the error's class.
    """

    id: str
    index: int
    images: tuple[str, ...]
    question: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list, repr=False)
    margin: float | None = None
    margins: dict[str, float] | None = None
    first_logits: Tensor | None = field(default=None, repr=False)
    prompt: str = field(default="", repr=False)
    seconds: float = 0.0
    passes: int = 0
    trace: list[Round] | None = field(default=None, repr=False)
    error: str | None = None
    kind: str | None = None

    def changed(self, tokens: int | None = None) -> int | None:
        """How many tokens a guide decided otherwise than the model alone would have.

        Args:
            tokens: Only so many, the first ones; ``None``: all.

        Returns:
            Their number; ``None``: no trace was asked for, no guide was on, or it is one whose
            trace cannot know (see `mmdecode.engine.trace.Step`).
        """
        steps = [step for one in self.trace or () for step in one.steps]
        known = [step.changed for step in steps[:tokens] if step.changed is not None]
        return sum(known) if known else None


def failed_answer(request: AnswerRequest, failed: Failed) -> Answer:
    """An answer without a text, with the error of its request."""
    return Answer(
        id=request.id,
        index=request.index,
        images=tuple(source.name for source in request.images),
        question=request.text,
        error=failed.error,
        kind=failed.kind,
    )
