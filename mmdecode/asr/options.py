"""`TranscribeOptions`: every setting of a transcription, checked together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmdecode.asr.features import PADDINGS, Padding
from mmdecode.errors import OptionError

FALLBACK: dict[str, Any] = {
    "temperatures": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}
"""Whisper's fallback; the compression ratio is of token ids, as in transformers, not of text."""


@dataclass(frozen=True, kw_only=True)
class TranscribeOptions:
    """Settings of a transcription.

    Attributes:
        batch_size: Windows decoded at once, each of another recording.
        timestamps: Whether the model predicts times; without them windows are cut blindly.
        language: ``en``, ``english`` or ``<|en|>``; ``None``: the checkpoint's, else detected.
        task: ``transcribe`` or ``translate``; ``None``: the checkpoint's, else transcribe.
        temperatures: The first is used; each further one redoes the windows that failed a
            threshold. 0 is greedy.
        compression_ratio_threshold: A window whose token ids compress better failed.
        logprob_threshold: A window whose mean log-probability is lower failed.
        no_speech_threshold: A window that failed by its log-probability is skipped as silence
            where the no-speech probability is higher.
        condition_on_prev_tokens: Whether a window is shown the text before it.
        max_new_tokens: Most tokens per window; ``None``: the checkpoint's limit.
        padding: How a last window is filled up, see `mmdecode.asr.features`.

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
    no_speech_threshold: float | None = None
    condition_on_prev_tokens: bool = False
    max_new_tokens: int | None = None
    padding: Padding = "auto"

    def __post_init__(self) -> None:
        given = self.temperatures
        temperatures = (given,) if isinstance(given, (int, float)) else tuple(given)
        object.__setattr__(self, "temperatures", temperatures)
        if self.batch_size < 1:
            raise OptionError(f"batch_size={self.batch_size}; expected at least 1")
        if not temperatures or any(not 0 <= t <= 10 for t in temperatures):
            raise OptionError(
                f"temperatures={temperatures}; expected one or more numbers from 0 (greedy) to 10"
            )
        if list(temperatures) != sorted(set(temperatures)):
            raise OptionError(f"temperatures={temperatures}; expected each higher than the last")
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
        if self.no_speech_threshold is not None and not 0 <= self.no_speech_threshold <= 1:
            raise OptionError(
                f"no_speech_threshold={self.no_speech_threshold}; expected a probability"
            )
        if self.logprob_threshold is not None and self.logprob_threshold > 0:
            raise OptionError(
                f"logprob_threshold={self.logprob_threshold}; expected a log-probability, 0 or less"
            )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise OptionError(f"max_new_tokens={self.max_new_tokens}; expected at least 1")
        if self.task not in (None, "transcribe", "translate"):
            raise OptionError(f"task={self.task!r}; expected 'transcribe' or 'translate'")
        if self.padding not in PADDINGS:
            raise OptionError(f"padding={self.padding!r}; expected {', '.join(PADDINGS)}")
        if self.condition_on_prev_tokens and not self.timestamps:
            raise OptionError(
                "condition_on_prev_tokens needs timestamps=True: the model learned to read its "
                "previous text with times"
            )
