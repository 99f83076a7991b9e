"""How far a model with int8 weights is from the float model that it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmdecode.decoder import Decoder
from mmdecode.errors import InputError
from mmdecode.evaluation.audit.plain import Case, Plain, Tap


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Differences along the rounded model's own output, at every token over the whole vocabulary.

    Attributes:
        tokens: Number of compared tokens.
        largest: Largest absolute difference of a log-probability.
        mean: Mean absolute difference of the log-probabilities.
        same_choice: Share of the tokens at which both models prefer the same token.
    """

    tokens: int
    largest: float
    mean: float
    same_choice: float

    @property
    def words(self) -> str:
        """The numbers in a sentence."""
        return (
            f"rounded against float, along the rounded model's output: {self.same_choice:.1%} of "
            f"{self.tokens} choices are the same; log-probabilities differ by {self.mean:.2g} on "
            f"average, by {self.largest:.2g} at most"
        )


@torch.no_grad()
def distance(rounded: Plain, original: Plain, cases: Sequence[tuple[Case, Case]]) -> Distance:
    """Compares log-probabilities before logits processors; the float model is teacher-forced.

    Args:
        rounded: Decoding of the model with int8 weights; its tokens come from our own loop.
        original: Plain decoding of the float model.
        cases: Each input twice: as the rounded model and as the float model reads it.

    Raises:
        InputError: There is no case.
    """
    tokens, same, total, count, largest = 0, 0, 0.0, 0, 0.0
    for own, other in cases:
        tap = Tap(Decoder(None), own.name)
        rounded.run(own, tap)
        logits = original.replay(other, tap.tokens).logits
        size = min(len(logits), len(tap.logits))
        pair = [one[:size].float().log_softmax(-1).double() for one in (tap.logits, logits)]
        apart = (pair[0] - pair[1]).abs()
        tokens, count, total = tokens + size, count + apart.numel(), total + float(apart.sum())
        same += int((pair[0].argmax(-1) == pair[1].argmax(-1)).sum())
        largest = max(largest, float(apart.max()))
    if not tokens:
        raise InputError("no case; expected at least one input to compare the models on")
    return Distance(tokens=tokens, largest=largest, mean=total / count, same_choice=same / tokens)
