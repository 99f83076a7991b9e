"""`TranscribeOptions`: all settings of a transcription, with checks of their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from mmdecode.asr.recognizers.whisper_features import PADDINGS, Padding
from mmdecode.errors import OptionError, did_you_mean

AUTO: Literal["auto"] = "auto"
SILENT = 0.6
"""Value of ``no_speech_threshold="auto"`` for models that predict a no-speech probability."""
FALLBACK: dict[str, Any] = {
    "temperatures": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": AUTO,
}
"""Options of Whisper's temperature fallback; the compression ratio is of token ids, not of text."""

LEAST_WINDOW_S = 0.5
"""Smallest allowed ``window_s``, in seconds."""

PromptConditionType = Literal["first-segment", "all-segments"]
LoopGuard = Literal["report", "isolate", "cut"]
NBestMethod = Literal["beam", "sample"]
Mode = Literal["sequential", "chunked"]


@dataclass(frozen=True, kw_only=True)
class VoiceActivitySettings:
    """Settings of a detector of speech, see the fields of `TranscribeOptions` with ``vad_``."""

    threshold: float
    min_speech_s: float
    min_silence_s: float
    pad_s: float


SILERO = VoiceActivitySettings(threshold=0.5, min_speech_s=0.25, min_silence_s=2.0, pad_s=0.4)
BLANKS = VoiceActivitySettings(threshold=0.3, min_speech_s=0.0, min_silence_s=0.7, pad_s=0.15)
"""Settings of a CTC head, which finds a word in a frame or two, close to its edges."""


