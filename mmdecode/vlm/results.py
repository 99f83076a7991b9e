"""`Answer`: a model's answer to one question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from mmdecode.engine.trace import Round
from mmdecode.vlm.messages import Turn

if TYPE_CHECKING:
    from mmdecode.runs.items import Failed
    from mmdecode.vlm.requests import AnswerRequest


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A model's answer to one question.

    Attributes:
        id: Id of the request: the given one, else its index in the input.
        index: Its index in the input.
        images: Names of its images: paths, or ``image 2``.
        question: The question, as it was asked.
        history: Earlier messages of its conversation.
        text: The answer; empty if there is an error.
        token_ids: The answer as ids, its end token included.
        ended: Whether the model ended the answer itself, before the limit of its tokens.
        margin: Log-odds of a first word yes over no (see `yes_no_margin`) by the model's own
            logits, before logits processors and a contrastive guide. ``None``: the tokenizer has no
            such words, or margins were not requested.
        margins: The same margin for each branch of the guide. ``main`` equals ``margin``;
            ``guided`` is computed from the guided logits before a plausibility cut, and is infinite
            if the guide leaves only one of the words. ``None``: as for ``margin``, or no trace was
            requested.
        first_logits: Logits that the first token was decided from, after guide and processors,
            ``(V,)``; ``None``: not requested.
        prompt: The question as it was passed to the processor; empty if there is an error.
        prompt_tokens: Number of tokens of the prompt, those of images included.
        seconds: Seconds that decoding its batch took, divided by the batch size; reading images is
            not counted.
        passes: Forward passes of the model over its batch, without the prefill.
        trace: Its rounds, see `mmdecode.engine.trace.Round`; ``None``: not requested.
        error: The problem, the expected input and how to fix it; ``None``: no error.
        kind: Name of the error's class; ``None``: no error.
    """

    id: str
    index: int
    images: tuple[str, ...]
    question: str
    history: tuple[Turn, ...] = ()
    text: str = ""
    token_ids: list[int] = field(default_factory=list, repr=False)
    ended: bool = False
    margin: float | None = None
    margins: dict[str, float] | None = None
    first_logits: Tensor | None = field(default=None, repr=False)
    prompt: str = field(default="", repr=False)
    prompt_tokens: int = 0
    seconds: float = 0.0
    passes: int = 0
    trace: list[Round] | None = field(default=None, repr=False)
    error: str | None = None
    kind: str | None = None

    def changed(self, tokens: int | None = None) -> int | None:
        """Counts tokens at which the guided most likely token differs from the model's own.

        Args:
            tokens: Number of tokens to count in, from the first; ``None``: all.

        Returns:
            The number; ``None``: no trace was requested, there was no guide, or the guide edits or
            replaces the model's own logits (see `mmdecode.engine.trace.Step`).
        """
        steps = [step for one in self.trace or () for step in one.steps]
        known = [step.changed for step in steps[:tokens] if step.changed is not None]
        return sum(known) if known else None


def failed_answer(request: AnswerRequest, failed: Failed) -> Answer:
    """Returns an answer without a text, with the error of its request."""
    return Answer(
        id=request.id,
        index=request.index,
        images=tuple(source.name for source in request.images),
        question=request.text,
        error=failed.error,
        kind=failed.kind,
    )
