"""A control: adds a constant to the logit margin of yes over no, whatever the image.

At the first token, the margin between the logits of yes and no grows by ``shift``, whatever the
question and the image. This is the baseline for methods whose gain may come only from more yes
answers: choose the constant that gives the same ratio of yes answers. `mmdecode.evaluation` fits it
on other images than those that are evaluated.

Source: the mechanism described by Yin et al. 2025, arXiv:2504.10020.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mmdecode.errors import OptionError
from mmdecode.guide.answers import FirstWord


class MarginShift(FirstWord):
    """Adds a constant to the margin of yes over no at the first token.

    Args:
        shift: Amount by which the margin grows, in logits; negative values favour no.
        spread: Whether half of ``shift`` is added to yes and half subtracted from no; otherwise all
            of it is added to yes.
        yes: Token ids of yes, see `mmdecode.guide.answers.FirstWord`.
        no: Token ids of no.
        tokenizer: Tokenizer that finds these ids if they are not given.

    The guide has no effect with ``shift`` 0.
    """

    summary = "control: a constant towards yes at the first token"
    source = "Yin et al. 2025, its mechanism"

    def __init__(
        self,
        shift: float = 0.0,
        spread: bool = False,
        yes: int | Iterable[int] | None = None,
        no: int | Iterable[int] | None = None,
        tokenizer: Any = None,
    ) -> None:
        if isinstance(shift, str) or not abs(shift) < float("inf"):
            raise OptionError(f"shift must be a number, got {shift!r}; 0 switches it off")
        self.shift, self.spread, self.neutral = float(shift), spread, not shift
        super().__init__(yes, no, tokenizer)

    def opening(self, main: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        """Raises the logits of yes; if ``spread`` is set, lowers the logits of no."""
        less = self.shift / 2 if self.spread else 0.0
        return main + ((self.shift - less) * yes - less * no)
