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
        start_s, end_s: When, in seconds from the beginning of the recording; where words are timed,
            the start of its first word and the end of its last one.
        text: Recognised text.
        tokens: Token ids, timestamps included.
        temperature: At which it was decoded.
        avg_logprob: Mean log-probability of its window; ``None``: no threshold asked for it.
        no_speech_prob: No-speech probability of its window; ``None``: no threshold asked for it, or
            the model gives none.
        looped: Whether its window ended in a loop, see `mmdecode.asr.decoding.repetition`.
        window_s: When the window began in which it was decoded.
        words: Its words; ``None``: nothing asked for them.
        decided: The words of a corrected text, and who decided each; ``None``: not corrected. The
            tokens stay those of the recogniser.
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
        source: Its name: the path, or ``array 2``.
        index: Its place in the input.
        text: All of it.
        segments: In order.
        language: Code of the language; ``None`` for models of one language.
        duration_s: Length of the recording.
        tokens: Ids of all segments, timestamps included.
        timed_by: ``model``: its tokens say when segments begin and end; ``windows``: segments are
            the windows that were decoded, with the times at which they were cut.
        stats: ``windows``, ``attempts`` (repeats at other temperatures included), ``looped``
            windows and ``tokens``; of a corrected one also windows ``edited``, and ``refused``
            where the correction was no transcript.
        n_best: Alternatives of each window, best first; ``None``: not asked for.
        uncorrected: Text of the recogniser alone; ``None``: nothing was corrected.
        truncated: Missing part of the file, where `TranscribeOptions` allow that; ``None``:
            nothing is.
        error, kind: ``None``; a `Failure` has them.
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
        source: Its name.
        index: Its place in the input.
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
    """A word and when it was said.

    Attributes:
        text: With the space before it: the words of a segment, joined and stripped, are its text.
        start_s, end_s: In seconds from the beginning of the recording.
        confidence: Mean probability of its tokens, 0 to 1.
    """

    text: str
    start_s: float
    end_s: float
    confidence: float


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One of the texts a window may hold.

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
    """One segment, times in seconds; ``window`` is where the window began that it is of."""

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
        text: It.
        by: ``both``: each alone would have written it, given the words before; ``language model``:
            the audio alone would not; ``audio``: the language model alone would not. The audio is
            asked about the language model's most likely tokens alone, so that a word of both may be
            in no hypothesis. An answer that was refused is the first hypothesis, of the audio.
    """

    text: str
    by: By
