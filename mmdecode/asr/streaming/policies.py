"""Commit policies: how many words of the newest hypothesis of a stream are stable.

A policy sees the last hypotheses without the words that are committed already. Some policies also
need a number for each word, the evidence that the word will not change: the seconds of audio after
its end, or a kind of `mmdecode.asr.alignment.evidence`, of which a word has the smallest number of
its tokens. The larger the number, the more stable the word. A policy with evidence commits the
words before the first one whose number is below a threshold. (`Stable` gets the logits of tokens,
and sees for each word how many tokens follow it.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple

from mmdecode import registry
from mmdecode.errors import OptionError, UnknownNameError

TIME = "time"
"""Kind of evidence: seconds of audio after the end of the word, from word timestamps."""
LOGIT = "logit"
"""Kind of evidence of `Stable`."""


class OpenWord(NamedTuple):
    """A word of a hypothesis that is not committed yet.

    Attributes:
        key: The word without case and punctuation.
        evidence: Evidence for it; ``None``: the policy needs none.
    """

    key: str
    evidence: float | None = None


@dataclass(frozen=True)
class Hypotheses:
    """Input of a policy.

    Attributes:
        words: Uncommitted words of the latest hypotheses, newest last.
        steps: Number of hypotheses so far, those that were dropped included.
        committed: Number of words committed so far.
    """

    words: Sequence[Sequence[OpenWord]]
    steps: int = 1
    committed: int = 0


class CommitPolicy:
    """Interface of a commit policy; its subclasses are dataclasses of their options.

    Attributes:
        evidence: Kind of evidence that it needs for each word; ``None``: none.
        by_number: Whether committed words are found in a new hypothesis by their number, since a
            translation may say them differently; else by aligning the texts.
        compared: Number of the latest hypotheses that it compares.
    """

    evidence: ClassVar[str | None] = None
    by_number: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Name in `POLICIES`, or else of the class, for messages."""
        kind = type(self)
        return next((name for name, cls in POLICIES.items() if cls is kind), kind.__name__)

    @property
    def compared(self) -> int:
        """Number of the latest hypotheses that the policy compares."""
        return 1

    def stable(self, hypotheses: Hypotheses) -> int:
        """Returns how many words of the newest hypothesis can be committed, from the first on."""
        raise NotImplementedError


@dataclass(frozen=True)
class Agreement(CommitPolicy):
    """Commits the words that the last ``n`` hypotheses agree on (LocalAgreement-n).

    Source: Liu et al. 2020, arXiv:2005.11185, section 2.2; for Whisper Macháček et al. 2023,
    arXiv:2307.14743, section 2.1.
    """

    n: int = 2

    def __post_init__(self) -> None:
        _check_whole(self, "n", 1)

    @property
    def compared(self) -> int:
        """The number ``n``."""
        return self.n

    def stable(self, hypotheses: Hypotheses) -> int:
        """Returns the common prefix length of the last hypotheses; 0 if there are fewer."""
        last = [[word.key for word in words] for words in hypotheses.words[-self.n :]]
        if len(last) < self.n:
            return 0
        same = takewhile(lambda words: len(set(words)) == 1, zip(*last, strict=False))
        return sum(1 for _ in same)


@dataclass(frozen=True)
class Hold(CommitPolicy):
    """Commits all words but the last ``n`` (hold-n; Liu et al. 2020, arXiv:2005.11185)."""

    n: int = 3

    def __post_init__(self) -> None:
        _check_whole(self, "n", 0)

    def stable(self, hypotheses: Hypotheses) -> int:
        """Returns the number of words minus ``n``, at least 0."""
        return max(0, len(hypotheses.words[-1]) - self.n)


@dataclass(frozen=True)
class Delay(CommitPolicy):
    """Commits the words that ended at least ``s`` seconds before the end of the audio.

    The simplest policy that uses times: the baseline of `AlignAtt`. Needs word timestamps.
    """

    evidence = TIME
    s: float = 0.8

    def __post_init__(self) -> None:
        _check_number(self, "s", math.inf)

    def stable(self, hypotheses: Hypotheses) -> int:
        """Returns the number of words before the first that ended, or attends, too late."""
        return _least(hypotheses, self.s)


@dataclass(frozen=True)
class AlignAtt(Delay):
    """Commits the words before the first that attends to the last ``s`` seconds of the audio.

    Each token attends to one encoder frame most, in the mean of the model's alignment heads. A
    word whose tokens attend to the very end of the audio is probably not complete.

    Source: Papi et al. 2023, arXiv:2305.11408, with ``s`` as a number of frames. There, and in
    SimulStreaming, decoding stops at such a token; here the hypothesis is decoded to its end, with
    any draft, and one teacher-forced pass gives the frames of all its tokens.
    """

    evidence = "attention"
    s: float = 0.5


@dataclass(frozen=True)
class Ending(CommitPolicy):
    """Commits words while the model is sure that the audio goes on after them.

    The end-of-audio confidence of a word is the probability that the text ends right after it: the
    probability of the end token, and of timestamps in the last half second of the audio. Words are
    committed before the first after which the text goes on with a probability below ``p``. The last
    word in the audio, and words that the model guesses beyond it, are not committed.

    Our own policy; no source.
    """

    evidence = "ending"
    p: float = 0.9

    def __post_init__(self) -> None:
        _check_number(self, "p", 1.0)

    def stable(self, hypotheses: Hypotheses) -> int:
        """Returns the number of words before the first after which the text may end."""
        return _least(hypotheses, self.p)