@dataclass(frozen=True, kw_only=True)
class TranscribeOptions:
    """Settings of a transcription.

    Attributes:
        batch_size: Number of windows decoded at once. They belong to different recordings, except
            in ``chunked`` mode and for recognisers whose windows are cut at pauses.
        timestamps: Whether the model predicts timestamps. Without them each window begins where
            the window before ended, even within a word.
        language: ``en``, ``english`` or ``<|en|>``; ``None``: the checkpoint's language, or else
            the language that the model detects.
        task: ``transcribe`` or ``translate``; ``None``: the checkpoint's, else ``transcribe``.
        temperatures: Sampling temperatures, 0 for greedy decoding. All windows are decoded at the
            first; windows that fail a threshold are decoded again at the next, and so on.
        compression_ratio_threshold: A window fails if its token ids have a higher zlib compression
            ratio; ``None``: no threshold.
        logprob_threshold: A window fails if the mean log-probability of its tokens is lower;
            ``None``: no threshold.
        no_speech_threshold: A window that fails ``logprob_threshold`` is skipped as silence if its
            no-speech probability is higher than this. ``auto``: 0.6 for models that predict such a
            probability, no threshold for others.
        scores: Whether ``avg_logprob`` and ``no_speech_prob`` of segments are computed even if no
            threshold needs them; ``whisper-json`` output does. The text does not depend on it.
        beams: Beams of transformers' beam search at temperature 0; 1 is greedy decoding. Beam
            search cannot be combined with a draft or a guide.
        condition_on_prev_tokens: Whether the decoder prompt of a window contains the text of the
            windows before it.
        prompt: Text in the decoder prompt that sets names, spelling and style, or its ids from
            ``processor.get_prompt_ids``. Without ``condition_on_prev_tokens``, as in transformers,
            the prompt of every window contains it; with it, the previous text begins with it.
        prompt_condition_type: ``first-segment``: see ``prompt``; ``all-segments``: every window has
            the prompt before the previous text; needs ``condition_on_prev_tokens``.
        hotwords: Words at the beginning of the decoder prompt of every window, before the prompt
            and the previous text, as in faster-whisper. All of these together fill at most half of
            the decoder's positions; the oldest part of the previous text is dropped.
        loop_guard: Treatment of a window that ends in a repetition loop, see
            `mmdecode.asr.decoding.repetition`. ``report`` only marks it; ``isolate`` also removes
            it, and the text before it, from the prompts of later windows; ``cut`` also reduces the
            loop to its first repetition. Other windows are not affected.
        vad: Whether stretches without speech are removed before decoding: ``True`` or ``silero``,
            which needs the extra ``vad``; ``ctc``, where the CTC head that ships with the model
            finds nothing, or ``ctc:head=FOLDER``. See `mmdecode.asr.audio.vad`.
        vad_threshold: Probability from which a frame of audio counts as speech. ``None``, here and
            in the next three: the value of the detector, `SILERO` or `BLANKS`.
        vad_min_speech_s: Stretches of speech shorter than this are ignored, in seconds.
        vad_min_silence_s: Silences shorter than this are not removed, in seconds.
        vad_pad_s: Audio kept before and after each stretch of speech, in seconds.
        n_best: Number of texts in each window's N-best list, with scores; 0: no lists. They are
            found by a separate search, and the transcript does not depend on them. See
            `mmdecode.asr.decoding.n_best`.
        n_best_method: ``beam`` for beam search, or ``sample``.
        mode: ``sequential``: the next window begins at the end of the last segment that the model
            predicted. ``chunked``: windows begin at fixed times, the windows of a recording are
            decoded in parallel, and their texts are merged where they overlap: faster for a single
            recording, but the text differs and has more errors. `mmdecode.asr.decoding.chunks` has
            measurements.
        overlap_s: Overlap of windows in ``chunked`` mode, in seconds; ``None``: half a window. Less
            overlap is faster and less accurate.
        word_timestamps: Whether segments get words with times and confidences: ``attention`` by
            the model's cross-attention, ``ctc`` by forced alignment with the CTC head in the
            checkpoint's folder, ``ctc:model=NAME`` with another CTC model; ``True``: ``ctc`` if
            there is a head, else ``attention``. Costs one more forward pass per window; the text
            does not depend on it. See `mmdecode.asr.alignment.cross_attention`.
        hallucination_silence_threshold: Skips segments next to silences longer than this, in
            seconds, that are probably hallucinated, as the probability and length of their words
            tell; needs ``word_timestamps``. ``None``: nothing is skipped. See
            `mmdecode.asr.decoding.hallucinations`.
        window_s: Longest window in seconds, for recognisers whose windows are cut at pauses;
            shorter windows make shorter segments. ``None``: the model's maximum.
        max_new_tokens: Most tokens per window; ``None``: the checkpoint's limit.
        allow_truncated: Whether a file that is shorter than its header says is transcribed as far
            as it can be read, and its transcript marked as truncated; otherwise it is an error.
        padding: Padding of the last window, see `mmdecode.asr.recognizers.whisper_features`.

    Raises:
        OptionError: A value is out of range, or two options contradict each other.
    """

    batch_size: int = 8
    timestamps: bool = True
    language: str | None = None
    task: str | None = None
    temperatures: tuple[float, ...] = (0.0,)
    compression_ratio_threshold: float | None = None
    logprob_threshold: float | None = None
    no_speech_threshold: float | Literal["auto"] | None = None
    scores: bool = False
    beams: int = 1
    condition_on_prev_tokens: bool = False
    prompt: str | Sequence[int] | None = None
    prompt_condition_type: PromptConditionType = "first-segment"
    hotwords: str | None = None
    loop_guard: LoopGuard = "isolate"
    vad: bool | str = False
    vad_threshold: float | None = None
    vad_min_speech_s: float | None = None
    vad_min_silence_s: float | None = None
    vad_pad_s: float | None = None
    n_best: int = 0
    n_best_method: NBestMethod = "beam"
    mode: Mode = "sequential"
    overlap_s: float | None = None
    word_timestamps: bool | str = False
    hallucination_silence_threshold: float | None = None
    window_s: float | None = None
    max_new_tokens: int | None = None
    allow_truncated: bool = False
    padding: Padding = "auto"

    def __post_init__(self) -> None:
        given = self.temperatures
        temperatures = (given,) if isinstance(given, (int, float)) else tuple(given)
        object.__setattr__(self, "temperatures", temperatures)
        if self.window_s is not None and not LEAST_WINDOW_S <= self.window_s < math.inf:
            raise OptionError(
                f"window_s={self.window_s}; expected seconds, {LEAST_WINDOW_S} or more"
            )
        if self.batch_size < 1:
            raise OptionError(f"batch_size={self.batch_size}; expected at least 1")
        if not temperatures or any(not 0 <= t <= 10 for t in temperatures):
            raise OptionError(
                f"temperatures={temperatures}; expected one or more numbers from 0 (greedy) to 10"
            )
        if list(temperatures) != sorted(set(temperatures)):
            raise OptionError(f"temperatures={temperatures}; expected numbers in rising order")
        if self.beams < 1 or (self.beams > 1 and temperatures[0]):
            raise OptionError(
                f"beams={self.beams} and temperatures={temperatures}; expected at least 1 beam, "
                "and 0 as the first temperature, since beam search does not sample"
            )
        checks = self.compression_ratio_threshold, self.logprob_threshold
        if len(temperatures) > 1 and checks == (None, None):
            raise OptionError(
                f"temperatures={temperatures} are tried when a window fails a threshold, but no "
                "threshold is set; set compression_ratio_threshold or logprob_threshold, or give "
                "only one temperature"
            )
        if self.no_speech_threshold is not None and self.logprob_threshold is None:
            raise OptionError(
                "no_speech_threshold skips windows that fail logprob_threshold, which is not set; "
                "set logprob_threshold too (Whisper's is -1.0)"
            )
        silent = self.no_speech_threshold
        if silent not in (None, AUTO) and (isinstance(silent, str) or not 0 <= silent <= 1):
            raise OptionError(f"no_speech_threshold={silent!r}; expected a probability, or 'auto'")
        if self.logprob_threshold is not None and self.logprob_threshold > 0:
            raise OptionError(
                f"logprob_threshold={self.logprob_threshold}; expected a log-probability, 0 or less"
            )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise OptionError(f"max_new_tokens={self.max_new_tokens}; expected at least 1")
        if self.task not in (None, "transcribe", "translate"):
            raise OptionError(f"task={self.task!r}; expected 'transcribe' or 'translate'")
        silence = self.hallucination_silence_threshold
        if silence is not None and not (
            0 <= silence < math.inf and self.word_timestamps and self.mode == "sequential"
        ):
            raise OptionError(
                f"hallucination_silence_threshold={silence}; expected seconds, 0 or more, together "
                "with word_timestamps and mode='sequential'"
            )
        self._check_names()
        self._check_prompt()
        self._check_vad()
        if self.condition_on_prev_tokens and not self.timestamps:
            raise OptionError(
                "condition_on_prev_tokens needs timestamps=True: the model was trained on previous "
                "text with timestamps"
            )
        if self.n_best < 0 or self.n_best == 1:
            raise OptionError(
                f"n_best={self.n_best}; expected 2 or more texts per window, or 0 for no lists: "
                "the single best text is the transcript itself"
            )
        self._check_chunks()

    def silence_threshold(self, known: bool) -> float | None:
        """Returns `no_speech_threshold` as a number; ``None``: no threshold.

        Args:
            known: Whether the model predicts a no-speech probability.
        """
        if self.no_speech_threshold == AUTO:
            return SILENT if known else None
        return self.no_speech_threshold

    def _check_names(self) -> None:
        kinds = {
            "padding": PADDINGS,
            "prompt_condition_type": get_args(PromptConditionType),
            "loop_guard": get_args(LoopGuard),
            "n_best_method": get_args(NBestMethod),
            "mode": get_args(Mode),
        }
        for name, known in kinds.items():
            value = getattr(self, name)
            if value not in known:
                hint = did_you_mean(str(value), known)
                raise OptionError(f"{name}={value!r}{hint}; expected {', '.join(known)}")

    def _check_prompt(self) -> None:
        if self.prompt is not None and not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", tuple(int(token) for token in self.prompt))
        everywhere = self.prompt_condition_type == "all-segments"
        if everywhere and (self.prompt is None or not self.condition_on_prev_tokens):
            raise OptionError(
                "prompt_condition_type='all-segments' puts the prompt before the previous text; it "
                "needs prompt and condition_on_prev_tokens=True too"
            )

    @property
    def vad_by_head(self) -> bool:
        """Whether a CTC head finds the speech, see `mmdecode.asr.audio.blanks`."""
        return str(self.vad).partition(":")[0] == "ctc"

    @property
    def voice_activity(self) -> VoiceActivitySettings:
        """Settings of the detector of speech: the ``vad_`` fields that are given, else its own."""
        own = BLANKS if self.vad_by_head else SILERO
        given = {name: getattr(self, f"vad_{name}") for name in vars(own)}
        return replace(own, **{name: value for name, value in given.items() if value is not None})

    def _check_vad(self) -> None:
        named = str(self.vad).startswith("ctc:head=")
        if self.vad not in (False, True, "silero", "ctc") and not named:
            raise OptionError(
                f"vad={self.vad!r}; expected True, False, 'silero', 'ctc' or 'ctc:head=FOLDER'"
            )
        found = vars(self.voice_activity)
        if not 0 < found["threshold"] < 1:
            raise OptionError(f"vad_threshold={self.vad_threshold}; expected above 0 and below 1")
        for name in ("min_speech_s", "min_silence_s", "pad_s"):
            if not 0 <= found[name] < math.inf:
                raise OptionError(f"vad_{name}={found[name]}; expected seconds, 0 or more")

    def _check_chunks(self) -> None:
        if self.mode == "sequential":
            if self.overlap_s is not None:
                raise OptionError(
                    f"overlap_s={self.overlap_s} needs mode='chunked'; set that mode, or leave "
                    "overlap_s out"
                )
            return
        if self.condition_on_prev_tokens:
            raise OptionError(
                "condition_on_prev_tokens needs mode='sequential': in chunked mode windows are "
                "decoded in parallel, before the text of the windows before them is known"
            )
        if not self.timestamps:
            raise OptionError("mode='chunked' needs timestamps=True, to merge overlapping windows")
        if self.overlap_s is not None and not 0 <= self.overlap_s < math.inf:
            raise OptionError(f"overlap_s={self.overlap_s}; expected seconds, 0 or more")
