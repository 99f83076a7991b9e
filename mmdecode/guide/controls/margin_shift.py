"""A control: adds a constant to the margin of yes, whatever the image.

The margin between yes and no moves by ``shift`` at the first token, whatever the question and
image. A method that only moves answers towards yes is matched by the constant that gives its
yes-ratio; fit it on other images (`mmdecode.evaluation` does).

Source: the mechanism described by Yin et al. 2025, arXiv:2504.10020.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from mmdecode.errors import OptionError
from mmdecode.guide.answers import FirstWord


class MarginShift(FirstWord):
    """Constant shift of the yes-no margin.

    Args:
        shift: Logits by which the margin grows; negative: towards no.
        spread: Half of it is taken from no, so that other tokens keep their rank between the two;
            else yes gets all of it.
        yes: See `mmdecode.guide.answers.FirstWord`.
        no: See ``yes``.
        tokenizer: See ``yes``.

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
        """Yes gains, and no loses where the shift is spread."""
        less = self.shift / 2 if self.spread else 0.0
        return main + ((self.shift - less) * yes - less * no)
