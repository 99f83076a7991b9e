"""`TranscribeOptions`: every setting of a transcription, checked together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mmdecode.asr.recognizers.whisper_features import PADDINGS, Padding
from mmdecode.errors import OptionError, did_you_mean

AUTO: Literal["auto"] = "auto"
SILENT = 0.6
"""Value of ``no_speech_threshold="auto"`` where the model gives such a probability."""
FALLBACK: dict[str, Any] = {
    "temperatures": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": AUTO,
}
"""Whisper's fallback; the compression ratio is of token ids, as in transformers, not of text."""

LEAST_WINDOW_S = 0.5
"""Least ``window_s``, in seconds."""

PromptConditionType = Literal["first-segment", "all-segments"]
LoopGuard = Literal["report", "isolate", "cut"]
NBestMethod = Literal["beam", "sample"]
Mode = Literal["sequential", "chunked"]


@dataclass(frozen=True, kw_only=True)
class TranscribeOptions:
    """Settings of a transcription.

    Attributes:
        batch_size: Windows decoded at once. They are of different recordings, except in
            ``chunked`` mode and for recognisers whose windows are cut at pauses.
        timestamps: Whether the model predicts timestamps; without them each window begins where
            the one before is full, also within a word.
        language: ``en``, ``english`` or ``<|en|>``; ``None``: the checkpoint's, else detected.
        task: ``transcribe`` or ``translate``; ``None``: the checkpoint's, else transcribe.
        temperatures: All windows are decoded at the first; windows that fail a threshold are
            decoded again at the next, and so on. 0 is greedy.
        compression_ratio_threshold: A window fails if its token ids have a higher zlib compression
            ratio; ``None``: no threshold.
        logprob_threshold: A window fails if the mean log-probability of its tokens is lower;
            ``None``: no threshold.
        no_speech_threshold: A window that fails by its log-probability is skipped as silence if its
            no-speech probability is higher. ``auto``: 0.6 for models that have such a
            probability, none for others.
        scores: Whether segments have ``avg_logprob`` and ``no_speech_prob`` where no threshold asks
            for them, as openai-whisper's JSON does. The text does not depend on it.
        beams: Beams of transformers' beam search at temperature 0; 1 is greedy, and neutral. Beam
            search works with neither a draft nor a guide.
        condition_on_prev_tokens: Whether the decoder prompt of a window has the text before it.
        prompt: Text in the decoder prompt, to set names, spelling and style; or its ids, as
            ``processor.get_prompt_ids`` makes them. Same as in transformers: without
            ``condition_on_prev_tokens`` it is in the prompt of every window; with it, it is the
            beginning of the text so far.
        prompt_condition_type: ``all-segments`` keeps the prompt before the text so far in every
            window; needs ``condition_on_prev_tokens``.
        hotwords: Words at the beginning of the decoder prompt of every window, before any other
            context, as in faster-whisper. The context, the text so far included, fills at most half
            of the decoder's positions: the text so far is cut at its beginning.
        loop_guard: Treatment of a window that ends in a repetition loop, see
            `mmdecode.asr.decoding.repetition`: ``report`` marks it and is neutral; ``isolate`` also
            keeps it, and the text before it, out of the context of later windows; ``cut`` also
            removes all rounds of the loop but the first. Other windows are never changed.
        vad: Remove stretches without speech before decoding; ``True`` or ``silero``. Needs the
            extra ``vad``. See `mmdecode.asr.audio.vad`.
        vad_threshold: Speech probability of a frame from which it counts as speech.
        vad_min_speech_s: Shorter stretches of speech are ignored, in seconds.
        vad_min_silence_s: Shorter silences are kept, in seconds.
        vad_pad_s: Audio kept before and after each stretch of speech, in seconds.
        n_best: Alternatives per window, with scores; 0 for none. They cost a search of their own,
            and the transcript does not depend on them. See `mmdecode.asr.decoding.n_best`.
        n_best_method: ``beam`` search, or ``sample``.
        mode: ``sequential``: the next window begins at the end of the last segment that the model
            predicted. ``chunked``: windows begin at fixed times, those of one recording are decoded
            in parallel, and their texts are merged where they overlap: faster for a single
            recording, but the text differs and has more errors. `mmdecode.asr.decoding.chunks` has
            figures.
        overlap_s: Overlap of windows in ``chunked``, in seconds; ``None``: half a window. Less is
            quicker, and costs accuracy.
        word_timestamps: Whether segments get words with times and confidences: ``attention`` by
            the model's cross-attention, ``ctc`` by forced alignment with the checkpoint's own head,
            ``ctc:model=NAME`` with another model; ``True``: ``ctc`` where there is a head, else
            ``attention``. One pass per window more; the text does not depend on it. See
            `mmdecode.asr.alignment.cross_attention`.
        hallucination_silence_threshold: Skip segments that are probably hallucinated, by the
            probability and length of their words, next to silences longer than so many seconds;
            needs ``word_timestamps``. ``None``: neutral. See
            `mmdecode.asr.decoding.hallucinations`.
        window_s: Longest window in seconds, for recognisers whose windows are cut at pauses;
            shorter windows make shorter segments. ``None``: the model's maximum.
        max_new_tokens: Most tokens per window; ``None``: the checkpoint's limit.
        allow_truncated: Whether a file that ends earlier than its header says is transcribed as far
            as it can be read, and its transcript marked as truncated; else it is an error.
        padding: Padding of the last window, see `mmdecode.asr.recognizers.whisper_features`.

    Raises:
        OptionError: A value is out of range, or values do not fit each other.
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
    vad: bool | Literal["silero"] = False
    vad_threshold: float = 0.5
    vad_min_speech_s: float = 0.25
    vad_min_silence_s: float = 2.0
    vad_pad_s: float = 0.4
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
            raise OptionError(f"temperatures={temperatures}; expected each higher than the last")
        if self.beams < 1 or (self.beams > 1 and temperatures[0]):
            raise OptionError(
                f"beams={self.beams} and temperatures={temperatures}; expected at least 1, and "
                "temperature 0 first: beams are searched without sampling"
            )
        checks = self.compression_ratio_threshold, self.logprob_threshold
        if len(temperatures) > 1 and checks == (None, None):
            raise OptionError(
                f"temperatures={temperatures} are tried after a window failed a threshold, and "
                "none is set; set compression_ratio_threshold or logprob_threshold, or give one "
                "temperature"
            )
        if self.no_speech_threshold is not None and self.logprob_threshold is None:
            raise OptionError(
                "no_speech_threshold skips windows that failed by their log-probability, and "
                "logprob_threshold is not set; set it too (Whisper's is -1.0)"
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
                "condition_on_prev_tokens needs timestamps=True: the model learned to read its "
                "previous text with times"
            )
        if self.n_best < 0 or self.n_best == 1:
            raise OptionError(
                f"n_best={self.n_best}; expected 2 or more alternatives, or 0 for none: the best "
                "one alone is the transcript"
            )
        self._check_chunks()

    def silence_threshold(self, known: bool) -> float | None:
        """`no_speech_threshold` as a number.

        Args:
            known: Whether the model has a no-speech probability.
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
                "prompt_condition_type='all-segments' keeps the prompt before the text so far; set "
                "prompt and condition_on_prev_tokens=True too"
            )

    def _check_vad(self) -> None:
        if self.vad not in (False, True, "silero"):
            raise OptionError(f"vad={self.vad!r}; expected True, False or 'silero'")
        if not 0 < self.vad_threshold < 1:
            raise OptionError(f"vad_threshold={self.vad_threshold}; expected between 0 and 1")
        for name in ("vad_min_speech_s", "vad_min_silence_s", "vad_pad_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise OptionError(f"{name}={getattr(self, name)}; expected seconds, 0 or more")

    def _check_chunks(self) -> None:
        if self.mode == "sequential":
            if self.overlap_s is not None:
                raise OptionError(
                    f"overlap_s={self.overlap_s} is for mode='chunked'; set it, or leave overlap_s "
                    "out"
                )
            return
        if self.condition_on_prev_tokens:
            raise OptionError(
                "condition_on_prev_tokens needs mode='sequential': chunked windows are decoded "
                "side by side, before the text so far is known"
            )
        if not self.timestamps:
            raise OptionError("mode='chunked' needs timestamps=True, to tell what overlaps")
        if self.overlap_s is not None and not 0 <= self.overlap_s < math.inf:
            raise OptionError(f"overlap_s={self.overlap_s}; expected seconds, 0 or more")
