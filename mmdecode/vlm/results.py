"""`Answer`: a model's answer to one question."""

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
    """A model's answer to one question.

    Attributes:
        id: Id of the request: the given one, else its index in the input.
        index: Its index in the input.
        images: Names of its images: paths, or ``image 2``.
        question: The question, as it was asked.
        text: The answer; empty if there is an error.
        token_ids: The answer as ids, its end token included.
        margin: Margin of yes over no as the first word, see `yes_no_margin`, from the logits of the
            main branch: without processors, and without a guide unless it edits or replaces that
            branch. ``None``: the tokenizer has no such words, or margins were not requested.
        margins: The same by branch: ``main`` is ``margin``; ``guided`` is that of the guided
            logits before a plausibility cut, infinite if the guide leaves only one of the words.
            ``None``: as for ``margin``, or no trace was requested.
        first_logits: Logits that the first token was decided from, after guide and processors,
            ``(V,)``; ``None``: not requested.
        prompt: The question as it was passed to the processor; empty if there is an error.
        seconds: Seconds of its batch divided by the batch size, without reading images.
        passes: Scoring passes of its batch after prefill.
        trace: Its rounds, see `mmdecode.engine.trace.Round`; ``None``: not requested.
        error: The problem, what was expected and what to do; ``None``: no error.
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
        """Number of tokens that the guide changed, compared with the model alone.

        Args:
            tokens: Count only the first so many tokens; ``None``: all.

        Returns:
            The number; ``None``: no trace was requested, there was no guide, or its trace cannot
            tell (see `mmdecode.engine.trace.Step`).
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
