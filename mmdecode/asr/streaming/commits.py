"""`Commits`: the words of successive hypotheses that are committed."""

from __future__ import annotations

from collections.abc import Sequence

from mmdecode.asr.alignment.words import is_marks
from mmdecode.asr.streaming.policies import CommitPolicy, Hypotheses, OpenWord


class Commits:
    """Decides which words of successive hypotheses are committed; needs their texts only.

    Args:
        policy: Policy that decides which words are stable.

    Attributes:
        steps: Number of hypotheses so far.
        count: Number of committed words so far.
    """

    def __init__(self, policy: CommitPolicy) -> None:
        self.policy, self.steps, self.count = policy, 0, 0
        self._length = 0  # words of the newest hypothesis
        self._committed: list[str] = []  # committed words whose audio is still kept
        self._open: list[list[OpenWord]] = []  # of the last hypotheses, after the committed words

    def offer(
        self, words: Sequence[str], evidence: Sequence[float] | None = None
    ) -> tuple[int, int]:
        """Adds a hypothesis and commits its stable words.

        Args:
            words: Its words.
            evidence: Evidence for each word, of the kind that the policy needs.

        Returns:
            Start and end index of the newly committed words, the end excluded. Words from the end
            index on are provisional.
        """
        keys = [bare(word) for word in words]
        if self.policy.by_number:
            begin = min(len(self._committed), len(keys))
        else:
            begin = covered(self._committed, keys)
        numbers = evidence if evidence is not None else [None] * len(keys)
        open_words = list(map(OpenWord, keys, numbers))[begin:]
        self._open = [*self._open, open_words][-self.policy.compared :]
        self.steps, self._length = self.steps + 1, len(keys)
        count = self.policy.stable(Hypotheses(self._open, self.steps, self.count))
        self.commit(count)
        return begin, begin + count

    def commit(self, count: int) -> None:
        """Commits the next ``count`` words of the newest hypothesis."""
        taken = keys_of(self._open[-1][:count])
        self._committed += taken
        self.count += len(taken)
        self._open = [words[count:] for words in self._open if keys_of(words[:count]) == taken]

    def forget(self, words: Sequence[str]) -> None:
        """Drops committed words whose audio is no longer kept.

        Args:
            words: The words to drop: the first words of the newest hypothesis, all committed.
        """
        if self.policy.by_number:  # some may be missing in a shorter hypothesis
            every = len(words) == self._length
            count = len(self._committed) if every else len(words)
        else:
            count = covered([bare(word) for word in words], self._committed)
        del self._committed[:count]


def keys_of(words: Sequence[OpenWord]) -> list[str]:
    """Returns the words without case and punctuation."""
    return [word.key for word in words]


def bare(word: str) -> str:
    """Returns the word without case and punctuation; a word of punctuation alone is kept."""
    return "".join(c for c in word.casefold() if not is_marks(c)) or word.strip()


def covered(committed: Sequence[str], words: Sequence[str]) -> int:
    """Returns how many words at the start of a new hypothesis repeat the committed words.

    The number is the length of the prefix of ``words`` with the smallest edit distance to
    ``committed``; of equally near prefixes, the one nearest in length. It is 0 if two or more words
    are committed and none of them matches: the new hypothesis no longer contains them, as happens
    with words hallucinated in a pause.

    Args:
        committed: Committed words whose audio is still kept.
        words: Words of the new hypothesis.
    """
    errors = list(range(len(words) + 1))
    for row, word in enumerate(committed, 1):
        above, errors[0] = errors[0], row
        for column, other in enumerate(words, 1):
            best = min(above + (word != other), errors[column] + 1, errors[column - 1] + 1)
            above, errors[column] = errors[column], best
    if len(committed) > 1 and min(errors) == len(committed):
        return 0
    return min(range(len(errors)), key=lambda count: (errors[count], abs(count - len(committed))))