@dataclass(frozen=True)
class Stable(CommitPolicy):
    """Continues the last hypothesis, and commits words before its last ``m`` tokens.

    A step keeps the tokens of the last one, and decides only the last ``m`` again, see
    `mmdecode.guide.stability`. The other policies decide all words again that are not committed.

    Source: Krichli et al. 2025, arXiv:2508.12301 (CarelessWhisper).
    """

    evidence = LOGIT
    m: int = 2

    def __post_init__(self) -> None:
        _check_whole(self, "m", 0)

    def stable(self, hypotheses: Hypotheses) -> int:
        """Returns the number of words that at least ``m`` tokens follow."""
        return _least(hypotheses, self.m)


@dataclass(frozen=True)
class Wait(CommitPolicy):
    """Commits one word per step, from step ``k`` on (wait-k); the rest at the end of the audio.

    A schedule that looks at no text: for translation, where the order of words differs, and as the
    floor of comparisons. A step of the stream takes the place of a word of the source.

    Source: Ma et al. 2019, arXiv:1810.08398; for speech, steps of fixed length as in Ma et al.
    2020, arXiv:2011.02048.
    """

    by_number = True
    k: int = 3

    def __post_init__(self) -> None:
        _check_whole(self, "k", 1)

    def stable(self, hypotheses: Hypotheses) -> int:
        """Returns how many words the schedule allows, at most those there are."""
        allowed = hypotheses.steps - self.k + 1 - hypotheses.committed
        return max(0, min(allowed, len(hypotheses.words[-1])))


@dataclass(frozen=True)
class AdaptiveWait(CommitPolicy):
    """Commits a word if the model is sure of it; surer words earlier (adaptive wait-k).

    With lag k, the number of steps minus the number of committed words, a word is committed if its
    probability is at least a threshold that falls linearly from ``first`` at ``least`` steps to
    ``last`` at ``most``. With a smaller lag no word is committed; with a larger lag any word is.

    Source: Zheng et al. 2020, arXiv:2004.13169, who choose among models trained for each k; here
    one model takes all places.
    """

    evidence = "confidence"
    by_number = True
    least: int = 1
    most: int = 6
    first: float = 1.0
    last: float = 0.0

    def __post_init__(self) -> None:
        _check_whole(self, "least", 1)
        _check_whole(self, "most", self.least)
        _check_number(self, "first", 1.0)
        _check_number(self, "last", 1.0)

    def threshold(self, lag: int) -> float:
        """Returns the least probability of a word that is committed at a lag."""
        if lag < self.least:
            return math.inf
        if lag > self.most:
            return -math.inf
        share = (lag - self.least) / max(1, self.most - self.least)
        return self.first + share * (self.last - self.first)

    def stable(self, hypotheses: Hypotheses) -> int:
        """Returns the number of words before the first that is not sure enough at its lag."""
        lag = hypotheses.steps - hypotheses.committed
        found = takewhile(
            lambda pair: _of(pair[1]) >= self.threshold(lag - pair[0]),
            enumerate(hypotheses.words[-1]),
        )
        return sum(1 for _ in found)


POLICIES: Mapping[str, type[CommitPolicy]] = {
    "agreement": Agreement,
    "hold": Hold,
    "delay": Delay,
    "alignatt": AlignAtt,
    "ending": Ending,
    "stable": Stable,
    "wait": Wait,
    "adaptive-wait": AdaptiveWait,
}
"""Commit policies by name."""


def policy_of(spec: CommitPolicy | str) -> CommitPolicy:
    """Makes a policy of its name with options, such as ``agreement`` or ``hold:n=4``.

    Raises:
        UnknownNameError: There is no such policy.
        OptionError: The policy has no such option, or the value is out of range.
    """
    if isinstance(spec, CommitPolicy):
        return spec
    if not isinstance(spec, str):
        raise OptionError(f"policy={spec!r:.80}; expected a name such as 'agreement:n=3'")
    [(name, options)] = registry.parse("policy", spec)
    if name not in POLICIES:
        raise UnknownNameError.of("policy", name, POLICIES)
    policy: Any = POLICIES[name]
    known = {field.name: field.default for field in fields(policy)}
    if unknown := set(options) - set(known):
        usual = ",".join(f"{key}={value:g}" for key, value in known.items())
        raise OptionError(
            f"policy={spec!r}: {name} has no option {unknown.pop()!r}; expected '{name}:{usual}', "
            "or other values of these"
        )
    return policy(**options)


def _least(hypotheses: Hypotheses, threshold: float) -> int:
    """Number of words of the newest hypothesis before the first with less evidence."""
    words = hypotheses.words[-1]
    return sum(1 for _ in takewhile(lambda word: _of(word) >= threshold, words))


def _of(word: OpenWord) -> float:
    return -math.inf if word.evidence is None else word.evidence


def _check_whole(policy: CommitPolicy, field: str, least: int) -> None:
    value = getattr(policy, field)
    if not isinstance(value, int) or value < least:
        raise OptionError(
            f"policy {policy.name}: {field}={value!r}; expected a whole number from {least} on"
        )


def _check_number(policy: CommitPolicy, field: str, most: float) -> None:
    value = getattr(policy, field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        upper = "" if math.isinf(most) else f" to {most:g}"
        raise OptionError(
            f"policy {policy.name}: {field}={value!r}; expected a number from 0{upper}"
        )
