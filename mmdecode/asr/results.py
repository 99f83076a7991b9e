"""Results of recognition: transcripts and their parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from mmdecode.asr.decoding.fallback import Result


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A segment of a transcript: its text, with start and end time.

    Attributes:
        start_s, end_s: Start and end, in seconds from the beginning of the recording. With word
            timestamps, they are the start of the first word and the end of the last word.
        text: Recognised text.
        tokens: Token ids, timestamps included.
        temperature: Temperature of the decoding attempt that was kept.
        avg_logprob: Mean log-probability per token of its window; ``None``: no option asked for it.
        no_speech_prob: No-speech probability of its window; ``None``: no option asked for it, or
            the model does not predict it.
        looped: Whether its window ended in a repetition loop, see
            `mmdecode.asr.decoding.repetition`.
        window_s: Start of the window in which the segment was decoded, in seconds.
        words: Its words with times; ``None``: word timestamps are off.
        decided: Words of the corrected text, each with the model that decided it; ``None``: the
            text was not corrected. ``tokens`` always hold the uncorrected output of the recogniser.
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
            ``looped`` windows (ended in a repetition loop) and ``tokens``. A corrected transcript
            also has the numbers of windows ``edited``, and of those ``refused`` by the edit guard.
        n_best: N-best list of each window, best text first; ``None``: it was not asked for.
        uncorrected: Text of the recogniser before correction; ``None``: nothing was corrected.
        truncated: Description of the missing part of a truncated file, which
            ``TranscribeOptions.allow_truncated`` admits; ``None``: the file is complete.
        error, kind: Always ``None``, so that results can be checked like a `Failure`.
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
        error: Message that says what is wrong, what was expected and what to do.
        kind: Class name of the error.
        text: Always empty, so that code that reads ``text`` of every result works.
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
        text: The word with the space before it. The words of a segment, concatenated and stripped,
            are the segment's text.
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
        tokens: Token ids, timestamps included, without the end token.
    """

    text: str
    score: float
    tokens: list[int]


@dataclass(frozen=True)
class Piece:
    """A segment as tokens, with its ``start`` and ``end`` and the start of its ``window``.

    All three are in seconds of the audio after voice activity detection has cut out the silence.
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
        by: Model that chose the word, given the words before it. ``both``: each model ranks it
            first; ``language model``: only the language model does; ``audio``: the language model
            ranks another word first. The recogniser scores only the language model's most likely
            tokens, so a word of ``both`` may be in no hypothesis. If the edit guard refuses the
            correction, the first hypothesis is used, and all its words are of ``audio``.
    """

    text: str
    by: By
