"""Results of recognition: transcripts and their parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from mmdecode.asr.decoding.fallback import Result


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of speech.

    Attributes:
        start_s, end_s: Start and end, in seconds from the beginning of the recording; where words
            are timed, the start of its first word and the end of its last one.
        text: Recognised text.
        tokens: Token ids, timestamps included.
        temperature: Temperature of the attempt that was kept.
        avg_logprob: Mean log-probability per token of its window; ``None``: no option needs it.
        no_speech_prob: No-speech probability of its window; ``None``: no option needs it, or the
            model gives none.
        looped: Whether its window ended in a repetition loop, see
            `mmdecode.asr.decoding.repetition`.
        window_s: Start of the window in which it was decoded, in seconds.
        words: Its words with times; ``None``: words are not timed.
        decided: Words of the corrected text, each with the model that decided it; ``None``: not
            corrected. ``tokens`` are always those of the recogniser.
    """

    start_s: float
    end_s: float
    text: str
    tokens: list[int]
    temperature: float = 0.0
    avg_logprob: float | None = None
    no_speech_prob: float | None = None
    looped: bool = False
    window_s: float = 0.0
    words: list[Word] | None = None
    decided: list[DecidedWord] | None = None


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """Transcript of one recording.

    Attributes:
        source: Name of the recording: its path, or ``array 2``.
        index: Its index in the input.
        text: Text of the whole recording.
        segments: Segments in order of time.
        language: Code of the language; ``None`` for models of one language.
        duration_s: Length of the recording.
        tokens: Ids of all segments, timestamps included.
        timed_by: ``model``: segments have the timestamps that the model predicted; ``windows``:
            each segment is a decoded window, with the window's start and end.
        stats: Numbers of ``windows``, ``attempts`` (repeats at other temperatures included),
            ``looped`` windows (ended in a repetition loop) and ``tokens``; of a corrected
            transcript also of windows ``edited``, and ``refused`` by the edit guard.
        n_best: Alternatives of each window, best first; ``None``: not asked for.
        uncorrected: Text of the recogniser alone; ``None``: nothing was corrected.
        truncated: Description of the missing part of the file, where `TranscribeOptions` allow
            truncated ones; ``None``: the file is complete.
        error, kind: Always ``None``; a `Failure` has them.
    """

    source: str
    index: int
    text: str
    segments: list[Segment]
    language: str | None
    duration_s: float
    tokens: list[int] = field(repr=False)
    stats: dict[str, int]
    timed_by: Literal["model", "windows"] = "model"
    n_best: list[list[Hypothesis]] | None = field(default=None, repr=False)
    uncorrected: str | None = None
    truncated: str | None = None
    error: ClassVar[None] = None
    kind: ClassVar[None] = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A recording that could not be transcribed.

    Attributes:
        source: Name of the recording.
        index: Its index in the input.
        error: The problem, what was expected and what to do.
        kind: Name of the error class.
        text: Empty, as that of an `mmdecode.vlm.Answer` with an error.
    """

    source: str
    index: int
    error: str
    kind: str
    text: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class Word:
    """A word with its time.

    Attributes:
        text: The word with the space before it: the words of a segment, joined and stripped, are
            the segment's text.
        start_s, end_s: Start and end, in seconds from the beginning of the recording.
        confidence: Mean probability of its tokens, 0 to 1.
    """

    text: str
    start_s: float
    end_s: float
    confidence: float


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One text of a window's N-best list.

    Attributes:
        text: Text of the hypothesis.
        score: Mean log-probability per token, the end token included.
        tokens: Token ids, times included, without the end token.
    """

    text: str
    score: float
    tokens: list[int]


@dataclass(frozen=True)
class Piece:
    """One segment as tokens; ``start``, ``end`` and ``window``, its window's start, in seconds.

    Times count in the audio that the model was given, without what voice activity detection cut.
    """

    start: float
    end: float
    tokens: list[int]
    result: Result
    window: float = 0.0


By = Literal["audio", "language model", "both"]


@dataclass(frozen=True, kw_only=True)
class DecidedWord:
    """A word of a corrected text.

    Attributes:
        text: The word.
        by: ``both``: each model alone would have written it, given the words before; ``language
            model``: the recogniser alone would not have; ``audio``: the language model alone would
            not have. The recogniser scores only the language model's most likely tokens, so a word
            of both may be in no hypothesis. A refused answer is replaced by the first hypothesis,
            whose words are by ``audio``.
    """

    text: str
    by: By
