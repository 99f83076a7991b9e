"""`EditGuard`: limits on how far a corrected text may differ from its hypotheses."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmdecode.asr.correction.prompts import (
    Template,
)
from mmdecode.errors import (
    OptionError,
)

if TYPE_CHECKING:
    pass


_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
"""Characters of Thai, Lao, Burmese, Khmer, Kana and Han, which are written without spaces."""

_WORD = re.compile(rf"[{_SPACELESS}]|[^\W_{_SPACELESS}]+(?:['\u2019][^\W_{_SPACELESS}]+)*")

_ITEM = re.compile(r"\(?\d+[.):]\s|[-*\u2022]\s")


_TALK = re.compile(
    r"sure\b|certainly\b|of course\b|here(?: is| are|'s)\b|as an? (?:ai|language)\b"
    r"|i(?: am|'m) sorry\b|i (?:cannot|can't|can not)\b"
    r"|the (?:(?:best|corrected|correct|true|final|likeliest|most likely) )+"
    r"(?:transcri|hypothes|sentence|text|answer)"
    r"|(?:(?:corrected|correct|true|final) )?(?:transcri\w+|response|answer|output|text) ?:",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class EditGuard:
    """Accepts a model's answer as a transcript, or refuses it as too far from the hypotheses.

    Words are compared without case and punctuation. In scripts without spaces every character
    counts as a word.

    Attributes:
        distance: Largest word edit distance to the nearest hypothesis, as a share of that
            hypothesis' words; one edit is always allowed. Infinity: no limit.
        shorter, longer: Smallest and largest length of the answer in characters, divided by the
            length of the nearest hypothesis. 0 and infinity: no limits.
        novel: Most words of the answer that are in no hypothesis; with 0 an answer can only select
            and combine words of the hypotheses. Infinity: no limit.

    Raises:
        OptionError: A limit is negative, or ``shorter <= 1 <= longer`` does not hold.
    """

    distance: float = 0.3
    shorter: float = 0.5
    longer: float = 2.0
    novel: float = math.inf

    def __post_init__(self) -> None:
        if not (min(self.distance, self.novel) >= 0 and 0 <= self.shorter <= 1 <= self.longer):
            raise OptionError(
                f"distance={self.distance}, shorter={self.shorter}, longer={self.longer}, "
                f"novel={self.novel}; expected 0 or more, and shorter <= 1 <= longer"
            )

    def __call__(
        self, answer: str, hypotheses: Sequence[str], template: Template | None = None
    ) -> str | None:
        """Returns the reason why an answer is refused; ``None``: it is accepted.

        Args:
            answer: Answer of the model.
            hypotheses: All hypotheses of the list.
            template: Template of the prompt; an answer that repeats its text is refused.
        """
        reply, texts = answer.strip(), [text.strip() for text in hypotheses]
        if not reply:
            return None if "" in texts else "it is empty"
        if "\n" in reply:
            return "it has several lines"
        for line in template.own_lines if template else ():
            if _within(line, reply) and not any(_within(line, text) for text in texts):
                return f"it repeats the prompt: {line[:40]!r}"
        for what, pattern in (("a list", _ITEM), ("talk about the task", _TALK)):
            found = pattern.match(reply)
            if found and not any(map(pattern.match, texts)):
                return f"it begins like {what}: {found[0].strip()!r}"
        words = words_of(reply)
        edits, _, nearest = min(
            (edits_of(words_of(text), words), rank, text) for rank, text in enumerate(texts)
        )
        if edits > max(1, self.distance * len(words_of(nearest))):
            return (
                f"it is {edits} word edits from the nearest hypothesis, which has "
                f"{len(words_of(nearest))} words"
            )
        known = {word for text in texts for word in words_of(text)}
        novel = [word for word in words if word not in known]
        if len(novel) > self.novel:
            return f"it has words that are in no hypothesis: {', '.join(novel)}"
        ratio = len(reply) / max(len(nearest), 1)
        if not self.shorter <= ratio <= self.longer:
            return f"it is {ratio:.2f} times as long as the nearest hypothesis"
        return None


GUARD = EditGuard()


def words_of(text: str) -> list[str]:
    """Splits a text into words without case and punctuation; into characters without spaces."""
    return _WORD.findall(text.casefold())


def edits_of(left: Sequence[str], right: Sequence[str]) -> int:
    """Returns the word edit distance: the fewest substitutions, deletions and insertions."""
    costs = list(range(len(right) + 1))
    for row, word in enumerate(left, 1):
        diagonal, costs[0] = row - 1, row
        for column, other in enumerate(right, 1):
            kept = diagonal + (word != other)
            diagonal = costs[column]
            costs[column] = min(kept, costs[column] + 1, costs[column - 1] + 1)
    return costs[-1]


def _within(part: str, text: str) -> bool:
    return part.casefold() in text.casefold()
